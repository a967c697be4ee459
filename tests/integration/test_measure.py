"""Timing: both sides the same work, chats from the cache, first tokens, memory."""

import pytest
import torch

from benchmarks.harness.loading import StrategyError, build
from benchmarks.harness.memory import peak_memory, reset_peak_memory
from benchmarks.harness.variants import PLAIN
from benchmarks.workloads.prompts import first_turns, followups
from hf_specgen import LayerSkipCandidates, NgramCandidates
from hf_specgen.evaluation.measure import Variant, measure_round
from hf_specgen.evaluation.workloads import EMBEDDED_ADAPTER
from hf_specgen.heads.exit_head import exit_layer_of
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


def test_loading_an_adapter_takes_no_noise(reference_model, tokenizer) -> None:
    """The first call of a strategy loads its adapter; drawing its first weights once moved the call's noise."""
    inputs = first_turns(tokenizer, ["Write a story about a fox."])
    new = LayerSkipCandidates(exit_layer_of(EMBEDDED_ADAPTER), adapter=str(EMBEDDED_ADAPTER))
    ours = Variant("ours", lambda: {"candidate_generator": new})
    samples = measure_round(reference_model, inputs, [PLAIN, ours], {"max_new_tokens": 16, **SAMPLED}, 0)
    assert torch.equal(samples["plain"].ids, samples["ours"].ids)


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
