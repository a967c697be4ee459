"""The stopping criteria of a call, each called once for every generated position, in the order of plain `generate`.

`OutputCollector` calls them at every position that it emits. Verification calls them earlier, at positions that it has
just chosen, where a logits processor may keep a state: plain `generate` does not call that one after the position at
which a row stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from hf_specgen.call import Call
from hf_specgen.verification.processors import refusing_side_effects

REPLACED_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)
"""Criteria that are not called: `GenerationState.stop_ids` and `max_length` have the same effect."""
WITHOUT_SCORES = (MaxTimeCriteria, StopStringCriteria)  # criteria that do not read the scores that they receive


class CustomCriteria:
    """The stopping criteria of a call without those that `GenerationState` applies; false if there are none."""

    def __init__(self, criteria: Sequence[Any], call: Call):
        self._criteria = StoppingCriteriaList([one for one in criteria if type(one) not in REPLACED_CRITERIA])
        self._state = call.state
        self._do_sample = call.do_sample
        self._early_stops: dict[int, list[bool]] = {}  # by position: called by verification, not emitted yet
        # Processed scores `[batch, vocab]` of the emitted positions, to which `OutputCollector` appends; None if
        # the caller requested no scores: criteria then receive None.
        self.scores: list[torch.Tensor] | None = [] if call.keeps_scores else None
        self.needs_scores = not all(isinstance(criterion, WITHOUT_SCORES) for criterion in self._criteria)
        """Whether a criterion may read scores."""

    def __bool__(self) -> bool:
        return bool(self._criteria)

    def check_chosen(self, positions: int, chosen_scores: Sequence[torch.Tensor]) -> bool:
        """Call the criteria for the first `positions` generated positions; returns whether a further row stops there.

        The last ones are chosen but not emitted yet; `chosen_scores` are theirs. `check_emitted` returns the results
        later, without another call.
        """
        stops = self._call(positions, chosen_scores)
        self._early_stops[positions] = stops
        return any(stop and not stopped for stop, stopped in zip(stops, self._state.stopped, strict=True))

    def check_emitted(self, positions: int) -> list[bool]:
        """Whether each row stops after `positions` emitted positions, as its criteria or `check_chosen` decided."""
        stops = self._early_stops.pop(positions, None)
        return self._call(positions) if stops is None else stops

    def _call(self, positions: int, chosen_scores: Sequence[torch.Tensor] = ()) -> list[bool]:
        if not self._criteria:
            return [False] * self._state.batch
        scores: Any = None if self.scores is None else (*self.scores, *chosen_scores)
        ids = self._state.prefix(self._state.prompt_length + positions)
        with refusing_side_effects(self._criteria, ids, self._do_sample, self._state.default_device):
            stops = self._criteria(ids, scores)
        if stops.shape != ids.shape[:1]:  # plain generate() goes on with such a result
            names = " or ".join(sorted({type(criterion).__name__ for criterion in self._criteria}))
            raise ValueError(
                f"stopping criteria returned a result of shape {tuple(stops.shape)} for {len(ids)} rows; return one "
                f"value for each row from {names}"
            )
        return list(stops.tolist())
