"""Objects that `generate` calls: processors, stopping criteria, a streamer, and the faults that they raise."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from tests.helpers import PrefixReader, RecordingStreamer, RowWisePrefixReader, StatefulReader

PROCESSORS = {"prefix": PrefixReader, "row_wise": RowWisePrefixReader, "stateful": StatefulReader}


class Fault(RuntimeError):
    """Raised on purpose."""


class Interrupt(KeyboardInterrupt):
    """Raised on purpose, and no `Exception`."""


class Recorder(RecordingStreamer):
    """Keeps what is streamed."""

    fault: Fault | Interrupt | None = None
    fault_call = 0

    def put(self, value: torch.Tensor) -> None:
        if self.fault is not None and len(self.chunks) == self.fault_call:
            raise self.fault
        super().put(value)


class RaisingProcessor(LogitsProcessor):
    """Changes nothing, and raises in its n-th call."""

    def __init__(self, call: int, fault: Fault | Interrupt):
        self._left, self._fault = call, fault

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            raise self._fault
        return scores


class ValidPadding(LogitsProcessor):
    """Replaces the scores of rows that have ended by zeros: plain `generate` samples their padding, and ignores it.

    Args:
        ends: the column at which each row ends.
    """

    def __init__(self, ends: Sequence[int]):
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        has_ended = torch.tensor([input_ids.shape[1] >= end for end in self._ends], device=scores.device)
        return scores.masked_fill(has_ended[:, None], 0.0)


class RaisingCriterion(StoppingCriteria):
    """Never stops, and raises in its n-th call."""

    def __init__(self, call: int, fault: Fault | Interrupt):
        self._left, self._fault = call, fault

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            raise self._fault
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _After(StoppingCriteria):
    """Stops row b after `2 + 3 * b` new tokens."""

    def __init__(self, prompt_length: int):
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self._prompt_length
        return torch.tensor([new >= 2 + 3 * row for row in range(len(input_ids))], device=input_ids.device)


class _AnyRow(_After):
    """Stops all rows as soon as one has two tokens above 50 in a row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids[:, self._prompt_length :]
        found = bool(((new[:, 1:] > 50) & (new[:, :-1] > 50)).any())
        return torch.full((len(input_ids),), found, device=input_ids.device)


class _OnScores(_After):
    """Reads the scores of the last step, where `generate` shows them."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not scores:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return scores[-1].argmax(dim=-1) % 7 == 0


CRITERIA = {"after": _After, "any_row": _AnyRow, "scores": _OnScores}
