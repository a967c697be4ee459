"""A drafter with a smaller output matrix: the same text; its distributions, restricted to the tokens that are left."""

from collections import Counter
from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates, MTPCandidates
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.models import small_llama

IDS = [2, 3, 5, 8, 13, 21, 34]
MTP = ["mtp_transformers_glm4_moe", "mtp_transformers_glm4_moe_2layers"]


@pytest.mark.parametrize("vocabulary", ["frequent", IDS])
@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("name", ["draft model", *MTP])
def test_restricted_drafter_same_tokens(name: str, mode: str, vocabulary: Any) -> None:
    if name == "draft model":
        target, drafter = small_llama(99, 3), DraftModelCandidates(small_llama(99, 3), k=3, draft_vocabulary=vocabulary)
    else:
        target = FIXTURES[name].target
        drafter = MTPCandidates(FIXTURES[name].checkpoint_folder, k=2, draft_vocabulary=vocabulary)
    assert_same_tokens(target, prompts(3), drafter, max_new_tokens=12, **SAMPLING[mode])


@pytest.mark.parametrize("vocabulary", ["frequent", IDS, list(range(40))])
def test_restricted_draft_model_drafts_the_most_likely_of_its_tokens(vocabulary: Any) -> None:
    """Would catch: ids of rows instead of tokens, in the draft or in what the draft model reads next."""
    draft, text = small_llama(40, 3, initializer_range=0.3), torch.randint(2, 40, (1, 9))
    ids, _ = DraftModelCandidates(draft, k=4, draft_vocabulary=vocabulary).get_candidates(text)
    seen = [token for token, _ in Counter(text[0].tolist()).most_common()]
    allowed = sorted([*dict.fromkeys([*seen, *range(40)])][:10]) if vocabulary == "frequent" else vocabulary
    expected = text
    for _ in range(4):
        logits = draft(expected).logits[0, -1, allowed]
        expected = torch.cat([expected, torch.tensor([[allowed[int(logits.argmax())]]])], dim=1)
    assert ids.tolist() == expected.tolist()
    assert draft.get_output_embeddings().out_features == 40


@pytest.mark.parametrize("tree", [None, 5])
def test_rejection_sampling_with_a_restricted_draft_model_has_the_distribution_of_the_target(tree: Any) -> None:
    """Would catch: q over the whole vocabulary. Fails by chance once in 1,000 runs of another seed."""
    candidates = DraftModelCandidates(small_llama(7, 3), k=2, tree=tree, draft_vocabulary=[1, 4, 5])
    assert fit_of_two_tokens(small_llama(7, 0), torch.tensor([[0, 2, 5]]), candidates, calls=4) > 1e-3


@pytest.mark.parametrize("vocabulary", ["rare", [], [1.5], [-1], [True]])
def test_setting_that_is_no_vocabulary_is_refused(vocabulary: Any) -> None:
    with pytest.raises(ValueError, match='draft_vocabulary must be "frequent", None or token ids'):
        MTPCandidates(draft_vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            lambda: DraftModelCandidates(small_llama(99, 3), draft_vocabulary=[99]),
            "has token 99, but the drafter has 99",
        ),
        (
            lambda: DraftModelCandidates(str(FIXTURES["pard_llama"].checkpoint_folder), draft_vocabulary=[1]),
            "with a draft model that drafts all tokens in one pass",
        ),
    ],
)
def test_vocabulary_that_a_drafter_cannot_have_is_refused(drafter: Any, message: str) -> None:
    candidates = drafter()
    target = small_llama(99, 3) if "pard" not in repr(candidates) else FIXTURES["pard_llama"].target
    with pytest.raises(ValueError, match=message):
        target.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
