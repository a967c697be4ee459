"""`hf-specgen demo`: plain `generate` and every strategy on two targets, measured side by side while you watch.

The comparison is level: all variants run eagerly, with the weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import Candidates
from hf_specgen.candidates.combined import default_candidates
from hf_specgen.cli.settings import DemoSettings, terminal
from hf_specgen.evaluation import WorkloadSettings, workloads
from hf_specgen.evaluation.cost import fast_dtype, widen
from hf_specgen.evaluation.differences import ROUNDING, explain_difference, first_difference
from hf_specgen.evaluation.measure import Sample, Total, Variant, measure_round
from hf_specgen.evaluation.workloads import DEFAULT, PEER, PLAIN, encode

BAR = 15
"""Width of the longest bar, in columns of the terminal."""
BUSY = 1.3
"""Slowest over fastest run of plain `generate`, per token, above which figures are not reliable."""
FIRST_SHARE = 0.3
"""Fraction of the time for the first of two targets; a prompt takes longer on the second."""


@dataclass
class MeasuredTarget:
    """A target and what was measured on it: totals by variant, prompts, which differing answers rounding explains."""

    title: str
    dtype: str
    totals: dict[str, Total]
    prompts: int = 0
    length: int = 0
    explained: list[bool] = field(default_factory=list)

    @property
    def different(self) -> dict[str, int]:
        """By strategy, how many answers differ from those of plain `generate`."""
        return {name: one.different for name, one in self.totals.items() if one.different and name != PEER}

    @property
    def slowdown(self) -> float:
        """How many times longer a token took in the slowest run of plain `generate` than in the fastest one."""
        runs = [one for one in self.totals[PLAIN].samples if one.tokens > 1]
        times = [(one.seconds - one.first_token) / (one.tokens - 1) for one in runs]
        return max(times) / min(times) if times else 1.0

    def speedup(self, name: str) -> float:
        """Throughput of a variant relative to plain `generate` on the same prompts."""
        plain = self.totals[PLAIN].tokens_per_second
        return self.totals[name].tokens_per_second / plain if plain else 0.0


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it; returns False if a token differs in float32."""
    console = console or terminal()
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        targets = run_demo(settings, lambda found, now: live.update(comparison(found, now), refresh=True))
        live.update(comparison(targets), refresh=True)
    if not console.is_terminal:
        console.print(comparison(targets))
    for line in closing_lines(targets, settings.widened):
        console.print(line, highlight=False)
    return not any(target.different for target in targets if target.dtype == "float32")


def run_demo(settings: DemoSettings, on_change: Callable[[list[MeasuredTarget], str], None]) -> list[MeasuredTarget]:
    """Measure all variants on every target; `on_change` receives the targets and what is being done."""
    begin, device = perf_counter(), settings.device or workloads.default_device()
    workload = WorkloadSettings(settings.model, settings.prompt, settings.prompts, dtype=settings.dtype, device=device)
    workloads.check_installed(workload)
    domains = workloads.domain_prompts(workload)
    # The first prompt of every domain, then the second of every domain, and so on.
    longest = max(map(len, domains.values()))
    prompts = [
        (name, texts[place]) for place in range(longest) for name, texts in domains.items() if place < len(texts)
    ]
    model, tokenizer = workloads.load(workload)
    compared = variants(settings)
    titles: dict[str, str] = {f"{model.num_parameters() / 1e6:.0f}M {settings.dtype}": settings.dtype}
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
            target.dtype = fast_dtype(model, settings.wide * 10**6)
            model = widen(model, settings.wide * 10**6, workloads.torch_dtype(target.dtype))
            target.title = f"{settings.wide}M {target.dtype}"
        _measure(target, model, tokenizer, prompts, settings, compared, begin + seconds, show_progress)
    return targets


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
    (inputs,) = encode(tokenizer, ["Write a function that adds two numbers."], 1)
    plain = measure_round(model, inputs, compared, {"max_new_tokens": 8, "do_sample": False}, 0)[PLAIN]
    speed = max(1, plain.tokens - 1) / max(1e-3, plain.seconds - plain.first_token)
    # So that a prompt of each of the 5 embedded domains fits in, if no variant is slower than plain `generate`.
    length = max(24, (deadline - perf_counter()) * speed / len(compared) / 5)
    target.length = int(min(settings.max_new_tokens, length))
    slowest = 0.0
    for number, (domain, prompt) in enumerate(prompts):
        started = perf_counter()
        if number and started + slowest > deadline:
            break
        generation = {"max_new_tokens": target.length, **workloads.DOMAINS.get(domain, workloads.GREEDY)}
        (inputs,) = encode(tokenizer, [prompt], 1)
        samples: dict[str, Sample] = {}
        first = 1 + number % max(1, len(compared) - 1)
        for variant in (compared[0], *compared[first:], *compared[1:first]):  # plain, then the others in turns
            on_change(f"{target.title}: {domain}, {variant.name}")
            samples |= measure_round(model, inputs, [variant], generation, number)
            target.totals[variant.name].add(samples[variant.name], samples[PLAIN])
            difference = first_difference(samples[PLAIN], samples[variant.name])
            if difference and variant.name != PEER:
                judged = (samples[PLAIN], difference, generation, number, inputs["attention_mask"])
                target.explained.append(explain_difference(model, *judged)["explained"] == ROUNDING)
        target.prompts += 1
        slowest = max(slowest, perf_counter() - started)


