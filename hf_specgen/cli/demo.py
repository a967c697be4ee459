"""`hf-specgen demo`: plain `generate` and every strategy on two targets, measured side by side while you watch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.live import Live
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.cli.demo_plan import answer_length, batches, order, round_robin
from hf_specgen.cli.demo_variants import variants
from hf_specgen.cli.demo_view import closing_lines, comparison, one_answer
from hf_specgen.cli.settings import DemoSettings
from hf_specgen.evaluation.measure import Sample, Total, Variant, interleave, measure_round
from hf_specgen.evaluation.provenance import provenance
from hf_specgen.evaluation.widen import widen_in_fast_dtype
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    GREEDY,
    PEER,
    PLAIN,
    Difference,
    check_installed,
    domain_prompts,
    encode,
    first_difference,
    load,
)

WARM_UP, WARM_UP_TOKENS = "Write a function that adds two numbers.", 8
"""An uncounted call of each variant, in which models are loaded and checked, and the speed of plain `generate`."""
WIDE_SHARE = 0.8
"""Share of the time for the widened target, which takes longer for each prompt."""


@dataclass
class Target:
    """A target and what was measured on it.

    Args:
        title: above its column.
        dtype: of its weights.
        totals: measurements by variant.
        domains: the same, by domain and variant.
        prompts: how many were answered by every variant that can.
        length: maximum tokens of each answer.
        answers: number of compared answers, which must have the tokens of plain `generate`.
        differences: (variant, first difference) of each answer that has other tokens.
    """

    title: str
    dtype: str
    totals: dict[str, Total]
    domains: dict[str, dict[str, Total]] = field(default_factory=dict)
    prompts: int = 0
    length: int = 0
    answers: int = 0
    differences: list[tuple[str, Difference]] = field(default_factory=list)


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it.

    Args:
        settings: of the demo.
        console: to print to; the terminal if left out.

    Returns:
        False if a token differs in float32.

    Raises:
        OSError, ValueError: for models, prompts or settings that cannot be used.
    """
    console = console or Console()
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        targets, tokenizer = run_demo(settings, lambda found, now: live.update(comparison(found, now), refresh=True))
        live.update(comparison(targets), refresh=True)
    if not console.is_terminal:
        console.print(comparison(targets))
    for line in closing_lines(targets, settings.widened):
        console.print(line, highlight=False)
    console.print(one_answer(targets[-1].totals, tokenizer))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(to_json(settings, targets), indent=2, default=str), encoding="utf-8")
    return not any(target.differences for target in targets if target.dtype == "float32")


def run_demo(
    settings: DemoSettings, on_change: Callable[[list[Target], str], None]
) -> tuple[list[Target], PreTrainedTokenizerBase]:
    """Measure all variants on every target.

    Args:
        settings: of the demo.
        on_change: receives the targets, and what is being done, whenever that changes.
    """
    check_installed(settings)
    prompts = list(round_robin(domain_prompts(settings)))
    model, tokenizer = load(settings)
    compared = variants(settings)
    size = sum(parameter.numel() for parameter in model.parameters())
    targets = [_empty(f"{_millions(size)} {settings.dtype}", settings.dtype, compared)]
    if settings.widened:
        targets.append(_empty(f"{settings.wide}M", "", compared))
    on_change(targets, "loading")
    seconds = settings.seconds * (1 - WIDE_SHARE if settings.widened else 1)
    for target in targets:
        if target is not targets[0]:
            on_change(targets, f"{target.title}: widening the layers")
            model, target.dtype = widen_in_fast_dtype(model, settings.wide * 10**6)
            target.title = f"{settings.wide}M {target.dtype}"
            compared = variants(settings)
            target.totals = {variant.name: Total() for variant in compared}
            seconds = settings.seconds * WIDE_SHARE
        _measure(target, model, tokenizer, compared, prompts, settings, seconds, partial(on_change, targets))
    return targets, tokenizer


def _measure(
    target: Target,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    compared: Sequence[Variant],
    prompts: Sequence[tuple[str, str]],
    settings: DemoSettings,
    seconds: float,
    on_change: Callable[[str], None],
) -> None:
    """Run all variants on one prompt after the other, as long as another prompt fits into the time."""
    size, begin = settings.batch_size, perf_counter()
    on_change(f"{target.title}: loading drafts, checking the target, warming up")
    speed = _warm_up(model, tokenizer, compared, size)
    left = seconds - (perf_counter() - begin)
    length = target.length = answer_length(settings.max_new_tokens, left, speed, len(compared))
    slowest = 0.0
    for number, (domain, texts) in enumerate(batches(prompts, size)):
        started = perf_counter()
        if number and started - begin + slowest > seconds:
            break
        generation = {"max_new_tokens": length, **DOMAINS.get(domain, GREEDY)}
        exact = _is_exact(settings, generation)
        totals = target.domains.setdefault(domain, {variant.name: Total() for variant in compared})
        for inputs in encode(tokenizer, texts, size):
            plain: Sample | None = None
            for variant in order(compared, number, len(inputs["input_ids"])):
                on_change(f"{target.title}: {domain}, {variant.name}")
                found = measure_round(model, inputs, [variant], generation, settings.seed + number)
                sample = found[variant.name]
                plain = plain or sample
                totals[variant.name].add(sample, plain)
                target.totals[variant.name].add(sample, plain)
                if variant.name not in (PLAIN, PEER) and exact:
                    target.answers += 1
                    difference = first_difference(model, plain, sample, inputs["attention_mask"])
                    target.differences += [(variant.name, difference)] if difference else []
        target.prompts += len(texts)
        slowest = max(slowest, perf_counter() - started)


def _warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, compared: Sequence[Variant], size: int
) -> float:
    """A short call of each variant; returns the tokens per second of plain `generate`, its prefill left out."""
    inputs = encode(tokenizer, [WARM_UP] * size, size)
    (samples,) = interleave(model, inputs, compared, {"max_new_tokens": WARM_UP_TOKENS, "do_sample": False})
    plain = samples[PLAIN]
    return max(1, plain.tokens - size) / max(1e-3, plain.seconds - plain.first_token)


def to_json(settings: DemoSettings, targets: Sequence[Target]) -> dict[str, Any]:
    """All numbers, with their provenance."""
    return {
        "provenance": provenance(),
        "settings": asdict(settings),
        "targets": {
            target.title: {
                "prompts": target.prompts,
                "max_new_tokens": target.length,
                "variants": _numbers(target.totals),
                "domains": {domain: _numbers(totals) for domain, totals in target.domains.items()},
                "differences": [{"variant": name, **asdict(difference)} for name, difference in target.differences],
            }
            for target in targets
        },
    }


def _numbers(totals: dict[str, Total]) -> dict[str, dict[str, Any]]:
    fields = ("tokens", "seconds", "tokens_per_second", "tokens_per_step", "acceptance_rate", "identical")
    return {name: {field: getattr(total, field) for field in fields} for name, total in totals.items()}


def _empty(title: str, dtype: str, compared: Sequence[Variant]) -> Target:
    return Target(title, dtype, {variant.name: Total() for variant in compared})


def _is_exact(settings: DemoSettings, generation: dict[str, Any]) -> bool:
    greedy = not generation["do_sample"]
    return settings.verification == "exact" or (settings.verification == "rejection" and greedy)


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M"
