"""EAGLE heads inside the decoding loop: the same tokens, and a head that reads the target's own hidden states."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import CombinedCandidates, EagleCandidates, FixedDepth, MedusaCandidates
from hf_specgen.heads.head_formats import load_head
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.eagle import Recording, predictable_pair, reread
from tests.helpers.head_fixtures import find_fixtures
from tests.helpers.medusa import fitted_heads, random_heads
from tests.helpers.policies import AfterPlainSteps

FIXTURES = find_fixtures(Path(__file__).parents[1] / "assets" / "fixtures")
EAGLE = {fixture.folder.name: fixture for fixture in FIXTURES if fixture.family == "autoregressive"}
SHAPES: dict[str, dict[str, Any]] = {"chain": {"k": 3}, "tree": {"k": 3, "tree": 8}}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return predictable_pair(EAGLE["eagle1_original"])


@cache
def head_of(name: str) -> Any:
    """The head of a fixture, loaded once for all tests."""
    return load_head(EAGLE[name].head_folder)


# The same tokens


def test_eagle_prompt_of_padding_beside_a_row_that_ends_at_once_same_tokens(pair: Any) -> None:
    """Would catch: hidden states of an ended row taken for something to read."""
    (target, head), ids = pair, torch.tensor([[0, 0], [5, 6]])
    mask = (ids != 0).long()
    first = int(target.generate(ids, attention_mask=mask, max_new_tokens=1)[1, -1])
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": first, "pad_token_id": 0}
    plain = target.generate(ids, **arguments)
    assert plain.shape[1] > 3
    assert torch.equal(target.generate(ids, **arguments, candidate_generator=EagleCandidates(head, k=3)), plain)


@pytest.fixture(scope="module", params=["eagle1_original", "eagle3_original"])
def pair_of_each_kind(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return predictable_pair(EAGLE[request.param])


@pytest.mark.parametrize("sampling", SAMPLING)
def test_eagle_beside_medusa_same_tokens(pair_of_each_kind: Any, sampling: str) -> None:
    """Would catch: heads that read different hidden states of one target, each given the states of both."""
    target, head = pair_of_each_kind
    medusa = MedusaCandidates(fitted_heads(target, prompts(3), **SAMPLING[sampling]), tree=6)
    candidates = CombinedCandidates([EagleCandidates(head, k=3), medusa], policy=FixedDepth(4))
    assert assert_same_tokens(target, prompts(3), candidates, max_new_tokens=20, **SAMPLING[sampling]).accepted > 0


def test_eagle_beside_heads_that_are_never_right_loses_few_steps() -> None:
    """Would catch: confident wrong tokens that displace right ones for longer than their acceptance takes to count."""
    target, head = predictable_pair(EAGLE["eagle1_original"])
    alone, beside = EagleCandidates(head, k=3), MedusaCandidates(random_heads(target), tree=6)
    both = CombinedCandidates([EagleCandidates(head, k=3), beside], policy=FixedDepth(4))
    arguments = {**prompts(1), "max_new_tokens": 40, "eos_token_id": None}
    for candidates in (alone, both):
        target.generate(**arguments, candidate_generator=candidates)
    assert alone.speculation.accepted > 15 and both.speculation.steps <= alone.speculation.steps + 2


def test_eagle_ended_rows_leave_the_batch(pair: Any) -> None:
    target, head = pair
    texts = target.generate(**prompts(3), max_new_tokens=20)[:, prompts(3)["input_ids"].shape[1] :].tolist()
    candidates = Recording(head, k=3, tree=8)
    assert_same_tokens(target, prompts(3), candidates, max_new_tokens=20, eos_token_id=texts[0][4], pad_token_id=0)
    assert len(candidates.session.runner.lengths) < 3


def test_eagle_loaded_heads_have_calibrations_of_their_own() -> None:
    """Would catch: the acceptance of one head taken for that of another of the same class."""
    first, second = (load_head(EAGLE[name].head_folder) for name in ("eagle1_original", "eagle1_original"))
    assert EagleCandidates(first, k=2).profile_key() != EagleCandidates(second, k=2).profile_key()
    assert EagleCandidates(first, k=2).profile_key() == EagleCandidates(first, k=2).profile_key()


# What the head reads


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EAGLE)
def test_eagle_committed_cache_equals_reading_from_scratch(name: str, shape: str, batch: int) -> None:
    """Would catch: features of rejected nodes or of the head itself in the cache, or a shift by one position."""
    fixture = EAGLE[name]
    check_against_scratch(fixture.target, Recording(head_of(name), **SHAPES[shape]), batch)


@pytest.mark.parametrize("policy", [FixedDepth(), AfterPlainSteps(3)], ids=["drafts", "plain steps first"])
@pytest.mark.parametrize("shape", SHAPES)
def test_eagle_committed_cache_after_acceptance_equals_reading_from_scratch(pair: Any, shape: str, policy: Any) -> None:
    target, head = pair
    candidates = Recording(head, **SHAPES[shape], policy=policy)
    check_against_scratch(target, candidates, 3, max_new_tokens=30)
    assert candidates.speculation is not None and candidates.speculation.accepted > 0


def check_against_scratch(target: Any, candidates: Recording, batch: int, max_new_tokens: int = 8) -> None:
    target.generate(**prompts(batch), max_new_tokens=max_new_tokens, candidate_generator=candidates)
    session = candidates.session
    for place, (row, length) in enumerate(zip(session.runner.rows, session.runner.lengths, strict=True)):
        assert length > len(session.call.state.prompts[row])
        cache, output = reread(session, row, length)
        for ours, scratch in zip(session.runner.cache.layers, cache.layers, strict=True):
            torch.testing.assert_close(ours.keys[place, :, :length], scratch.keys[0, :, :length])
            torch.testing.assert_close(ours.values[place, :, :length], scratch.values[0, :, :length])
        torch.testing.assert_close(session.runner.last.output[place, 0], output)


def test_eagle_text_is_read_in_chunks_of_equal_result(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specgen.heads.runner.PREFILL_CHUNK", 5)
    target, head = pair
    check_against_scratch(target, Recording(head, k=3, tree=8), 3)


def test_eagle_prompt_and_accepted_tokens_are_read_once(pair: Any) -> None:
    """Would catch: the text read again in every draft, or logits of the whole prompt."""
    target, head = pair
    candidates = Recording(head, k=3)
    widths: list[int] = []
    candidates._on(target).head.register_forward_hook(lambda m, a, output: widths.append(output.output.shape[1]))
    logits: list[int] = []
    handle = target.lm_head.register_forward_hook(lambda m, a, output: logits.append(output.shape[1]))
    target.generate(**prompts(1), max_new_tokens=20, candidate_generator=candidates)
    handle.remove()
    assert widths[0] == 12 and max(widths[1:]) <= 4
    assert max(logits) <= 4


def test_eagle_plain_steps_never_run_the_head(pair: Any) -> None:
    target, head = pair
    candidates = Recording(head, k=3)
    ran: list[int] = []
    candidates._on(target).head.register_forward_hook(lambda *_: ran.append(1))
    target.generate(**prompts(1), max_new_tokens=8, candidate_generator=candidates, policy=FixedDepth(0))
    assert not ran


@pytest.mark.parametrize(("name", "message"), [("speculators_peagle_llama", "P-EAGLE"), ("dflash_zlab", "BlockHead")])
def test_eagle_head_of_another_kind_raises(name: str, message: str) -> None:
    fixture = next(found for found in FIXTURES if found.folder.name == name)
    with pytest.raises(ValueError, match=message):
        fixture.target.generate(
            **prompts(1), max_new_tokens=4, candidate_generator=EagleCandidates(fixture.head_folder, k=2)
        )
