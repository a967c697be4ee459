"""What the first call of a process costs beyond a later one, in units of T(1): self-check and calibration."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from time import process_time
from typing import Any, cast

import torch

from benchmarks.micro.operation_counter import recognised_passes
from hf_specgen import NgramCandidates
from hf_specgen.evaluation.workloads import GREEDY, domain_prompts, encode, load

BATCHES, NEW_TOKENS, FEW_TOKENS = (1, 4), 64, 8


def first_call(repeats: int, quick: bool, model: str = "") -> list[dict[str, Any]]:
    """Processor time of a model's first call beyond a later one, the median over `repeats` new processes.

    Processor time is what other processes prolong least. `model` is a folder; left out, it is the bundled model.
    """
    rows = []
    for batch in BATCHES[:1] if quick else BATCHES:
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
            found = list(processes.map(_costs, [(model, batch)] * repeats))
        rows.append({"batch": batch, **{name: median(one[name] for one in found) for name in found[0]}})
    return rows


def _costs(arguments: tuple[str, int]) -> dict[str, float]:
    """In a process of its own: what its first call has beyond a later one."""
    folder, batch = arguments
    torch.set_num_threads(1)
    model, tokenizer = load(folder)
    texts = [text for prompts in domain_prompts().values() for text in prompts][:batch]  # of different lengths
    call = {**next(encode(tokenizer, texts, batch)), **GREEDY, "max_new_tokens": NEW_TOKENS}
    call |= {"min_new_tokens": NEW_TOKENS}
    _call(model, call)  # kernels are loaded
    shorter, _ = _call(model, {**call, "max_new_tokens": FEW_TOKENS, "min_new_tokens": FEW_TOKENS})
    plain, _ = _call(model, call)
    step = (plain - shorter) / (NEW_TOKENS - FEW_TOKENS)
    first, passes = _call(model, {**call, "candidate_generator": NgramCandidates()})
    later = [_call(model, {**call, "candidate_generator": NgramCandidates()}) for _ in range(2)]
    cheapest = min(seconds for seconds, _ in later)
    in_passes = passes - min(seconds for _, seconds in later)
    relative_time = (first - cheapest) / step
    return {"T(1), ms": 1000 * step, "first call beyond, T(1)": relative_time, "in passes, T(1)": in_passes / step}


def _call(model: Any, call: dict[str, Any]) -> tuple[float, float]:
    """Processor seconds of a call, and of its passes."""
    with recognised_passes(process_time) as passes:
        begin = process_time()
        cast(Any, model).generate(**call)
        return process_time() - begin, passes.seconds[model]
