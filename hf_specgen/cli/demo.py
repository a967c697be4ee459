"""`hf-specgen demo`: plain `generate` and every strategy on two targets, measured side by side while you watch.

The comparison is level: all variants run eagerly, with the weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates.combined import default_candidates
from hf_specgen.cli.settings import DemoSettings, terminal
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.cost import fast_dtype, widen
from hf_specgen.evaluation.measure import Comparison, Variant, measure_round, throughput, total_counts
from hf_specgen.evaluation.workloads import DEFAULT, PEER, PLAIN, Strategy, encode

BAR = 15
"""Width of the longest bar, in columns of the terminal."""
FIRST_SHARE = 0.3
"""Fraction of the time for the first of two targets; a prompt takes longer on the second."""


@dataclass
class MeasuredTarget:
    """A target, what was measured on it, and the length of its answers."""

    title: str
    dtype: str
    measured: Comparison
    length: int = 0

    @property
    def ours(self) -> list[str]:
        """The names of this package's variants."""
        return [name for name in self.measured.samples if name not in (PLAIN, PEER)]


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it; returns False if a token differs in float32."""
    console = console or terminal()
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        targets = run_demo(settings, lambda found, now: live.update(comparison(found, now), refresh=True))
        live.update(comparison(targets), refresh=True)
    if not console.is_terminal:
        console.print(comparison(targets))
    for line in closing_lines(targets):
        console.print(line, highlight=False)
    if settings.wide and len(targets) == 1:
        console.print(f"[yellow]The {settings.wide}M target was left out: the first one took all of the time.[/]")
    return not any(one.measured.describe_differences(one.ours) for one in targets if one.dtype == "float32")


def run_demo(settings: DemoSettings, on_change: Callable[[list[MeasuredTarget], str], None]) -> list[MeasuredTarget]:
    """Measure all variants on every target; `on_change` receives the targets and what is being done.

    The second target is left out where the first one took all of the time.
    """
    begin = perf_counter()
    model, tokenizer = workloads.load("", settings.dtype, settings.device)
    compared = variants(settings)
    titles: dict[str, str] = {f"{model.num_parameters() / 1e6:.0f}M {settings.dtype}": settings.dtype}
    if settings.wide:
        titles[f"{settings.wide}M"] = ""
    targets = [MeasuredTarget(title, dtype, Comparison(compared)) for title, dtype in titles.items()]
    for target in targets:
        show_progress = partial(on_change, targets)
        seconds = settings.seconds
        if target is not targets[-1]:
            seconds *= FIRST_SHARE
        elif settings.wide:
            if settings.seconds and perf_counter() > begin + seconds:
                return targets[:1]
            show_progress(f"{target.title}: widening the layers")
            target.dtype = fast_dtype(model, settings.wide * 10**6)
            model = widen(model, settings.wide * 10**6, getattr(torch, target.dtype))
            target.title = f"{settings.wide}M {target.dtype}"
        _measure(target, model, tokenizer, settings.max_new_tokens, begin + seconds, show_progress)
    return targets


def _measure(
    target: MeasuredTarget,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    deadline: float,
    on_change: Callable[[str], None],
) -> None:
    """Run all variants on one prompt after the other, as long as another prompt fits into the time."""
    on_change(f"{target.title}: loading drafts, checking the target, warming up")
    (inputs,) = encode(tokenizer, ["Write a function that adds two numbers."], 1)
    compared, domains = target.measured.variants, workloads.domain_prompts()
    plain = measure_round(model, inputs, compared, {"max_new_tokens": 8, "do_sample": False}, 0)[PLAIN]
    speed = max(1, plain.tokens - 1) / max(1e-3, plain.seconds - plain.first_token)
    # So that a prompt of each domain fits in, if no variant is slower than plain `generate`.
    length = max(24, (deadline - perf_counter()) * speed / len(compared) / len(domains))
    target.length = int(min(max_new_tokens, length))
    slowest = 0.0
    # The first prompt of every domain, then the second of every domain, and so on.
    rounds = [zip(domains, prompts, strict=True) for prompts in zip(*domains.values(), strict=True)]
    for domain, prompt in chain.from_iterable(rounds):
        started = perf_counter()
        if slowest and started + slowest > deadline:
            break
        (inputs,) = encode(tokenizer, [prompt], 1)
        generation = {"max_new_tokens": target.length, **workloads.DOMAINS[domain]}
        for name in target.measured.measure(model, inputs, generation):
            on_change(f"{target.title}: {domain}, {name}")
        slowest = max(slowest, perf_counter() - started)


def variants(settings: DemoSettings) -> list[Variant]:
    """Plain `generate`, Transformers' prompt lookup, the default strategy, and those of the bundled drafts."""
    heads, adapter = [str(workloads.EMBEDDED_EAGLE)], ""
    if settings.every:
        heads += [str(workloads.EMBEDDED_HEADS), str(workloads.EMBEDDED_DSPARK)]
        adapter = str(workloads.EMBEDDED_ADAPTER)
    found = workloads.strategies([str(workloads.EMBEDDED_DRAFT)], heads, adapter, dtype=settings.dtype)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}),
        *(one.variant(compile=False) for one in (Strategy(DEFAULT, '"auto"', default_candidates()), *found)),
    ]