def variants(settings: DemoSettings) -> list[Variant]:
    """Plain `generate`, Transformers' prompt lookup, the default strategy, and those named or embedded."""
    drafts, heads, adapter = list(settings.draft), list(settings.heads), settings.adapter
    if not settings.model:
        drafts = drafts or [str(workloads.EMBEDDED_DRAFT)]
        adapter = adapter or (str(workloads.EMBEDDED_ADAPTER) if settings.every else "")
        further = (workloads.EMBEDDED_HEADS, workloads.EMBEDDED_DSPARK) if settings.every else ()
        heads = heads or [str(folder) for folder in (workloads.EMBEDDED_EAGLE, *further)]
    found: dict[str, Candidates] = {DEFAULT: default_candidates()}
    found |= {one.name: one.candidates for one in workloads.strategies(drafts, heads, adapter, dtype=settings.dtype)}
    ours: Any = partial(dict, compile=False)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}),
        *(Variant(name, partial(ours, candidate_generator=strategy)) for name, strategy in found.items()),
    ]


def comparison(targets: Sequence[MeasuredTarget], now: str = "") -> RenderableType:
    """A row for each variant, a bar for each target; strategies in increasing order of speed on the last target."""
    view = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    for title in ("tokens per second", *(target.title for target in targets)):
        view.add_column(title, no_wrap=True)
    totals = targets[-1].totals
    for name in sorted(totals, key=lambda name: (name not in (PLAIN, PEER)) * totals[name].tokens_per_second):
        label = f"[dim]{'HF ' if name == PEER else ''}{name}[/]" if name in (PLAIN, PEER) else name
        view.add_row(label, *(_bar(target, name) for target in targets))
    return Group("", view, Text(now, style="dim"))


def closing_lines(targets: Sequence[MeasuredTarget], widened: bool) -> Iterator[str]:
    """The conclusion: the fastest variant, whether tokens were the same, what the second target is."""
    for target in targets:
        best = max(target.totals, key=target.speedup)
        result = "nothing is faster than plain generate here"
        if best != PLAIN:
            steps = f", with {target.totals[best].counts.tokens_per_step:.1f} tokens per step" if best != PEER else ""
            result = f"{best} is [bold green]{target.speedup(best):.2f}x[/] as fast as plain generate{steps}"
        number = f"{target.prompts} {'prompt' if target.prompts == 1 else 'prompts'}"
        yield f"[bold]{target.title}[/]: {result} ({number}, up to {target.length} new tokens each)."
        yield _same_tokens(target)
        if target.slowdown > BUSY:
            yield (
                f"[yellow]{target.title}: a token of plain generate took up to {target.slowdown:.1f} times as long as "
                "in its fastest run; something else uses the machine, so these figures are not reliable.[/]"
            )
    yield "[dim]All variants run eagerly, none with prepacked weights.[/]"
    if widened:
        yield (
            f"[dim]{targets[-1].title} computes the function of the small model with wider layers: a latency model of "
            "a larger target. Texts and acceptance are those of the small one, the cost of a step is not.[/]"
        )


def _bar(target: MeasuredTarget, name: str) -> Text:
    """A bar as long as the throughput, with the throughput and its ratio to that of plain `generate`."""
    speed, fastest = target.totals[name].tokens_per_second, max(one.tokens_per_second for one in target.totals.values())
    if not speed:
        return Text("waiting", style="dim")
    speedup, is_ours = target.speedup(name), name not in (PLAIN, PEER)
    bar = "█" * max(1, round(BAR * speed / fastest))
    text = Text(f"{bar:<{BAR}}", style="dim" if not is_ours else "green" if speedup > 1 else "yellow")
    text.append(f"{speed:>6.{0 if fastest >= 20 else 1}f}", style="default")
    text.append("       " if name == PLAIN else f"{speedup:6.2f}x", style="bold" if is_ours else "")
    return text


def _same_tokens(target: MeasuredTarget) -> str:
    answers = target.prompts * len(target.totals.keys() - {PLAIN, PEER})
    if not target.different:
        return f"{target.title}: the tokens of all {answers} answers are those of plain generate."
    names, count = ", ".join(target.different), sum(target.different.values())
    nearly_tied = sum(target.explained)
    reason = f"rounding explains {'all' if nearly_tied == count else nearly_tied} of them, where tokens are nearly tied"
    return f"[yellow]{target.title}: {count} of {answers} answers differ from plain generate, of {names}; {reason}.[/]"
