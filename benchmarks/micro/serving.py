"""Wall time with many prompts: continuous batching, replaced rows and batches; the sides take turns.

The target is the bundled model, widened to 300M parameters in float32 without changing its function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.harness.projection import GPU_LIKE, latency_for, step_seconds
from benchmarks.harness.wide import widen
from hf_specgen import (
    AdaptiveDepth,
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    NgramCandidates,
    NgramHistory,
    generate_many,
)
from hf_specgen.call_statistics import StepRecord
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT, BUNDLED_EAGLE, DOMAINS, domain_prompts, load

PARAMETERS = 300 * 10**6
Tokens = list[list[int]]
Side = Callable[[], Tokens]
STRATEGIES: dict[str, Callable[[], Candidates | None]] = {
    "plain": lambda: None,
    "n-grams": NgramCandidates,
    "n-grams, history": lambda: NgramCandidates(history=NgramHistory()),
    "n-grams, recycling": CombinedCandidates,
    "draft model": lambda: DraftModelCandidates(str(BUNDLED_DRAFT)),
    "EAGLE-3": lambda: EagleCandidates(str(BUNDLED_EAGLE)),
}
THREE = ("plain", "n-grams", "n-grams, recycling")


def generate_batch(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """`generate_batch` with drafts over plain, 2 and 40 requests at a time, of the shortest edits and JSON objects."""
    model, prompts = _model(quick), _prompts(("edit", "json"), 40)
    rows = []
    for at_a_time, count, tokens in ((2, 8, 48), (40, 40, 24)):
        requests, new = (prompts[:4], 8) if quick else (prompts[:count], tokens)

        def run(candidates: Any, requests: Tokens = requests, new: int = new, at: int = at_a_time) -> Tokens:
            return _in_packed_steps(model, requests, new, at, candidate_generator=candidates)

        rows += _compare(f"{at_a_time} at a time", _sides(run), repeats)
    return rows


def packed_passes(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Passes of `generate_batch` over plain for 40 edits and JSON objects, and their time by given latencies."""
    model, prompts, rows = _model(True), _prompts(("edit", "json"), 8 if quick else 40), []
    policy, sizes = AdaptiveDepth(GPU_LIKE), list[int]()
    assert policy.latency is not None
    target = policy.latency.buckets[0].target
    handle = model.register_forward_pre_hook(
        lambda _, __, arguments: sizes.append(arguments["input_ids"].numel()), with_kwargs=True
    )
    for at_a_time in (8, 40):
        plain: tuple[Tokens, int, float] | None = None
        for name, strategy in STRATEGIES.items():
            sizes.clear()
            tokens = _in_packed_steps(
                model, prompts, 8 if quick else 96, at_a_time, candidate_generator=strategy(), policy=policy
            )
            found = tokens, len(sizes), sum(map(target.seconds_of, sizes))
            plain = plain or found
            row: dict[str, Any] = {"at a time": at_a_time, "variant": name, "passes": found[1]}
            row |= {"passes over plain": found[1] / plain[1], "time over plain": found[2] / plain[2]}
            rows.append({**row, "same tokens": tokens == plain[0]})
    handle.remove()
    return rows


