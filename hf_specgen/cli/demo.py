"""`hf-specgen demo`: plain `generate` and every strategy on two bundled targets, measured while you watch.

The comparison is level: all variants run eagerly, with the weights as they are.
"""

from __future__ import annotations

from itertools import product
from time import perf_counter
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live

from hf_specgen.candidates.combined import AUTO
from hf_specgen.cli.checkpoints import BAD
from hf_specgen.cli.doctor import SIGNS, judge, ranking, recommend
from hf_specgen.cli.settings import DemoSettings, terminal
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.cost import fast_dtype, widen
from hf_specgen.evaluation.measure import Comparison, Variant, measure_call
from hf_specgen.evaluation.workloads import DEFAULT, PEER, PLAIN, Strategy, encode

FIRST_SHARE = 0.3
"""Fraction of the time for the first of two targets; a prompt takes longer on the second."""


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it; returns False if a token differs in float32."""
    console = console or terminal()
    begin = perf_counter()
    model, tokenizer = workloads.load("", settings.dtype, settings.device)
    end = begin + settings.seconds
    first_end = begin + settings.seconds * (FIRST_SHARE if settings.wide else 1)
    same = measure_target("16M", model, tokenizer, settings, first_end, console)
    if settings.wide and settings.seconds and perf_counter() > end:
        console.print(f"[yellow]The {settings.wide}M target was left out: the first one took all of the time.[/]")
    elif settings.wide:
        with console.status("widening the layers"):
            dtype = fast_dtype(model, settings.wide * 10**6)
            model = widen(model, settings.wide * 10**6, getattr(torch, dtype))
        console.print()
        same &= measure_target(f"{settings.wide}M", model, tokenizer, settings, end, console)
        console.print(
            f"[dim]The target of {settings.wide}M computes the function of the small one with wider layers: a latency "
            "model of a larger target. Texts and acceptance are those of the small one, the cost of a step is not.[/]"
        )
    console.print("[dim]All variants run eagerly, none with prepacked weights.[/]")
    return same


def measure_target(
    size: str, model: Any, tokenizer: Any, settings: DemoSettings, deadline: float, console: Console
) -> bool:
    """Measure all variants on a target and print them; returns False if a token differs in float32.

    Answers are cut so that a prompt of each domain fits into the time, if no variant is slower than plain `generate`.
    """
    title = f"{size} {str(model.dtype).removeprefix('torch.')}"
    measured = Comparison(variants(settings))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        live.update(f"{title}: loading drafts, checking the target, warming up", refresh=True)
        (inputs,) = encode(tokenizer, ["Write a function that adds two numbers."], 1)
        warm_up = {"max_new_tokens": 8, "do_sample": False}
        plain, *_ = [measure_call(model, inputs, variant, warm_up, 0) for variant in measured.variants]
        speed = max(1, plain.tokens - 1) / max(1e-3, plain.seconds - plain.first_token)
        domains = workloads.domain_prompts()
        slowest = 0.0
        fitting = (deadline - perf_counter()) * speed / (len(measured.variants) * len(domains))
        length = int(min(settings.max_new_tokens, max(24, fitting)))
        # The first prompt of every domain, then the second of every domain, and so on.
        for number, domain in product(range(min(map(len, domains.values()))), domains):
            started = perf_counter()
            if slowest and started + slowest > deadline:
                break
            (inputs,) = encode(tokenizer, [domains[domain][number]], 1)
            for name in measured.measure(model, inputs, {"max_new_tokens": length, **workloads.DOMAINS[domain]}):
                live.update(Group(ranking(measured, title), f"[dim]{domain}, {name}[/]"), refresh=True)
            slowest = max(slowest, perf_counter() - started)
    console.print(ranking(measured, title))
    ours = [name for name in measured.samples if name not in (PLAIN, PEER)]
    count = len(measured.plain)
    (best, reason), prompts = recommend(measured, ours), f"{count} prompt{'' if count == 1 else 's'}"
    console.print(f"[bold green]{best}[/]: {reason} ({prompts}, up to {length} new tokens each)", highlight=False)
    findings = list(judge(measured, ours, exact=model.dtype == torch.float32))
    for finding in findings:
        console.print(f"{SIGNS[finding.result]} {finding.found}", highlight=False)
    return all(finding.result != BAD for finding in findings)


def variants(settings: DemoSettings) -> list[Variant]:
    """Plain `generate`, Transformers' prompt lookup, n-grams, the default strategy, and those of the bundled drafts."""
    drafts = [workloads.EMBEDDED_EAGLE, workloads.EMBEDDED_DRAFT]
    if settings.every:
        drafts += [workloads.EMBEDDED_HEADS, workloads.EMBEDDED_DSPARK, workloads.EMBEDDED_ADAPTER]
    n_grams, *found = workloads.strategies([str(draft) for draft in drafts], dtype=settings.dtype)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}),
        *(one.variant(compile=False) for one in (n_grams, Strategy(DEFAULT, '"auto"', AUTO), *found)),
    ]
