"""Logits processors of each kind that the decoding loop treats differently."""

import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer


class PrefixReader(LogitsProcessor):
    """Adds a bias that depends on all tokens of the row; not declared row-wise, so rows advance in lockstep."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        favourite = (input_ids * position).sum(dim=1) % scores.shape[1]
        return scores.scatter_add(1, favourite[:, None], scores.new_full((len(scores), 1), 0.3))


class RowWisePrefixReader(PrefixReader):
    """The same, declared row-wise."""

    row_wise = True


class RowWiseIdentity(LogitsProcessor):
    """Changes nothing, but makes verification choose position by position."""

    row_wise = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class StatefulReader(LogitsProcessor):
    """Keeps a decaying count of all tokens; fails unless it is called once per position, in order."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.memory is None:
            self.memory = torch.zeros_like(scores)
        else:
            assert input_ids.shape[1] == self.seen + 1
            self.memory = 0.5 * self.memory
            self.memory.scatter_add_(1, input_ids[:, -1:], scores.new_ones(len(scores), 1))
        self.seen = input_ids.shape[1]
        return scores - self.memory


class RecordingStreamer(BaseStreamer):
    """Keeps every chunk as lists, and counts the calls of `end`."""

    def __init__(self) -> None:
        self.chunks: list[list] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.chunks.append(value.tolist())

    def end(self) -> None:
        self.ended += 1
