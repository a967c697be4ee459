"""The forward passes of each step, against the tokens that forward hooks see."""

from collections.abc import Callable
from typing import Any

import pytest

from hf_specgen import (
    Candidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    NgramCandidates,
)
from hf_specgen.counters import Statistics
from tests.helpers import prompts, tiny_model
from tests.helpers.policies import AfterPlainSteps


def counted(module: Any, call: Callable[[], Any]) -> list[int]:
    """The tokens, over all rows, of each call of an embedding module."""
    sizes: list[int] = []
    handle = module.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].numel()))
    try:
        call()
    finally:
        handle.remove()
    return sizes


def speculate(model: Any, candidates: Candidates, rows: int = 1, **arguments: Any) -> Statistics:
    model.generate(**prompts(rows), max_new_tokens=24, candidate_generator=candidates, **arguments)
    assert candidates.speculation is not None
    return candidates.speculation


@pytest.mark.parametrize("rows", [1, 3])
def test_target_passes_match_the_tokens_read_by_the_target(rows: int) -> None:
    """Without an EOS token all rows take part in every step until the slowest ends."""
    model = tiny_model("llama")
    candidates = NgramCandidates(k=4)
    speculate(model, candidates)  # the self-check of the model runs in its first call
    sizes = counted(model.get_input_embeddings(), lambda: speculate(model, candidates, rows, eos_token_id=None))
    assert candidates.speculation is not None
    passes = candidates.speculation.passes
    decoding = passes[-len(sizes) + 1 :]  # the first pass reads the prompt
    if rows == 1:
        assert [step.tokens_per_row for step in decoding] == sizes[1:]
    assert all(step.batch * step.tokens_per_row <= size for step, size in zip(decoding, sizes[1:], strict=True))
    assert all(not step.passes for step in passes)
    assert len(passes) == max(map(len, candidates.speculation.rows))


def test_draft_model_passes_match_the_tokens_read_by_the_draft() -> None:
    model, draft = tiny_model("llama"), tiny_model("mistral")
    candidates = DraftModelCandidates(draft, k=3)
    speculate(model, candidates)
    sizes = counted(draft.get_input_embeddings(), lambda: speculate(model, candidates))
    assert candidates.speculation is not None
    reported = [tokens for step in candidates.speculation.passes for tokens in step.passes]
    assert reported == sizes[1:], "all passes but the one that reads the prompt"


def test_layer_skip_passes_count_the_early_passes() -> None:
    statistics = speculate(tiny_model("llama"), LayerSkipCandidates(exit_layer=1, k=2))
    steps = statistics.rows[0]
    assert [len(step.passes) for step in statistics.passes[1:]] == [step.depth for step in steps[1:]]


def test_plain_step_has_no_drafter_passes() -> None:
    """The policy makes the first steps plain."""
    candidates = DraftModelCandidates(tiny_model("mistral"), k=3, policy=AfterPlainSteps(4))
    statistics = speculate(tiny_model("llama"), candidates)
    drafted = [step.drafted for step in statistics.rows[0]]
    assert 0 in drafted and max(drafted) > 0
    assert [not step.has_draft for step in statistics.passes] == [count == 0 for count in drafted]
