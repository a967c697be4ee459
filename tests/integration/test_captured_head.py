"""EAGLE heads whose passes are captured as graphs draft what they draft otherwise."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import EagleCandidates
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets import graphs
from tests.helpers import SAMPLING, prompts
from tests.helpers.captures import graphs_on_cpu
from tests.helpers.eagle import predictable_pair
from tests.helpers.head_fixtures import find_fixtures

FIXTURES = find_fixtures(Path(__file__).parents[1] / "assets" / "fixtures")
EAGLE = {fixture.folder.name: fixture for fixture in FIXTURES if fixture.family == "autoregressive"}
NAMES = [name for name in EAGLE if name.startswith("eagle")]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return graphs_on_cpu(monkeypatch)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return predictable_pair(EAGLE["eagle1_original"])


def steps(target: Any, candidates: EagleCandidates, inputs: Any, **arguments: Any) -> Any:
    """The tokens and the steps of a call."""
    torch.manual_seed(3)
    output = target.generate(**inputs, candidate_generator=candidates, return_dict_in_generate=True, **arguments)
    return output.sequences.tolist(), output.speculation.rows


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [{"k": 3}, {"k": 4, "tree": 9}], ids=["chain", "tree"])
def test_captured_head_same_drafts(
    pair: Any, shape: dict[str, Any], batch: int, sampling: str, captures: list[Any]
) -> None:
    """Would catch: states, slots or masks of another pass; rows of which some end before the others."""
    target, head = pair
    ends = {"eos_token_id": [*range(40, 48)], "pad_token_id": 0}
    for length in (9, 12):
        arguments = {"max_new_tokens": 24, **ends, **SAMPLING[sampling]}
        eager = steps(target, EagleCandidates(head, **shape), prompts(batch, length=length), **arguments)
        before = len(captures)
        ours = steps(
            target, EagleCandidates(head, **shape), prompts(batch, length=length), compile="graphs", **arguments
        )
        assert ours == eager
        assert len(captures) > before


@pytest.mark.parametrize("name", NAMES)
def test_captured_head_of_each_format_same_drafts(name: str, captures: list[Any]) -> None:
    target, head = EAGLE[name].target, load_head(EAGLE[name].head_folder)
    eager = steps(target, EagleCandidates(head, k=3, tree=6), prompts(1), max_new_tokens=6)
    assert steps(target, EagleCandidates(head, k=3, tree=6), prompts(1), max_new_tokens=6, compile="graphs") == eager


def test_captured_head_in_later_calls_uses_the_same_graphs(pair: Any, captures: list[Any]) -> None:
    """Would catch: graphs that are captured anew for every call or length, each of which keeps memory."""
    target, head = pair
    candidates = EagleCandidates(head, k=3, tree=8)
    steps(target, candidates, prompts(1), max_new_tokens=24, compile="graphs")
    before = len(captures)
    for length in (8, 15, 30):
        steps(target, candidates, prompts(1, length=length), max_new_tokens=24, compile="graphs")
    assert len(captures) <= before + 2  # a width that the first call did not need


def test_captured_head_of_a_text_that_outgrows_its_buffers_same_drafts(
    pair: Any, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_specgen.targets.graphs.CAPACITY_BLOCK", 8)
    target, head = pair
    eager = steps(target, EagleCandidates(head, k=3, tree=8), prompts(2), max_new_tokens=100)
    assert steps(target, EagleCandidates(head, k=3, tree=8), prompts(2), max_new_tokens=100, compile="graphs") == eager


def test_head_that_cannot_be_captured_runs_eagerly(
    pair: Any, captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a call that ends with an error of CUDA because its drafter cannot be captured."""
    target, head = pair
    stand_in = graphs.capture

    def failing(run: Any, memory: Any) -> Any:
        if any("heads/runner.py" in frame.filename for frame in traceback.extract_stack()):  # a pass of the head
            memory.is_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return stand_in(run, memory)

    eager = steps(target, EagleCandidates(head, k=3, tree=8), prompts(2), max_new_tokens=20)
    monkeypatch.setattr(graphs, "capture", failing)
    monkeypatch.setattr(graphs, "EAGER_PASSES", 0)
    ours = steps(target, EagleCandidates(head, k=3, tree=8), prompts(2), max_new_tokens=20, compile="auto")
    assert ours == eager and caplog.text.count("; it runs eagerly") == 1
    with pytest.raises(ValueError, match='leave compile="graphs" out'):
        steps(target, EagleCandidates(load_head(EAGLE[NAMES[0]].head_folder)), prompts(2), compile="graphs")


def test_captured_call_under_autocast_refused(pair: Any, captures: list[Any]) -> None:
    """Would catch: graphs of passes under autocast that later calls without it replay."""
    target, head = pair
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="runs under torch"):
        steps(target, EagleCandidates(head, k=3), prompts(1), max_new_tokens=4, compile="graphs")
