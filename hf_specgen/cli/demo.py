"""`hf-specgen demo`: plain `generate` and every strategy on two targets, measured side by side while you watch.

The comparison is level: all variants run eagerly, with the weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from time import perf_counter
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import Candidates
from hf_specgen.candidates.combined import default_candidates
from hf_specgen.cli.settings import DemoSettings, terminal
from hf_specgen.evaluation import WorkloadSettings, workloads
from hf_specgen.evaluation.cost import widen_in_fast_dtype
from hf_specgen.evaluation.measure import Sample, Total, Variant, measure_round
from hf_specgen.evaluation.workloads import DEFAULT, PEER, PLAIN, Difference, encode, first_difference

BAR = 15
"""Width of the longest bar, in columns of the terminal."""
ACCEPTED = "black on green"
"""Style of accepted draft tokens."""
FIRST_SHARE = 0.3
"""Fraction of the time for the first of two targets; a prompt takes longer on the second."""


@dataclass
class MeasuredTarget:
    """A target and what was measured on it: totals by variant, prompts, and the answers that differ, by variant."""

    title: str
    dtype: str
    totals: dict[str, Total]
    prompts: int = 0
    length: int = 0
    differences: list[tuple[str, Difference]] = field(default_factory=list)


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it; returns False if a token differs in float32."""
    settings = replace(settings, device=settings.device or workloads.default_device())
    console = console or terminal()
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        targets, tokenizer = run_demo(settings, lambda found, now: live.update(comparison(found, now), refresh=True))
        live.update(comparison(targets), refresh=True)
    if not console.is_terminal:
        console.print(comparison(targets))
    for line in closing_lines(targets, settings.widened):
        console.print(line, highlight=False)
    console.print(one_answer(targets[-1].totals, tokenizer))
    return not any(target.differences for target in targets if target.dtype == "float32")


def run_demo(
    settings: DemoSettings, on_change: Callable[[list[MeasuredTarget], str], None]
) -> tuple[list[MeasuredTarget], PreTrainedTokenizerBase]:
    """Measure all variants on every target; `on_change` receives the targets and what is being done."""
    begin = perf_counter()
    workload = WorkloadSettings(
        settings.model, settings.prompt, settings.prompts, dtype=settings.dtype, device=settings.device
    )
    workloads.check_installed(workload)
    prompts = list(round_robin(workloads.domain_prompts(workload)))
    model, tokenizer = workloads.load(workload)
    compared = variants(settings)
    titles = {f"{sum(map(torch.numel, model.parameters())) / 1e6:.0f}M {settings.dtype}": settings.dtype}
    if settings.widened:
        titles[f"{settings.wide}M"] = ""
    targets = [MeasuredTarget(title, dtype, {one.name: Total() for one in compared}) for title, dtype in titles.items()]
    for target in targets:
        show_progress = partial(on_change, targets)
        seconds = settings.seconds
        if target is not targets[-1]:
            seconds *= FIRST_SHARE
        elif settings.widened:
            show_progress(f"{target.title}: widening the layers")
            model, target.dtype = widen_in_fast_dtype(model, settings.wide * 10**6)
            target.title = f"{settings.wide}M {target.dtype}"
        _measure(target, model, tokenizer, prompts, settings, compared, begin + seconds, show_progress)
    return targets, tokenizer


