"""Columns that are confirmed all at once are those that are confirmed one by one."""

import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteriaList

from hf_specgen import Call
from hf_specgen.outputs import OutputCollector
from hf_specgen.state import GenerationState
from hf_specgen.verification import VerificationResult


class Streamer:
    """Receives columns, so that they are confirmed one by one."""

    def put(self, tokens: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def collector(batch: int, pad_id: int | None, streamer: Any) -> tuple[GenerationState, OutputCollector]:
    stop_ids = () if pad_id is None else (1, 2)
    state = GenerationState(torch.zeros(batch, 3, dtype=torch.long), None, stop_ids, max_length=15, pad_id=pad_id)
    call = Call(None, state, GenerationConfig())
    return state, OutputCollector(call, StoppingCriteriaList(), streamer)


@pytest.mark.parametrize("pad_id", [0, None])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_columns_at_once_are_those_confirmed_one_by_one(batch: int, pad_id: int | None, seed: int) -> None:
    """Would catch: a row stopped before the other rows have reached its last column, or not at all."""
    rng = random.Random(seed)
    pairs = [collector(batch, pad_id, streamer) for streamer in (None, Streamer())]
    while not pairs[0][0].all_stopped:
        tokens = [[rng.randrange(1, 12) for _ in range(rng.randrange(1, 6))] for _ in range(batch)]
        for state, outputs in pairs:
            result = VerificationResult([None] * batch, [[] for _ in range(batch)], [0] * batch)
            for row in range(batch):
                if not state.has_ended(row):
                    state.append(row, tokens[row])
            outputs.add(result)
        (ours, at_once), (reference, one_by_one) = pairs
        assert at_once.columns == one_by_one.columns
        assert ours.generated == reference.generated
        assert [ours.is_stopped(row) for row in range(batch)] == [reference.is_stopped(row) for row in range(batch)]
    assert torch.equal(pairs[0][1].output_ids(), pairs[1][1].output_ids())
