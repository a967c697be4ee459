"""EAGLE heads whose passes are captured as graphs draft what they draft otherwise."""

import traceback
from typing import Any

import pytest
import torch

from hf_specgen import EagleCandidates
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets import graphs
from tests.helpers import SAMPLING, prompts
from tests.helpers.captures import graphs_on_cpu
from tests.helpers.comparison import plain_output
from tests.helpers.head_fixtures import FIXTURES, steered

EAGLE1, EAGLE3 = FIXTURES["eagle1_original"], FIXTURES["eagle3_original"]
ENDS = {"eos_token_id": [*range(40, 48)], "pad_token_id": 0}
TREE = {"k": 3, "tree": 8}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return graphs_on_cpu(monkeypatch)


@pytest.fixture(scope="module")
def head() -> Any:
    """One for all tests: what is captured of it is used again."""
    return load_head(EAGLE1.head_folder)


def steps(head: Any, inputs: Any, shape: Any, target: Any = None, **arguments: Any) -> Any:
    """The tokens and the steps of a call, some of whose draft tokens are accepted."""
    target = target or EAGLE1.target
    plain = {name: value for name, value in arguments.items() if name != "compile"}
    texts = plain_output(target, inputs, **plain)[0][:, inputs["input_ids"].shape[1] :].tolist()
    torch.manual_seed(11)
    candidates = steered(EagleCandidates(head, **shape), texts)
    output = target.generate(**inputs, candidate_generator=candidates, return_dict_in_generate=True, **arguments)
    return output.sequences.tolist(), output.speculation.rows


@pytest.mark.parametrize(("batch", "sampling"), [(1, "sampled"), (3, "greedy"), (3, "sampled")])
@pytest.mark.parametrize("shape", [{"k": 3}, {"k": 4, "tree": 9}], ids=["chain", "tree"])
def test_captured_head_same_drafts(shape: Any, batch: int, sampling: str, head: Any, captures: list[Any]) -> None:
    """Would catch: states, slots or masks of another pass; rows of which some end before the others."""
    arguments = {"max_new_tokens": 16, **ENDS, **SAMPLING[sampling]}
    for length in (9, 12):
        eager = steps(head, prompts(batch, length), shape, **arguments)
        before = len(captures)
        assert steps(head, prompts(batch, length), shape, compile="graphs", **arguments) == eager
        assert len(captures) > before


def test_captured_head_of_another_format_same_drafts(captures: list[Any]) -> None:
    arguments: Any = (load_head(EAGLE3.head_folder), prompts(1), {"k": 3, "tree": 6}, EAGLE3.target)
    eager = steps(*arguments, max_new_tokens=6)
    assert steps(*arguments, max_new_tokens=6, compile="graphs") == eager


def test_captured_head_in_later_calls_uses_the_same_graphs(captures: list[Any]) -> None:
    """Would catch: graphs that are captured anew for every call or length, each of which keeps memory."""
    candidates, before = EagleCandidates(EAGLE1.head_folder, **TREE), 0
    for length in (12, 8, 30):
        arguments = {"max_new_tokens": 16, "candidate_generator": candidates, "compile": "graphs"}
        EAGLE1.target.generate(**prompts(1, length), **arguments)
        before = before or len(captures)
    assert 0 < len(captures) <= before + 2  # a width that the first call did not need


def test_captured_head_of_a_text_that_outgrows_its_buffers_same_drafts(
    head: Any, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_specgen.targets.graphs.CAPACITY_BLOCK", 8)
    eager = steps(head, prompts(2), TREE, max_new_tokens=40)
    assert steps(head, prompts(2), TREE, max_new_tokens=40, compile="graphs") == eager


def test_head_that_cannot_be_captured_runs_eagerly(
    head: Any, captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a call that ends with an error of CUDA because its drafter cannot be captured."""
    stand_in = graphs.capture

    def failing(run: Any, memory: Any) -> Any:
        if any("heads/runner.py" in frame.filename for frame in traceback.extract_stack()):  # a pass of the head
            memory.is_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return stand_in(run, memory)

    eager = steps(head, prompts(2), TREE, max_new_tokens=20)
    monkeypatch.setattr(graphs, "capture", failing)
    monkeypatch.setattr(graphs, "EAGER_PASSES", 0)
    assert steps(head, prompts(2), TREE, max_new_tokens=20, compile="auto") == eager
    assert caplog.text.count("; it runs eagerly") == 1
    with pytest.raises(ValueError, match='leave compile="graphs" out'):
        steps(load_head(EAGLE1.head_folder), prompts(2), TREE, max_new_tokens=20, compile="graphs")


def test_captured_call_under_autocast_refused(head: Any, captures: list[Any]) -> None:
    """Would catch: graphs of passes under autocast that later calls without it replay."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="runs under torch"):
        steps(head, prompts(1), {"k": 3}, max_new_tokens=4, compile="graphs")
