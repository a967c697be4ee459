"""Peak memory of `generate` calls, each measured in a process of its own.

An allocator keeps memory that was used before, so that a second measurement in the same process would be too low.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

from benchmarks.harness.loading import build
from benchmarks.harness.plan import Plan
from benchmarks.harness.variants import PLAIN
from benchmarks.workloads.prompts import of_length
from hf_specgen.evaluation.measure import Variant, wait
from hf_specgen.evaluation.workloads import domain_prompts, load

Rows = list[dict[str, Any]]
T = TypeVar("T")
NEW_TOKENS = 256
WARM_UP_TOKENS = 8
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, MMAP_BYTES = -1, -3, 65536
"""Parameters of glibc's `mallopt`, and the size from which an allocation has pages of its own."""


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of the peak."""
    with suppress(OSError):  # Linux only: sets the peak of resident memory to its current value
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The peak since `reset_peak_memory` in bytes: of torch on a GPU, otherwise of the process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
    return 0


def measure_memory(plan: Plan) -> Rows:
    """Growth of the peak in a call of plain `generate` and of every strategy, without and with `output_scores`.

    At `memory_context` tokens, with the last of the fixed settings of each strategy, which is the largest one.
    """
    rows: Rows = []
    names = in_new_process(variant_names, plan)
    for scores in (False, True):
        growth = {name: in_new_process(memory_growth, plan, name, scores) for name in names}
        plain = growth[PLAIN.name]
        rows += [
            {"output_scores": "yes" if scores else "no", "variant": name, "peak MB": size / 1e6}
            | {"of plain": size / plain if plain else ""}
            for name, size in growth.items()
        ]
    return rows


def variant_names(plan: Plan) -> list[str]:
    """The names of the variants that are measured."""
    return [variant.name for variant in _variants(plan, _load(plan)[0])]


def memory_growth(plan: Plan, name: str, scores: bool) -> int:
    """Bytes by which the peak during a call exceeds the memory in use before it; in a process of its own."""
    model, tokenizer = _load(plan)
    variant = next(variant for variant in _variants(plan, model) if variant.name == name)
    filler = [prompt for prompts in domain_prompts().values() for prompt in prompts]
    repeats = 1 + plan.memory_context // len(filler)
    inputs = of_length(tokenizer, filler[0], filler * repeats, plan.memory_context)
    short = {key: tensor[:, :WARM_UP_TOKENS] for key, tensor in inputs.items()}
    outputs = {"return_dict_in_generate": True, "output_scores": True} if scores else {}
    _generate(model, short, variant, WARM_UP_TOKENS, outputs)
    gc.collect()
    give_freed_memory_back()
    reset_peak_memory(model.device)
    before = peak_memory(model.device)
    _generate(model, inputs, variant, NEW_TOKENS, outputs)
    return peak_memory(model.device) - before


def in_new_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, whose peak memory is that of its live tensors.

    It is forked from a server that has imported this module and nothing else was run in: importing it anew for every
    measurement took longer than the measurement.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def give_freed_memory_back() -> None:
    """Make glibc return freed memory, now and at once from now on: a call that reuses it would seem to need less."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, 0)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        libc.malloc_trim(0)


def _load(plan: Plan) -> tuple[PreTrainedModel, Any]:
    return load(plan.model, plan.dtype, plan.device)


def _variants(plan: Plan, model: PreTrainedModel) -> list[Variant]:
    families = build(plan.strategies, plan.peers, model)
    fixed = [[setting for setting in family.settings if "auto" not in setting] for family in families]
    return [PLAIN, *(family.variant(settings[-1]) for family, settings in zip(families, fixed, strict=True))]


def _generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], variant: Variant, tokens: int, outputs: dict[str, Any]
) -> None:
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    cast(Any, model).generate(**inputs, **limits, **outputs, **variant.arguments())
    wait(model.device)
