"""Operations, host reads and tensors from host data of a decoding step outside of forward passes, at batch 1.

On a GPU an operation is a kernel launch, a host read waits for the device, and a tensor from host data is copied to it.
A step in which a module runs for the first time is left out: there the drafter reads the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, cast

from transformers import PreTrainedModel

from benchmarks.harness.projection import GPU_LIKE
from benchmarks.micro.operation_counter import BUILT, COMPUTING, KINDS, READS, counting, each_step, recognised_passes
from hf_specgen import (
    AdaptiveDepth,
    Candidates,
    CombinedCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    MedusaCandidates,
    NgramCandidates,
    RecyclingCandidates,
)
from hf_specgen.candidates.one_pass import DEFAULT_NODES
from hf_specgen.evaluation import workloads

MAX_TENSORS = 3
"""Goal of a step for tensors from host data."""


@dataclass(frozen=True)
class Strategy:
    """A strategy with the most operations without views, and host reads, that its steps should need."""

    name: str
    build: Callable[[], Candidates]
    operations: int
    reads: int = 3


def _combined() -> Candidates:
    members = [NgramCandidates(k=8), RecyclingCandidates(k=8)]
    return CombinedCandidates(members, policy=AdaptiveDepth(GPU_LIKE))


STRATEGIES = (
    Strategy("n-grams k=8", lambda: NgramCandidates(k=8), 27, 4),
    Strategy("n-grams + recycling", _combined, 45, 4),
    Strategy("Medusa", lambda: MedusaCandidates(workloads.BUNDLED_HEADS, tree=DEFAULT_NODES, policy=FixedDepth()), 60),
    Strategy("DSpark", lambda: DFlashCandidates(workloads.BUNDLED_DSPARK, k=7, tree=DEFAULT_NODES), 60),
    Strategy("draft model k=5", lambda: DraftModelCandidates(workloads.BUNDLED_DRAFT, k=5), 80),
    Strategy("draft model tree=32 k=6", lambda: DraftModelCandidates(workloads.BUNDLED_DRAFT, k=6, tree=32), 120),
    Strategy("EAGLE-3 tree=32 k=6", lambda: EagleCandidates(workloads.BUNDLED_EAGLE, k=6, tree=32), 120),
    Strategy("EAGLE-3 k=auto", lambda: EagleCandidates(workloads.BUNDLED_EAGLE, policy=AdaptiveDepth(GPU_LIKE)), 120),
)


def step_operations(repeats: int, quick: bool, prompt: str = "", max_new_tokens: int = 80) -> list[dict[str, Any]]:
    """Counts per step, and the time that drafting and the loop take outside of forward passes.

    `prompt` is the text to continue; left out, it is the first bundled prompt of the domain json.
    """
    model, tokenizer = workloads.load(device="cpu")
    texts = [prompt] if prompt else workloads.domain_prompts()["json"][:1]
    arguments = {**next(workloads.encode(tokenizer, texts, 1)), **workloads.GREEDY}
    arguments["max_new_tokens"] = min(24, max_new_tokens) if quick else max_new_tokens
    rows = []
    for strategy in STRATEGIES:
        candidates = strategy.build()
        call = {**arguments, "candidate_generator": candidates}
        cast(Any, model).generate(**call)  # the checks and calibration of a first call
        steps, counts = _counts(model, call)
        assert candidates.speculation is not None
        drafted = candidates.speculation.drafted / max(1, candidates.speculation.steps)
        goals = {COMPUTING: strategy.operations, READS: strategy.reads, BUILT: MAX_TENSORS}
        row: dict[str, Any] = {"strategy": strategy.name, "steps": steps, "draft tokens": round(drafted, 1)}
        for kind in KINDS:
            row[kind] = round(counts[kind] / max(1, steps), 1)
            row |= {f"{kind}: goal": goals[kind]} if kind in goals else {}
        times = [_times(model, call, candidates) for _ in range(1 if quick else repeats)]
        row |= {name: median(one[name] for one in times) for name in times[0]}
        rows.append(row)
    return rows


def _counts(model: PreTrainedModel, call: dict[str, Any]) -> tuple[int, Counter[str]]:
    """How many steps of a call were counted, and what they did outside of forward passes."""
    with counting() as (counts, passes), each_step(lambda: (Counter(counts), len(passes.modules))) as marks:
        cast(Any, model).generate(**call)
    total: Counter[str] = Counter()
    steps = 0
    for (before, known), (after, modules) in pairwise(marks):
        if modules == known:
            steps += 1
            total.update({kind: after[kind] - before[kind] for kind in KINDS})
    return steps, total


def _times(model: PreTrainedModel, call: dict[str, Any], candidates: Candidates) -> dict[str, float]:
    """The share of drafting outside of the drafter's passes, and milliseconds per step outside of all passes."""
    with recognised_passes() as passes, each_step(lambda: (perf_counter(), sum(passes.seconds.values()))) as marks:
        cast(Any, model).generate(**call)
    assert candidates.speculation is not None
    drafting = candidates.speculation.seconds["draft"]
    drafter = sum(seconds for module, seconds in passes.seconds.items() if module is not model)
    loop = [(end - begin) - (after - before) for (begin, before), (end, after) in pairwise(marks)]
    share = (drafting - drafter) / drafting if drafting else 0.0
    return {"drafting outside passes": share, "loop, ms a step": 1000 * median(loop) if loop else 0.0}