def _measure(
    target: MeasuredTarget,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, str]],
    settings: DemoSettings,
    compared: Sequence[Variant],
    deadline: float,
    on_change: Callable[[str], None],
) -> None:
    """Run all variants on one prompt after the other, as long as another prompt fits into the time."""
    on_change(f"{target.title}: loading drafts, checking the target, warming up")
    speed = _warm_up(model, tokenizer, compared)
    target.length = answer_length(settings.max_new_tokens, deadline - perf_counter(), speed, len(compared))
    slowest = 0.0
    for number, (domain, prompt) in enumerate(prompts):
        started = perf_counter()
        if number and started + slowest > deadline:
            break
        generation = {"max_new_tokens": target.length, **workloads.DOMAINS.get(domain, workloads.GREEDY)}
        (inputs,) = encode(tokenizer, [prompt], 1)
        samples: dict[str, Sample] = {}
        for variant in order(compared, number):
            on_change(f"{target.title}: {domain}, {variant.name}")
            samples |= measure_round(model, inputs, [variant], generation, number)
            sample, plain = samples[variant.name], samples[PLAIN]
            target.totals[variant.name].add(sample, plain)
            if variant.name not in (PLAIN, PEER) and (difference := first_difference(model, plain, sample)):
                target.differences.append((variant.name, difference))
        target.prompts += 1
        slowest = max(slowest, perf_counter() - started)


def _warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, compared: Sequence[Variant]) -> float:
    """A short call of each variant; returns the tokens per second of plain `generate`, its prefill left out."""
    (inputs,) = encode(tokenizer, ["Write a function that adds two numbers."], 1)
    plain = measure_round(model, inputs, compared, {"max_new_tokens": 8, "do_sample": False}, 0)[PLAIN]
    return max(1, plain.tokens - 1) / max(1e-3, plain.seconds - plain.first_token)


def variants(settings: DemoSettings) -> list[Variant]:
    """Plain `generate`, Transformers' prompt lookup, the default strategy, and those named or embedded."""
    drafts, adapter, heads = settings.draft, settings.adapter, settings.heads
    if not settings.model:
        drafts = drafts or (str(workloads.EMBEDDED_DRAFT),)
        adapter = adapter or (str(workloads.EMBEDDED_ADAPTER) if settings.every else "")
        further = (workloads.EMBEDDED_HEADS, workloads.EMBEDDED_DFLASH) if settings.every else ()
        heads = heads or tuple(str(folder) for folder in (workloads.EMBEDDED_EAGLE, *further))
    found: dict[str, Candidates] = {DEFAULT: default_candidates()}
    found |= {one.name: one.candidates for one in workloads.strategies(drafts, heads, adapter, dtype=settings.dtype)}
    ours: Any = partial(dict, compile=False)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}),
        *(Variant(name, partial(ours, candidate_generator=strategy)) for name, strategy in found.items()),
    ]


def answer_length(longest: int, seconds: float, speed: float, compared: int) -> int:
    """Tokens per answer with which a prompt of each of the 5 embedded domains fits into the time, but at least 24.

    Every variant is assumed to be as slow as plain `generate`, which generates `speed` tokens per second.
    """
    return int(min(longest, max(24, seconds * speed / max(1, compared) / 5)))


def order(compared: Sequence[Variant], number: int) -> list[Variant]:
    """Plain `generate` first, then the others in an order that rotates from prompt to prompt."""
    plain, *others = compared
    first = number % max(1, len(others))
    return [plain, *others[first:], *others[:first]]


