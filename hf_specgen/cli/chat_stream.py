"""Streams text while it is generated, and distinguishes accepted draft tokens from the target's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specgen.call import Call
from hf_specgen.depth import StepRecord
from hf_specgen.monitoring.monitor import Monitor, MonitorSession

ACCEPTED = "green"
"""Style of accepted draft tokens."""
INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


class ColouredStreamer(BaseStreamer):
    """Writes the text of one row piece by piece.

    With the monitor, tokens are held until their step is reported with the number of accepted draft tokens; without it,
    every token is written at once as the target's own.

    Args:
        tokenizer: of the target.
        write: receives each piece of text, and whether its last token is an accepted draft token.

    Attributes:
        monitor: for `generate(monitor=…)`; not used in plain generation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, bool], None]):
        self._tokenizer, self._write = tokenizer, write
        self._has_prompt = False
        self._held: list[int] = []  # tokens whose step was not reported yet
        self._line: list[int] = []  # tokens of the current line
        self._written = ""  # what has been written of it
        self._holds_tokens = False
        self.monitor = _StepMonitor(self)

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then every token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._held += value.flatten().tolist()
        if not self._holds_tokens:
            self._flush(0, 0)

    def end(self) -> None:
        """Write what is left."""
        self._flush(0, 0)
        self._decode(False, final=True)

    def wait_for_steps(self) -> None:
        """From now on, hold tokens until `step`."""
        self._holds_tokens = True

    def step(self, accepted: int, emitted: int) -> None:
        """The last `emitted` tokens are those of a step that accepted so many draft tokens."""
        self._flush(accepted, emitted)

    def _flush(self, accepted: int, emitted: int) -> None:
        before = len(self._held) - emitted
        for place, token in enumerate(self._held):
            self._line.append(token)
            self._decode(before <= place < before + accepted)
        self._held = []

    def _decode(self, accepted: bool, *, final: bool = False) -> None:
        """Write what the last token adds to the text, once its characters are complete."""
        text = str(self._tokenizer.decode(self._line, skip_special_tokens=True))
        if text.endswith(INCOMPLETE) and not final:
            return
        if text[len(self._written) :]:
            self._write(text[len(self._written) :], accepted)
        self._written = text
        if text.endswith("\n"):
            self._line, self._written = [], ""


class _StepMonitor(Monitor):
    def __init__(self, streamer: ColouredStreamer):
        self._streamer = streamer

    def start(self, call: Call) -> MonitorSession:
        self._streamer.wait_for_steps()
        return _StepSession(self._streamer)


class _StepSession(MonitorSession):
    def __init__(self, streamer: ColouredStreamer):
        self._streamer = streamer

    def observe(self, step: StepRecord) -> None:
        row = step.rows[0]
        if row is not None:
            self._streamer.step(row.accepted, row.emitted)
