"""What drafting and the loop cost by themselves: proposals, steps, long contexts."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from benchmarks.common import OURS, PEERS, PLAIN, Rows, spread
from hf_specgen import Candidates, DraftTree, NgramCandidates
from hf_specgen.candidates import DraftContext, Drafter
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import WorkloadSettings, domain_prompts, encode, load


def lookup(repeats: int, quick: bool) -> Rows:
    """Time of one proposal, by length of the context (microseconds)."""
    rows: Rows = []
    generator = random.Random(0)
    for length in (1_000, 10_000, 100_000):
        text = [generator.randrange(8192) if generator.random() < 0.5 else 7 for _ in range(length)]
        for branches in (1, 4):
            context = DraftContext([text], [[]], [100])
            begin = perf_counter()
            drafter = NgramCandidates(k=10, branches=branches).bind(context, None)
            indexing = perf_counter() - begin
            times = []
            for _ in range(200 if quick else 2000):
                context.generated[0].append(text[generator.randrange(length)])
                begin = perf_counter()
                drafter.draft(context)
                times.append(1e6 * (perf_counter() - begin))
            spread = {"median us": median(times), "p99 us": sorted(times)[int(0.99 * len(times))]}
            rows.append({"context": length, "branches": branches, **spread, "indexing ms": 1000 * indexing})
    return rows


def loop(repeats: int, quick: bool) -> Rows:
    """What a step costs besides the target's forward pass, at batch 1 (milliseconds)."""
    model, tokenizer = load(WorkloadSettings())
    inputs = next(encode(tokenizer, domain_prompts(WorkloadSettings())["edit"][:1], 1))
    variants = {
        "greedy": {},
        "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
        "repetition penalty": {"repetition_penalty": 1.1},
    }
    rows: Rows = []
    for name, arguments in variants.items():
        for variant in [*PEERS, OURS]:
            costs = [
                _between_forwards(model, inputs, {**arguments, **variant.arguments(), "max_new_tokens": 128})
                for _ in range(2 if quick else 4 * repeats)
            ]
            rows.append({"strategy": name, "variant": variant.name, **spread(costs, "ms a step")})
    return rows


def _between_forwards(model: PreTrainedModel, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]) -> float:
    """Milliseconds from the end of one forward pass to the start of the next, the median over the steps."""
    starts: list[float] = []
    ends: list[float] = []
    before = model.register_forward_pre_hook(lambda *_: starts.append(perf_counter()))
    after = model.register_forward_hook(lambda *_: ends.append(perf_counter()))
    try:
        torch.manual_seed(0)
        cast(Any, model).generate(**inputs, **arguments)
    finally:
        before.remove()
        after.remove()
    return 1000 * median(start - end for end, start in zip(ends, starts[1:], strict=False))


def context(repeats: int, quick: bool) -> Rows:
    """Time of a step at 4,000 cached tokens, with a draft of 5 and without (milliseconds)."""
    model, _ = load(WorkloadSettings())
    ids = torch.randint(5, 8000, (1, 4000), generator=torch.Generator().manual_seed(0))
    rows: Rows = []
    variants = [
        PLAIN,
        Variant("ours, nothing guessed", lambda: {"candidate_generator": _WrongGuesses(0)}),
        Variant("ours, 5 tokens guessed", lambda: {"candidate_generator": _WrongGuesses(5)}),
    ]
    times: dict[str, list[float]] = {c.name: [] for c in variants}
    for _ in range(2 if quick else 3 * repeats):
        for variant in variants:
            times[variant.name].append(_step_time(model, ids, variant.arguments()))
    for name, values in times.items():
        rows.append({"variant": name, **spread(values, "ms a step")})
    return rows


def _step_time(model: PreTrainedModel, ids: torch.Tensor, arguments: dict[str, Any]) -> float:
    """Milliseconds per step after the first two, whatever is accepted."""
    marks: list[float] = []
    handle = model.register_forward_pre_hook(lambda *_: marks.append(perf_counter()))
    try:
        cast(Any, model).generate(ids, max_new_tokens=32, min_new_tokens=32, **arguments)
    finally:
        handle.remove()
    return 1000 * median(after - before for before, after in pairwise(marks[2:]))


class _WrongGuesses(Candidates):
    """Guesses the same token over and over, or nothing."""

    def __init__(self, guesses: int):
        self.guesses = guesses

    def bind(self, context: DraftContext, model: PreTrainedModel | None) -> Drafter:
        return _WrongDrafter(self.guesses)


class _WrongDrafter(Drafter):
    def __init__(self, guesses: int):
        self._guesses = guesses

    def draft(self, context: DraftContext) -> DraftTree:
        return DraftTree.chains([[3] * min(self._guesses, context.budget[0])])
