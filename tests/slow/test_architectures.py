"""The tokens of plain `generate` on every supported architecture; `python -m tests.fuzz` draws all strategies there."""

from functools import partial
from typing import Any

import pytest

from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
)
from tests.helpers import ARCHITECTURES, SAMPLING, Oracle, assert_same_tokens, prompts, shared_draft, tiny_model
from tests.helpers.medusa import random_heads
from tests.helpers.models import SPEC

# The lowest `parametrize` varies slowest: tests of one architecture follow each other and share its model.
DIVISIBLE = [name for name in ARCHITECTURES if name not in ("gemma4_text", "gpt2", "opt")]

UNGROUPED = {"deepseek_v3", "falcon", "gpt2", "gpt_neox", "opt", "phi"}


def self_drafting(architecture: str, model: Any) -> Candidates:
    """A strategy that reads the target's own layers: early exit and Medusa by turns."""
    if architecture in DIVISIBLE and ARCHITECTURES.index(architecture) % 2:
        return LayerSkipCandidates(model.config.num_hidden_layers // 2, k=3)
    return MedusaCandidates(random_heads(model), policy=FixedDepth())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_strategies_every_architecture_same_tokens(architecture: str) -> None:
    """Would catch: a wrong mask, position, cache slot or hidden state in any architecture, in ragged batches."""
    model = tiny_model(architecture)
    tree = NgramCandidates(k=3, tree=6)
    draft = DraftModelCandidates(shared_draft(model, noise=3.0), k=3)
    merged = CombinedCandidates([tree, draft], tree=8, policy=FixedDepth())
    statistics = assert_same_tokens(model, prompts(3), merged, max_new_tokens=10)
    assert statistics.drafted > 0
    own = self_drafting(architecture, model)
    statistics = assert_same_tokens(model, prompts(3), own, max_new_tokens=10, **SAMPLING["sampled"])
    assert statistics.drafted > 0


@pytest.mark.parametrize(
    ("oracle", "batch"),  # a chain of one row alone may have no mask
    [({"accuracy": 0.6}, 1), ({"accuracy": 0.7, "branching": True}, 3)],
    ids=["chain", "tree"],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_grouped_attention_keeps_the_tokens(architecture: str, oracle: Any, batch: int, folded_calls: Any) -> None:
    """Would catch: windows, sinks, caps or padding that folding ignores, in any architecture."""
    model = tiny_model(architecture)
    statistics = assert_same_tokens(model, prompts(batch), partial(Oracle, **oracle), max_new_tokens=10)
    assert 0 < statistics.accepted < statistics.drafted
    assert bool(folded_calls) == (architecture not in {*SPEC["eager_only"], *UNGROUPED})
