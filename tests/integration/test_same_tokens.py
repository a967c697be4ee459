"""The tokens of plain `generate` for every strategy, by sampling, batch, end and depth; architectures: tests/slow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specgen import AdaptiveDepth, AutoCandidates, NgramCandidates, Policy
from tests.fuzz.scripted import RandomDepths
from tests.helpers import END, SAMPLING, PrefixReader, assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.comparison import answers, plain_output
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.processors import RecordingStreamer
from tests.helpers.strategies import ENCODER_DECODERS, PARTLY_RIGHT, RANDOM_HEADS, STRATEGIES, make

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS, TOKENS_TO_ADAPT = 16, 24
"""Enough steps for plain ones among those of random depths; and for adaptive depths to change."""
SETTINGS: dict[str, dict[str, Any]] = {
    **SAMPLING,
    "sampled by text": {"do_sample": True, "top_p": 0.8, "no_repeat_ngram_size": 3},
    "lockstep": {"make_processors": lambda: LogitsProcessorList([PrefixReader()])},
    "EOS": {**END, "min_new_tokens": 5},
    "stop string": {"stop_strings": ["!", "%", "0"]},
    "two tokens": {"max_new_tokens": 2, "prefill_chunk_size": 4},
}
EVERYWHERE: list[tuple[str, Callable[[], Policy] | None, int]] = [("greedy", None, 3), ("sampled", RandomDepths, 3)]
"""Arguments, policy (None for that of the strategy), rows: those of every strategy."""
IN_TURN: list[tuple[str, Callable[[], Policy] | None, int]] = [
    ("sampled", None, 1),
    ("sampled by text", None, 3),
    ("lockstep", None, 3),
    ("EOS", None, 4),
    ("stop string", None, 3),
    ("greedy", RandomDepths, 1),
    ("EOS", AdaptiveDepth, 3),
    ("sampled", AdaptiveDepth, 1),
    ("two tokens", None, 3),
]
"""Those of every third one, so that the forms of a strategy, which follow each other, have all of them together."""
CASES = [
    (strategy, *case)
    for place, strategy in enumerate(STRATEGIES)
    for case in EVERYWHERE + [case for number, case in enumerate(IN_TURN) if (place + number) % 3 == 0]
]
LEARN_FROM_CALLS = ("n-grams, history", "recycling", "recycling, tree", "combined")
UNUSUAL_PROMPTS: dict[str, torch.Tensor] = {
    "one token": torch.tensor([[5]]),
    "a row of padding": torch.tensor([[0, 0, 0], [5, 6, 5]]),
    "all padding": torch.zeros(2, 2, dtype=torch.long),
}


@pytest.mark.parametrize(
    ("strategy", "settings", "policy", "batch"), CASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_strategy_same_tokens(strategy: str, settings: str, policy: Any, batch: int, tokenizer: Any) -> None:
    """Would catch: a cache that is wrong behind accepted paths, states of a wrong row or step, tokens after EOS."""
    tokens = 12 if strategy not in PARTLY_RIGHT else TOKENS_TO_ADAPT if policy is AdaptiveDepth else TOKENS
    arguments = {"max_new_tokens": tokens, **SETTINGS[settings]}
    if settings == "stop string":
        arguments["tokenizer"] = tokenizer
    if strategy in ENCODER_DECODERS:
        arguments.pop("prefill_chunk_size", None)
    candidates: Any = make(strategy, policy=policy() if policy else None)
    target, inputs = STRATEGIES[strategy].target(), STRATEGIES[strategy].inputs(batch)
    times = 2 if strategy in LEARN_FROM_CALLS else 1
    calls = [assert_same_tokens(target, inputs, candidates, **arguments) for _ in range(times)]
    if policy is RandomDepths:
        drafted = {step.drafted for row in calls[-1].rows for step in row}
        assert 0 in drafted and max(drafted) > 0, "both kinds of steps are needed"
    if (settings, policy, batch) == ("greedy", None, 3) and strategy not in RANDOM_HEADS:
        assert 0 < sum(call.accepted for call in calls) < sum(call.drafted for call in calls)
        assert strategy != "oracle, some" or len({len(steps) for steps in calls[0].rows}) > 1, (
            "cut to the shortest draft"
        )


@pytest.mark.parametrize(
    ("strategy", "prompt"),
    [
        (strategy, prompt)
        for place, strategy in enumerate({**PARTLY_RIGHT, **RANDOM_HEADS})
        for prompt in ("one token", ("a row of padding", "all padding")[place % 2])
    ],
)
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
    target, inputs, runs = STRATEGIES[strategy].target(), STRATEGIES[strategy].inputs(2), []
    plain = plain_output(target, inputs, max_new_tokens=8)[0]
    arguments = {**inputs, "max_new_tokens": 8, "verification": verification, "memory": False}
    arguments["return_dict_in_generate"] = True
    if verification == "rejection":
        ids = target.generate(**arguments, candidate_generator=make(strategy)(answers(target, inputs, plain))).sequences
        assert torch.equal(ids, plain)
    for _ in range(2):
        torch.manual_seed(6)
        candidates = make(strategy)(answers(target, inputs, plain))
        output = target.generate(**arguments, do_sample=True, temperature=0.3, candidate_generator=candidates)
        runs.append(output.sequences)
    assert torch.equal(*runs)


@pytest.mark.parametrize(("place", "name"), list(enumerate(FIXTURES)))
def test_head_of_every_format_same_tokens(place: int, name: str) -> None:
    """Would catch: an option of a format that the loop does not know. Random heads, whose drafts are rejected."""
    fixture, tree = FIXTURES[name], (None, 6)[place % 2]
    candidates = AutoCandidates.from_pretrained(fixture.checkpoint_folder, k=2, tree=tree)
    assert assert_same_tokens(fixture.target, prompts(2), candidates, max_new_tokens=6).drafted > 0


# Unusual inputs: prompts of one token, other integer types, positional arguments, lower precision


def test_generate_int32_prompt_keeps_its_dtype() -> None:
    """Would catch: ids returned in another dtype than those given."""
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
def test_generate_in_lower_precision_same_first_token_and_best_ones_but_for_rounding(dtype: torch.dtype) -> None:
    """Would catch: wrong masks or positions that are taken for rounding, by which near-ties may be decided otherwise.

    The first pass is that of plain `generate`. 4 units in the last place: what a pass of four layers rounds.
    """
    model, inputs, candidates = fresh_model("llama").to(dtype), prompts(2), NgramCandidates(tree=16)
    plain = model.generate(**inputs, max_new_tokens=20)
    ours = model.generate(**inputs, max_new_tokens=20, candidate_generator=candidates)
    assert ours.shape == plain.shape and torch.equal(ours[:, :13], plain[:, :13]) and candidates.speculation.drafted > 0
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 20, dtype=torch.long)], dim=1)
    with torch.no_grad():
        logits = model(ours, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)).logits[:, 11:-1]
    behind = logits.amax(dim=-1) - logits.gather(2, ours[:, 12:, None])[..., 0]
    assert float(behind.max()) <= 4 * torch.finfo(dtype).eps * float(logits.abs().max())
