"""The tokens of plain `generate`, whatever is proposed: every strategy by way of sampling, batch, end and depth.

All architectures are in `tests/slow`; `tests/fuzz` draws from the same space at random.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specgen import (
    AdaptiveDepth,
    DFlashCandidates,
    EagleCandidates,
    GemmaAssistantCandidates,
    MTPCandidates,
    NgramCandidates,
    PEagleCandidates,
    Policy,
)
from tests.helpers import (
    END,
    SAMPLING,
    PrefixReader,
    RecordingStreamer,
    RowWisePrefixReader,
    assert_same_tokens,
    fresh_model,
    prompts,
    tiny_model,
)
from tests.helpers.cases import FULL_SAMPLING, ORACLES, PROCESSORS, SAMPLING_AND_PROCESSORS, assert_oracle_was_used
from tests.helpers.comparison import plain_output
from tests.helpers.policies import Irregular, padding
from tests.helpers.strategies import FIXTURES, PARTLY_RIGHT, STRATEGIES, make, repeating

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 24
"""Enough steps for the whole pattern of `Irregular`, and for adaptive depths to change."""
SETTINGS: dict[str, dict[str, Any]] = {
    **SAMPLING,
    "sampled by text": {"do_sample": True, "top_p": 0.8, "no_repeat_ngram_size": 3},
    "lockstep": {"make_processors": lambda: LogitsProcessorList([PrefixReader()])},
    "EOS": {**END, "min_new_tokens": 5},
    "stop string": {"stop_strings": ["!", "%", "0"]},
    "two tokens": {"max_new_tokens": 2, "prefill_chunk_size": 4},
}
CASES: list[tuple[str, Callable[[], Policy] | None, int]] = [
    ("greedy", None, 1),
    ("greedy", None, 3),
    ("sampled", None, 1),
    ("sampled", None, 3),
    ("sampled by text", None, 3),
    ("lockstep", None, 3),
    ("EOS", None, 4),
    ("stop string", None, 3),
    ("greedy", Irregular, 1),
    ("sampled", Irregular, 3),
    ("EOS", AdaptiveDepth, 3),
    ("sampled", AdaptiveDepth, 1),
    ("sampled", padding, 3),
    ("two tokens", None, 3),
]
"""Arguments, policy (None for that of the strategy), rows."""
LEARN_FROM_CALLS = ("n-grams, history", "recycling", "recycling, tree", "combined")
HEADS: dict[str, Any] = {
    "autoregressive": EagleCandidates,
    "block": DFlashCandidates,
    "path": DFlashCandidates,
    "parallel": PEagleCandidates,
    "mtp": MTPCandidates,
    "mtp_recursive": MTPCandidates,
    "assistant": GemmaAssistantCandidates,
}
UNUSUAL_PROMPTS: dict[str, torch.Tensor] = {
    "one token": torch.tensor([[5]]),
    "a row of padding": torch.tensor([[0, 0, 0], [5, 6, 5]]),
    "all padding": torch.zeros(2, 2, dtype=torch.long),
}


@pytest.mark.parametrize(("settings", "policy", "batch"), CASES, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_same_tokens(
    strategy: str, settings: str, policy: Callable[[], Policy] | None, batch: int, tokenizer: Any
) -> None:
    """Would catch: a cache that is wrong behind accepted paths, states of a wrong row or step, tokens after EOS."""
    arguments = {"max_new_tokens": TOKENS if strategy in PARTLY_RIGHT else 12, **SETTINGS[settings]}
    if settings == "stop string":
        arguments["tokenizer"] = tokenizer
    candidates: Any = make(strategy, policy=policy() if policy else None)
    calls = [
        assert_same_tokens(STRATEGIES[strategy].target(), repeating(batch), candidates, **arguments)
        for _ in range(2 if strategy in LEARN_FROM_CALLS else 1)
    ]
    if policy is Irregular:
        drafted = {step.drafted for row in calls[-1].rows for step in row}
        assert 0 in drafted and max(drafted) > 0, "both kinds of steps are needed"
    if policy is padding and strategy in PARTLY_RIGHT:  # states of recurrent targets are not padded
        sizes = [step.tokens_per_row for step in calls[-1].passes[1:]]  # the first is the prefill
        assert all(size == 1 or size >= 8 for size in sizes)
        assert calls[-1].drafted > 0, "drafts cost nothing"
    if (settings, policy, batch) == ("greedy", None, 3) and strategy in PARTLY_RIGHT:
        assert 0 < sum(call.accepted for call in calls) < sum(call.drafted for call in calls)


@pytest.mark.parametrize("prompt", UNUSUAL_PROMPTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_unusual_prompts_same_tokens(strategy: str, prompt: str) -> None:
    """Would catch: the last token taken of a prompt that has none, a first draft without a hidden state."""
    ids = UNUSUAL_PROMPTS[prompt]
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    assert_same_tokens(STRATEGIES[strategy].target(), inputs, make(strategy), max_new_tokens=8)


@pytest.mark.parametrize(
    ("strategy", "verification"),
    [*((name, "rejection") for name in STRATEGIES), *((name, "typical") for name in ("oracle, tree", "Medusa, tree"))],
)
def test_strategy_other_verification_repeats_under_a_seed(strategy: str, verification: str) -> None:
    """Greedy, rejection sampling gives plain tokens. Would catch: q of another node, draws beside the seed."""
    target, inputs, runs = STRATEGIES[strategy].target(), repeating(2), []
    plain = plain_output(target, inputs, max_new_tokens=12)[0]
    arguments = {**inputs, "max_new_tokens": 12, "verification": verification, "memory": False}
    if verification == "rejection":
        ids = target.generate(**arguments, candidate_generator=make(strategy)(plain[:, 12:]))
        assert torch.equal(ids, plain)
    for _ in range(2):
        torch.manual_seed(6)
        candidates = make(strategy)(plain[:, 12:])
        runs.append(target.generate(**arguments, do_sample=True, temperature=0.3, candidate_generator=candidates))
    assert torch.equal(*runs)


@pytest.mark.parametrize("tree", [None, 6])
@pytest.mark.parametrize("name", [name for name, fixture in FIXTURES.items() if fixture.family in HEADS])
def test_head_of_every_format_same_tokens(name: str, tree: int | None) -> None:
    """Would catch: an option of a format that the loop does not know. Random heads, whose drafts are rejected."""
    fixture = FIXTURES[name]
    candidates = HEADS[fixture.family](fixture.checkpoint_folder, k=2, tree=tree)
    assert assert_same_tokens(fixture.target, prompts(2), candidates, max_new_tokens=6).drafted > 0


# Arguments of `generate`, with an oracle


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize(("sampling", "processors"), SAMPLING_AND_PROCESSORS)
def test_generate_with_processors_same_tokens(batch: int, oracle: str, sampling: str, processors: str) -> None:
    """Would catch: a processor that receives another prefix than in plain `generate`, noise of another step or row, a
    stateful processor called for a rejected token, twice for a column, or out of order."""
    arguments = {"max_new_tokens": 14, **FULL_SAMPLING[sampling], **PROCESSORS[processors]}
    statistics = assert_same_tokens(tiny_model("llama"), prompts(batch), ORACLES[oracle], **arguments)
    if processors != "minimum":  # there EOS may come before the first accepted or rejected token
        assert_oracle_was_used(oracle, statistics)


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_with_guidance_scale_same_tokens(batch: int) -> None:
    """Classifier-free guidance runs the model inside the processor, with a cache of its own, one token a call."""
    inputs = prompts(batch)
    if batch > 1:
        inputs["attention_mask"].fill_(1)
    assert_same_tokens(tiny_model("llama"), inputs, ORACLES["sometimes"], max_new_tokens=14, guidance_scale=1.5)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"make_processors": lambda: LogitsProcessorList([RowWisePrefixReader()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + step + row) % 99 for step in (1, 2, 5)]},
        {"sequence_bias": {(5,): 0.5, (6, 7): 2.0}},
        {"encoder_repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2},
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [4, 5], "pad_token_id": 0},
        {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": [4, 5]},
        {"forced_eos_token_id": 7, "renormalize_logits": True, "remove_invalid_values": True},
        {"do_sample": True, "min_p": 0.05, "typical_p": 0.9, "top_k": 0},
        {"do_sample": True, "epsilon_cutoff": 0.005, "eta_cutoff": 0.005, "top_h": 0.6, "top_k": 0},
    ],
    ids=lambda arguments: next((key for key in arguments if key not in ("do_sample", "make_processors")), "row_wise"),
)
def test_generate_with_less_common_processors_same_tokens(batch: int, arguments: dict[str, Any]) -> None:
    """Would catch: one of the processors that `generate` builds put into the wrong class of processors."""
    assert_same_tokens(tiny_model("llama"), prompts(batch), ORACLES["sometimes"], max_new_tokens=14, **arguments)


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_with_strict_grammar_same_tokens(batch: int) -> None:
    """Would catch: a grammar that receives a text that plain `generate` never passes to it; a trie raises then."""

    def allowed(row: int, ids: Any) -> list[int]:
        new = ids[12:].tolist()
        return [(ids[0].item() + 7 * len(new) + row) % 90 + 1, 95] if 0 not in new else []

    inputs = prompts(batch)
    assert_same_tokens(
        tiny_model("llama"), inputs, ORACLES["sometimes"], max_new_tokens=14, prefix_allowed_tokens_fn=allowed
    )


@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 1.2}], ids=["score-only", "row-wise"])
def test_generate_batch_of_rows_takes_different_numbers_of_steps(arguments: dict[str, Any]) -> None:
    """Would catch: a batch cut to its shortest accepted draft."""
    statistics = assert_same_tokens(
        tiny_model("llama"), prompts(3), ORACLES["sometimes"], max_new_tokens=40, **arguments
    )
    assert len({len(steps) for steps in statistics.rows}) > 1


def test_generate_with_num_return_sequences_same_tokens() -> None:
    """Would catch: noise or answers assigned to the row of another returned sequence."""
    arguments = {"max_new_tokens": 16, "do_sample": True, "num_return_sequences": 3}
    # The answers have 6 rows, one per returned sequence.
    statistics = assert_same_tokens(tiny_model("llama"), prompts(2), ORACLES["sometimes"], **arguments)
    assert len(statistics.rows) == 6


@pytest.mark.parametrize("architecture", ["llama4_text", "gemma4_text", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_window_smaller_than_text_same_tokens(architecture: str, batch: int) -> None:
    """Would catch: a window counted in cache slots instead of positions (siblings of a tree share a position)."""
    size = {"attention_chunk_size": 8} if architecture == "llama4_text" else {"sliding_window": 8}
    assert_same_tokens(tiny_model(architecture, **size), prompts(batch), ORACLES["tree"], max_new_tokens=24)


# Unusual inputs: prompts of one token, other integer types, positional arguments, lower precision


def test_generate_int32_prompt_keeps_its_dtype() -> None:
    model, inputs = tiny_model("llama"), {"input_ids": prompts(1)["input_ids"].int()}
    plain = model.generate(**inputs, max_new_tokens=6)
    ours = model.generate(**inputs, max_new_tokens=6, candidate_generator=NgramCandidates())
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_generate_with_positional_arguments_same_tokens() -> None:
    """`generate(inputs, generation_config, logits_processor, stopping_criteria, …, streamer)`."""
    model, ids, seen = tiny_model("llama"), prompts(1)["input_ids"], RecordingStreamer()
    arguments = (ids, None, LogitsProcessorList(), StoppingCriteriaList(), None, None, None, seen)
    ours = model.generate(*arguments, max_new_tokens=5, candidate_generator=NgramCandidates())
    assert torch.equal(ours, model.generate(ids, max_new_tokens=5))
    assert seen.ended == 1 and len(seen.chunks) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generate_in_lower_precision_same_first_token(dtype: torch.dtype) -> None:
    """Later tokens may differ at near-ties, since k rows round differently from one; the first pass is the same."""
    model = fresh_model("llama").to(dtype)
    plain = model.generate(**prompts(2), max_new_tokens=10)
    ours = model.generate(**prompts(2), max_new_tokens=10, candidate_generator=NgramCandidates(tree=16))
    assert ours.shape == plain.shape and torch.equal(ours[:, :13], plain[:, :13])
