"""Timing: both sides the same work, chats from the cache, first tokens, memory."""

from typing import Any

import pytest
import torch

from benchmarks.harness.loading import StrategyError, build
from benchmarks.harness.memory import peak_memory, reset_peak_memory
from benchmarks.harness.variants import PLAIN
from benchmarks.workloads.prompts import first_turns, followups
from hf_specgen import NgramCandidates
from hf_specgen.evaluation.measure import Variant, measure_round
from tests.helpers import tiny_model

OURS = Variant("ours", lambda: {"candidate_generator": NgramCandidates(k=4)})
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def test_chat_goes_on_from_its_cache(reference_model, tokenizer) -> None:
    """Both sides write the same two answers, and neither reads the first turn again for the second."""
    turns = ["Write a short story about a fox." * 4, "Now make the fox a crow."]
    shapes: list[int] = []
    handle = reference_model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: shapes.append(inputs[0].shape[1])
    )
    first = first_turns(tokenizer, turns[:1])
    later = followups(tokenizer, turns)
    try:
        samples = measure_round(
            reference_model, first, [PLAIN, OURS], {"max_new_tokens": 12, **SAMPLED}, 3, followups=later
        )
    finally:
        handle.remove()
    assert torch.equal(samples["plain"].ids, samples["ours"].ids)
    assert samples["plain"].tokens == samples["ours"].tokens > 12
    prompt = first["input_ids"].shape[1]
    read = [length for length in shapes if length >= prompt]
    assert read[0] == prompt and len(read) == 2 and prompt <= read[1] <= prompt + 4  # with draft tokens behind it
    assert len([length for length in shapes if length >= later[0].shape[1]]) == 4  # each turn of each side: one prompt
    ours = samples["ours"].speculation
    assert ours is not None and len(ours.rows) == 2 and ours.emitted == samples["ours"].tokens
    assert "crow" in tokenizer.decode(samples["ours"].ids[0])


def test_peak_memory_sees_an_allocation() -> None:
    device = torch.device("cpu")
    reset_peak_memory(device)
    before = peak_memory(device)
    if not before:
        pytest.skip("this system does not tell the peak of resident memory")
    torch.ones(64 * 2**20, dtype=torch.uint8).sum()
    during = peak_memory(device)
    reset_peak_memory(device)
    after = peak_memory(device)
    assert during - before > 32 * 2**20  # 64 MiB were touched; a part may have been resident already
    assert during - after > 32 * 2**20


@pytest.mark.parametrize(
    ("strategies", "peers", "message"),
    [
        (
            ["telepathy"],
            [],
            "unknown strategy 'telepathy'; there are ngram, auto, draft, layerskip, medusa, eagle, heads, dspark",
        ),
        (["ngram=4"], [], "ngram takes no source, got '4'"),
        (["draft"], [], "draft needs a file or id for this model: draft="),
        (["ngram"], ["vllm"], "unknown peer 'vllm'"),
        (["draft=./no-such-folder"], [], "no-such-folder"),
        (["draft=benchmarks/assets/draft-lm"], [], "benchmarks/assets/draft-lm: "),
        (["layerskip=./no-such-folder"], [], "no-such-folder"),
        (["ngram+telepathy"], [], "unknown strategy 'telepathy'"),
    ],
)
def test_bad_strategies(strategies: list[str], peers: list[str], message: str) -> None:
    """The embedded draft (8,192 tokens) cannot draft for a target of 99."""
    with pytest.raises(StrategyError, match=message):
        build(strategies, peers, tiny_model("llama"))


# The metric of evaluate, on cases that the field agrees on


evaluate: Any = pytest.importorskip("evaluate", reason="the metric needs evaluate")
THREE_DRAFTS = {"drafted": [3, 3, 2], "accepted": [3, 1, 0]}


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As a user loads it; `evaluate` keeps its files below the user's home otherwise."""
    from tests.helpers.paths import ROOT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path_factory.mktemp("metrics")))
        yield evaluate.load(str(ROOT / "benchmarks" / "acceptance.py"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (THREE_DRAFTS, {"drafts": 3, "drafted": 8, "accepted": 4, "acceptance_rate": 0.5}),
        (THREE_DRAFTS, {"acceptance_rate_per_position": [2 / 3, 1 / 3, 1 / 2]}),
        # 7 nodes that are 3 deep reach position 3, not 7.
        ({"drafted": [7], "accepted": [2], "depths": [3]}, {"acceptance_rate_per_position": [1, 1, 0]}),
        # The two definitions differ where steps draft nothing or are cut.
        (
            {"drafted": [3, 3, 0, 0], "accepted": [3, 0, 0, 0], "emitted": [3, 1, 1, 1]},
            {"mean_acceptance_length": 2.5, "tokens_per_step": 1.5},
        ),
    ],
)
def test_acceptance_of_steps(metric: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = metric.compute(**given)
    assert {key: found[key] for key in expected} == expected


def test_impossible_steps_are_refused(metric: Any) -> None:
    with pytest.raises(ValueError, match="accepted <= depth <= drafted"):
        metric.compute(drafted=[2], accepted=[3])
    with pytest.raises(ValueError, match="argument 4 is longer"):
        metric.compute(drafted=[2], accepted=[1], emitted=[1, 2], depths=[2])