def round_robin(domains: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """The first prompt of every domain, then the second of every domain, and so on."""
    columns = [[(domain, prompt) for prompt in prompts] for domain, prompts in domains.items()]
    yield from (pair for pair in chain.from_iterable(zip_longest(*columns)) if pair is not None)


def comparison(targets: Sequence[MeasuredTarget], now: str = "") -> RenderableType:
    """A row for each variant, a bar for each target; strategies in increasing order of speed on the last target."""
    view = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    for title in ("tokens per second", *(target.title for target in targets)):
        view.add_column(title, no_wrap=True)
    for name in _ordered(targets[-1].totals):
        label = f"[dim]{'HF ' if name == PEER else ''}{name}[/]" if name in (PLAIN, PEER) else name
        view.add_row(label, *(_bar(target.totals, name) for target in targets))
    return Group("", view, Text(now, style="dim"))


def closing_lines(targets: Sequence[MeasuredTarget], widened: bool) -> Iterator[str]:
    """The conclusion: the fastest variant, whether tokens were the same, what the second target is."""
    for target in targets:
        best = max(target.totals, key=lambda name: target.totals[name].tokens_per_second)
        speedup = _speedup(target.totals, best)
        result = "nothing is faster than plain generate here"
        if best != PLAIN:
            steps = f", with {target.totals[best].tokens_per_step:.1f} tokens per step" if best != PEER else ""
            result = f"{best} is [bold green]{speedup:.2f}x[/] as fast as plain generate{steps}"
        number = f"{target.prompts} {'prompt' if target.prompts == 1 else 'prompts'}"
        yield f"[bold]{target.title}[/]: {result} ({number}, up to {target.length} new tokens each)."
        yield _same_tokens(target)
    yield "[dim]All variants run eagerly, none with prepacked weights.[/]"
    if widened:
        yield (
            f"[dim]{targets[-1].title} computes the function of the small model with wider layers: a latency model of "
            "a larger target. Texts and acceptance are those of the small one, the cost of a step is not.[/]"
        )


def one_answer(totals: dict[str, Total], tokenizer: PreTrainedTokenizerBase) -> RenderableType:
    """The answer with the most tokens per step of the fastest strategy, its accepted draft tokens coloured."""
    fastest = _ordered(totals)[-1]
    answers = [(one, one.speculation) for one in totals[fastest].samples if one.speculation is not None]
    if not answers:
        return ""
    sample, statistics = max(answers, key=lambda answer: answer[1].tokens_per_step)
    text = Text()
    tokens = sample.ids[0, sample.ids.shape[1] - max(statistics.lengths) :].tolist()
    for token, accepted in zip(tokens, statistics.origins(0), strict=False):
        text.append(str(tokenizer.decode([token], skip_special_tokens=True)), style=ACCEPTED if accepted else "")
    title = f"\nOne answer, with {fastest}. [{ACCEPTED}]Accepted draft tokens[/]; the others are the target's own.\n"
    return Group(Text.from_markup(title), text, "")


def _ordered(totals: dict[str, Total]) -> list[str]:
    """Plain, Transformers' prompt lookup, then our strategies by increasing speed."""
    theirs = [name for name in totals if name in (PLAIN, PEER)]
    return [*theirs, *sorted(totals.keys() - theirs, key=lambda name: totals[name].tokens_per_second)]


def _bar(totals: dict[str, Total], name: str) -> Text:
    """A bar as long as the throughput, with the throughput and its ratio to that of plain `generate`."""
    total, fastest = totals[name], max(one.tokens_per_second for one in totals.values())
    if not total.tokens:
        return Text("waiting", style="dim")
    speedup, is_ours = _speedup(totals, name), name not in (PLAIN, PEER)
    bar = "█" * max(1, round(BAR * total.tokens_per_second / fastest))
    text = Text(f"{bar:<{BAR}}", style="dim" if not is_ours else "green" if speedup > 1 else "yellow")
    text.append(f"{total.tokens_per_second:>6.{0 if fastest >= 20 else 1}f}", style="default")
    text.append("       " if name == PLAIN else f"{speedup:6.2f}x", style="bold" if is_ours else "")
    return text


def _speedup(totals: dict[str, Total], name: str) -> float:
    """Throughput relative to plain `generate` on the same prompts."""
    plain = totals[PLAIN].tokens_per_second
    return totals[name].tokens_per_second / plain if plain else 0.0


def _same_tokens(target: MeasuredTarget) -> str:
    answers = target.prompts * len(target.totals.keys() - {PLAIN, PEER})
    if not target.differences:
        return f"{target.title}: the tokens of all {answers} answers are those of plain generate."
    name, d = target.differences[0]
    return (
        f"[yellow]{target.title}: {len(target.differences)} of {answers} answers differ from plain generate; "
        f"{name} first at position {d.position}, plain took token {d.plain_token} (logit {d.plain_logit:.4f}) and ours "
        f"{d.our_token} (logit {d.our_logit:.4f}).[/]"
    )
