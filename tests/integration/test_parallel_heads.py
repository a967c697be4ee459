"""DFlash, JetSpec and P-EAGLE heads inside the decoding loop: the same tokens, and the context that they read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import CombinedCandidates, DFlashCandidates, PEagleCandidates
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.comparison import SEED
from tests.helpers.head_fixtures import find_fixtures
from tests.helpers.parallel import recording, reread
from tests.helpers.policies import AfterPlainSteps

FIXTURES = find_fixtures(Path(__file__).parents[1] / "assets" / "fixtures")
HEADS = {fixture.folder.name: fixture for fixture in FIXTURES if fixture.family in ("block", "parallel")}
STRATEGIES: dict[str, Any] = {"block": DFlashCandidates, "parallel": PEagleCandidates}
ONE_OF_EACH = ("dflash_zlab", "speculators_peagle_llama")
pytestmark = pytest.mark.filterwarnings("ignore")


def strategy(name: str) -> Any:
    return STRATEGIES[HEADS[name].family]


def generated(name: str, batch: int, new: int, **settings: Any) -> list[list[int]]:
    """What plain generate generates."""
    torch.manual_seed(SEED)
    inputs = prompts(batch)
    output = HEADS[name].target.generate(**inputs, max_new_tokens=new, **settings)
    return output[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parallel_row_that_waits_for_slower_rows_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a draft behind a text that has not grown since the last one, whose features are read already."""
    monkeypatch.setattr("hf_specgen.verification.noise.MAX_NOISE_BYTES", 0)
    monkeypatch.setattr("hf_specgen.verification.noise.MIN_BUFFERED_STEPS", 2)
    sampling = SAMPLING["sampled"]
    texts = generated(name, 2, 24, **sampling)
    candidates = recording(strategy(name), [texts[0], []])(HEADS[name].head_folder, k=4)
    assert_same_tokens(HEADS[name].target, prompts(2), candidates, max_new_tokens=24, **sampling)
    assert candidates.session.runner.waiting > 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parallel_beside_other_strategies_reads_the_tokens_of_plain_steps(name: str) -> None:
    """Would catch: hidden states of steps without a draft that the head never receives."""
    policy = AfterPlainSteps(3)
    alone = recording(strategy(name), generated(name, 3, 16))(HEADS[name].head_folder, k=3)
    candidates = CombinedCandidates([alone], policy=policy)
    statistics = assert_same_tokens(HEADS[name].target, prompts(3), candidates, max_new_tokens=16)
    assert statistics.drafted > 0
    session = alone.session
    for place, (row, length) in enumerate(zip(session.runner.rows, session.runner.lengths, strict=True)):
        cache = reread(session, row, length, parallel=HEADS[name].family == "parallel")
        for ours, scratch in zip(session.runner.cache.layers, cache.layers, strict=True):
            torch.testing.assert_close(ours.keys[place, :, :length], scratch.keys[0, :, :length], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parallel_context_equals_reading_from_scratch(name: str) -> None:
    """Would catch: a shift by one position, padding or block entries left in the cache."""
    candidates = recording(strategy(name), generated(name, 3, 16))(HEADS[name].head_folder, k=4, tree=8)
    HEADS[name].target.generate(**prompts(3), max_new_tokens=16, candidate_generator=candidates)
    session = candidates.session
    for place, (row, length) in enumerate(zip(session.runner.rows, session.runner.lengths, strict=True)):
        assert length > len(session.call.state.prompts[row])
        scratch = reread(session, row, length, parallel=HEADS[name].family == "parallel")
        for ours, theirs in zip(session.runner.cache.layers, scratch.layers, strict=True):
            torch.testing.assert_close(ours.keys[place, :, :length], theirs.keys[0, :, :length])
            torch.testing.assert_close(ours.values[place, :, :length], theirs.values[0, :, :length])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_parallel_ended_rows_leave_the_batch(name: str) -> None:
    texts = generated(name, 3, 12)
    ends = {"eos_token_id": texts[0][3], "pad_token_id": 0}
    candidates = recording(strategy(name), texts)(HEADS[name].head_folder, k=3)
    assert_same_tokens(HEADS[name].target, prompts(3), candidates, max_new_tokens=12, **ends)
    ended = [row for row in range(3) if candidates.session.call.state.generated[row][-1] == ends["eos_token_id"]]
    assert ended and candidates.session.runner.cache.lengths
    assert len(candidates.session.runner.lengths) < 3


def test_parallel_long_prompt_is_read_in_chunks_of_equal_result(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = HEADS["speculators_peagle_llama"]
    whole, chunked = ([], [])
    for found, chunk in ((whole, 512), (chunked, 5)):
        monkeypatch.setattr("hf_specgen.heads.runner.PREFILL_CHUNK", chunk)
        candidates = recording(PEagleCandidates)(fixture.head_folder, k=3)
        fixture.target.generate(**prompts(3), max_new_tokens=4, candidate_generator=candidates)
        found.extend(layer.keys for layer in candidates.session.runner.cache.layers)
        lengths = candidates.session.runner.lengths
    for one, other in zip(whole, chunked, strict=True):
        for row, length in enumerate(lengths):
            torch.testing.assert_close(one[row, :, :length], other[row, :, :length])