def comparison(targets: Sequence[MeasuredTarget], now: str = "") -> RenderableType:
    """A row for each variant, a bar for each target; strategies in increasing order of speed on the last target."""
    view = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    for title in ("tokens per second", *(target.title for target in targets)):
        view.add_column(title, no_wrap=True)
    last = targets[-1]
    view.add_row(f"[dim]{PLAIN}[/]", *(_bar(target, PLAIN) for target in targets))
    view.add_row(f"[dim]HF {PEER}[/]", *(_bar(target, PEER) for target in targets))
    for name in sorted(last.ours, key=lambda name: throughput(last.measured.samples[name])):
        view.add_row(name, *(_bar(target, name) for target in targets))
    return Group("", view, Text(now, style="dim"))


def closing_lines(targets: Sequence[MeasuredTarget]) -> Iterator[str]:
    """The conclusion: the fastest variant, whether tokens were the same, what the second target is."""
    for target in targets:
        measured = target.measured
        best = max(measured.samples, key=measured.speedup)
        result = "nothing is faster than plain generate here"
        if best != PLAIN:
            steps = (
                f", with {total_counts(measured.samples[best]).tokens_per_step:.1f} tokens per step"
                if best != PEER
                else ""
            )
            result = f"{best} is [bold green]{measured.speedup(best):.2f}x[/] as fast as plain generate{steps}"
        count = len(measured.plain)
        prompts = "1 prompt" if count == 1 else f"{count} prompts"
        yield f"[bold]{target.title}[/]: {result} ({prompts}, up to {target.length} new tokens each)."
        differences = measured.describe_differences(target.ours)
        same = f"the tokens of all {count * len(target.ours)} answers are those of plain generate"
        yield f"[yellow]{target.title}: {differences}.[/]" if differences else f"{target.title}: {same}."
        if load := measured.describe_load():
            yield f"[yellow]{target.title}: {load}.[/]"
    yield "[dim]All variants run eagerly, none with prepacked weights.[/]"
    if len(targets) > 1:
        yield (
            f"[dim]{targets[-1].title} computes the function of the small model with wider layers: a latency model of "
            "a larger target. Texts and acceptance are those of the small one, the cost of a step is not.[/]"
        )


def _bar(target: MeasuredTarget, name: str) -> Text:
    """A bar as long as the throughput, with the throughput and its ratio to that of plain `generate`."""
    speeds = {name: throughput(samples) for name, samples in target.measured.samples.items()}
    speed, fastest = speeds[name], max(speeds.values())
    if not speed:
        return Text("waiting", style="dim")
    speedup, is_ours = target.measured.speedup(name), name in target.ours
    bar = "█" * max(1, round(BAR * speed / fastest))
    text = Text(f"{bar:<{BAR}}", style="dim" if not is_ours else "green" if speedup > 1 else "yellow")
    text.append(f"{speed:>6.{0 if fastest >= 20 else 1}f}", style="default")
    text.append("       " if name == PLAIN else f"{speedup:6.2f}x", style="bold" if is_ours else "")
    return text
