"""Parallel draft models (PARD, PARD-2): one pass a draft, and the tokens of plain generate."""

from typing import Any

import pytest

from hf_specgen import AutoCandidates, CombinedCandidates, DraftModelCandidates, FixedDepth, NgramCandidates
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.policies import AfterPlainSteps

DRAFTS = ["pard_llama", "pard2_llama"]


def drafts(name: str, **settings: Any) -> Any:
    return AutoCandidates.from_pretrained(FIXTURES[name].head_folder, **settings)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", SAMPLING.values(), ids=SAMPLING)
def test_parallel_draft_same_tokens_in_one_pass_a_draft(name: str, batch: int, mode: dict[str, Any]) -> None:
    """Would catch: mask tokens left in the cache, features of another token, a pass for each token."""
    target = FIXTURES[name].target
    for settings in ({"k": 5}, {"k": 4, "tree": 12}, {"k": 5, "policy": AfterPlainSteps(2)}):
        candidates = drafts(name, **settings)
        assert isinstance(candidates, DraftModelCandidates)
        assert_same_tokens(target, prompts(batch), candidates, max_new_tokens=14, **mode)
        passes = [step.passes for step in candidates.speculation.passes if step.has_draft]
        assert passes and all(len(step) == 1 for step in passes)


@pytest.mark.parametrize("name", DRAFTS)
def test_parallel_draft_beside_others_and_with_ended_rows_same_tokens(name: str) -> None:
    target = FIXTURES[name].target
    plain = target.generate(**prompts(3), max_new_tokens=12, do_sample=False)
    ends = {"eos_token_id": int(plain[0, prompts(3)["input_ids"].shape[1] + 3]), "pad_token_id": 0}
    assert_same_tokens(target, prompts(3), drafts(name, k=3), max_new_tokens=12, **ends)
    both = CombinedCandidates([NgramCandidates(k=4), drafts(name, k=4)], policy=FixedDepth())
    assert_same_tokens(target, prompts(3), both, max_new_tokens=12)