def rollouts(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Rollouts of GRPO over plain: a group of samples for each of two prompts, in `generate` and `generate_batch`.

    Of the same length each, as samples of plain `generate_batch` depend on the whole step.
    """
    model, prompts, rows = _model(quick), _prompts(("math", "json"), 2), []
    for group in (2,) if quick else (2, 8, 16):
        requests, new = [prompt for prompt in prompts for _ in range(group)], 8 if quick else 32

        def batch(candidates: Any, requests: Tokens = requests, new: int = new) -> Tokens:
            torch.manual_seed(0)
            sampled = {"do_sample": True, "eos_token_id": -1, "max_new_tokens": new}
            return _generate(model, requests, candidates, **sampled)

        def packed(candidates: Any, requests: Tokens = requests, new: int = new) -> Tokens:
            sampled = {"do_sample": True, "eos_token_id": -1, "candidate_generator": candidates}
            return _in_packed_steps(model, requests, new, len(requests), **sampled)

        for name, run in (("generate", batch), ("generate_batch", packed)):
            found = _compare(f"{name}, groups of {group}", _sides(run), min(repeats, 2))
            rows += found if run is batch else [{**row, "same tokens": "other samples"} for row in found]
    return rows


def _in_packed_steps(
    model: Any,
    prompts: Tokens,
    new_tokens: int,
    at_a_time: int,
    do_sample: bool = False,
    eos_token_id: int = 2,
    **arguments: Any,
) -> Tokens:
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=do_sample, eos_token_id=eos_token_id, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=300, page_size=32, max_batch_tokens=1024, max_requests_per_batch=at_a_time
        ),
        progress_bar=False,
        **arguments,
    )
    return [results[name].generated_tokens for name in sorted(results, key=lambda name: int(name[4:]))]


def replaced_rows(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """`generate_many` over fixed batches of 8 in `generate`, both with n-grams: 64 prompts, answers of any length.

    Decoding by given latencies, of the 16M model and in plain steps of one row, and the wall time at 300M.
    """
    prompts, steps = _prompts(tuple(DOMAINS), 8 if quick else 64), list[StepRecord]()
    generator = torch.Generator().manual_seed(0)
    prompts = [prompts[index] for index in torch.randperm(len(prompts), generator=generator).tolist()]
    arguments: dict[str, Any] = {"max_new_tokens": 8 if quick else 200, "do_sample": False, "policy": None}
    policy, candidates, model = AdaptiveDepth(GPU_LIKE), NgramCandidates(), _model(True)

    def count_steps(rows: Tokens) -> Tokens:
        assert candidates.speculation is not None
        steps.extend(candidates.speculation.batch_steps)
        return rows

    def batches() -> Tokens:
        groups = [prompts[first : first + 8] for first in range(0, len(prompts), 8)]
        return [row for group in groups for row in count_steps(_generate(model, group, candidates, **arguments))]

    def many() -> Tokens:
        answers = generate_many(model, prompts, candidates, max_rows=8, ordered=True, **arguments)
        return count_steps([answer.tokens for answer in answers])

    sides: dict[str, Side] = {"batches of 8": batches, "generate_many": many}
    arguments["policy"] = policy
    latency = latency_for(candidates, cast(LatencyModel, policy.latency))

    def projected() -> float:
        """Decoding time up to now."""
        return sum(step_seconds(step, latency) for step in steps)

    rows = _compare("projected", sides, 1, projected)
    arguments["policy"], model = None, _model(quick)
    return rows + _compare("300M", sides, 1)


def batch_of_eight(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """`generate` with a batch of 8 and n-grams over plain, with 16M and 300M parameters."""
    rows: list[dict[str, Any]] = []
    prompts = _prompts(("edit", "json"), 8)
    for name, small in (("16M", True), ("300M", quick)):
        model, arguments = _model(small), {"max_new_tokens": 8 if quick else 64, "do_sample": False}

        def run(candidates: Any, model: PreTrainedModel = model, arguments: dict[str, Any] = arguments) -> Tokens:
            return _generate(model, prompts, candidates, **arguments)

        rows += _compare(name, _sides(run, ("plain", "n-grams")), repeats)
    return rows


def _model(small: bool) -> PreTrainedModel:
    model, _ = load()
    return model if small else widen(model, PARAMETERS)


def _prompts(domains: Sequence[str], count: int) -> Tokens:
    """The shortest prompts of some domains, as many of each."""
    _, tokenizer = load()
    texts = domain_prompts(20)
    each = [sorted((tokenizer(text)["input_ids"] for text in texts[domain]), key=len) for domain in domains]
    return [prompt for group in zip(*each, strict=True) for prompt in group][:count]


def _generate(model: PreTrainedModel, prompts: Tokens, candidates: Any, **arguments: Any) -> Tokens:
    ids, ones = ([torch.tensor(one) for one in prompts], [torch.ones(len(one), dtype=torch.long) for one in prompts])
    inputs, mask = (pad_sequence(part, batch_first=True, padding_side="left") for part in (ids, ones))
    arguments = {"eos_token_id": 2, "pad_token_id": 0, **arguments}
    found: Any = model.generate(inputs, attention_mask=mask, candidate_generator=candidates, **arguments)  # type: ignore[operator]
    rows = found[:, inputs.shape[1] :].tolist()
    return [row[: row.index(2) + 1] if 2 in row and arguments["eos_token_id"] == 2 else row for row in rows]


def _sides(run: Callable[[Any], Tokens], names: Sequence[str] = THREE) -> dict[str, Side]:
    """A function with the candidates of some of `STRATEGIES`, built anew in each turn."""
    return {name: lambda name=name: run(STRATEGIES[name]()) for name in names}  # type: ignore[misc]


def _compare(
    part: str, sides: dict[str, Side], repeats: int, clock: Callable[[], float] = perf_counter
) -> list[dict[str, Any]]:
    """Time of each side and its ratio to the first, both the median over turns.

    The first of several turns, in which targets are checked and their latency is measured, is a column of its own.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, Tokens] = {}
    for turn in range(repeats):
        names = list(sides)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            begin = clock()
            tokens[name] = sides[name]()
            seconds[name].append(clock() - begin)
    first, turns = next(iter(sides)), slice(1 if repeats > 1 else 0, None)
    return [
        {
            "part": part,
            "variant": name,
            "tokens": sum(map(len, tokens[name])),
            "seconds": median(times[turns]),
            "time over the first": median(
                [one / other for one, other in zip(times[turns], seconds[first][turns], strict=True)]
            ),
            "first turn": times[0] / seconds[first][0],
            "same tokens": tokens[name] == tokens[first],
        }
        for name, times in seconds.items()
    ]
