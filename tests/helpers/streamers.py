"""A streamer that records what it receives."""

import torch
from transformers.generation.streamers import BaseStreamer


class RecordingStreamer(BaseStreamer):
    """Keeps every chunk as lists, and counts the calls of `end`."""

    def __init__(self) -> None:
        self.chunks: list[list] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.chunks.append(value.tolist())

    def end(self) -> None:
        self.ended += 1
