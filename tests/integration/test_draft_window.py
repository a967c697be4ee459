"""Draft windows: a drafter reads a part of a long text; tokens, memory and passes."""

from typing import Any

import pytest
import torch

from hf_specgen import AutoCandidates, DraftModelCandidates
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.models import small_llama

HEADS = ["eagle3_original", "speculators_peagle_llama", "dflash_zlab", "speculators_dspark_vanilla", "pard_llama"]
HEADS += ["mtp_transformers_glm4_moe_2layers"]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("batch", [1, 3])
def test_window_that_is_exceeded_again_and_again_same_tokens(name: str, batch: int) -> None:
    """Would catch: features of other tokens after a restart, rows that restart together by mistake."""
    fixture = FIXTURES[name]
    for mode in SAMPLING.values():
        candidates = AutoCandidates.from_pretrained(fixture.checkpoint_folder, k=3, draft_window=(2, 5))
        assert_same_tokens(fixture.target, prompts(batch), candidates, max_new_tokens=24, **mode)


def drafted(draft: Any, text: list[int], **settings: Any) -> list[int]:
    """The chain that is drafted after a text."""
    candidates = DraftModelCandidates(draft, k=4, **settings)
    ids, _ = candidates.get_candidates(torch.tensor([text]))
    return ids[0, len(text) :].tolist()


def test_draft_model_with_a_window_drafts_what_it_drafts_after_the_window_alone() -> None:
    """Would catch: positions or cached keys of tokens outside of the window."""
    draft, text = small_llama(40, 3, initializer_range=0.3), torch.randint(2, 40, (30,)).tolist()
    kept = [*text[:-1][:2], *text[:-1][-6:], text[-1]]
    assert drafted(draft, text, draft_window=(2, 6)) == drafted(draft, kept) != drafted(draft, text)


@pytest.mark.parametrize("kind", ["draft model", "eagle"])
def test_memory_and_passes_of_a_drafter_with_a_window_do_not_grow_with_the_text(kind: str) -> None:
    """4,000 tokens: the cache of the drafter stays as short as the window."""
    if kind == "eagle":
        fixture = FIXTURES["eagle3_original"]
        target, candidates = fixture.target, AutoCandidates.from_pretrained(fixture.head_folder, k=2, draft_window=16)
    else:
        target = small_llama(40, 3, max_position_embeddings=5_000)
        candidates = DraftModelCandidates(small_llama(40, 4, max_position_embeddings=5_000), k=2, draft_window=16)
    sizes: list[int] = []
    start = candidates.start

    def recording(call: Any) -> Any:
        session = start(call)
        first_scores = session.first_scores

        def record() -> torch.Tensor:
            scores = first_scores()
            cache = session.runner.cache if kind == "eagle" else session._runner.reader.cache
            sizes.append(cache.layers[0].keys.shape[2])
            return scores

        session.first_scores = record
        return session

    candidates.start = recording  # type: ignore[method-assign]
    text = torch.randint(2, 40, (1, 4_000), generator=torch.Generator().manual_seed(1))
    target.generate(text, max_new_tokens=24, do_sample=False, candidate_generator=candidates, pad_token_id=0)
    assert len(sizes) > 4 and max(sizes) <= 4 + 2 * 16 + 2 * 64


@pytest.mark.parametrize("window", [0, -1, (4,), (1, 2, 3), (4, 0), "long", True, (-1, 4)])
def test_draft_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match='draft_window must be "auto", None, a number of recent tokens or a pair'):
        DraftModelCandidates("org/draft", draft_window=window)


def test_window_beyond_the_trained_length_is_warned_of_once(caplog: Any) -> None:
    """Would catch: a warning in each call, or where the window keeps to the trained length."""
    target, draft = small_llama(40, 3), small_llama(40, 4)
    draft.config.trained_length = 12
    for window, warnings in (((2, 5), 0), ("auto", 0), (None, 1), (None, 1), (14, 2)):
        candidates = DraftModelCandidates(draft, k=2, draft_window=window)
        assert_same_tokens(target, {"input_ids": torch.arange(2, 12)[None]}, candidates, max_new_tokens=30)
        assert caplog.text.count("but it was trained on 12") == warnings
