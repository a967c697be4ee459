"""`hf-specgen demo`: plain `generate` and every strategy on two targets, measured side by side while you watch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from time import perf_counter
from typing import Any

import torch
import transformers
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates import Candidates, NgramCandidates
from hf_specgen.cli.settings import DemoSettings, check_writable, terminal
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.cost import widen_in_fast_dtype
from hf_specgen.evaluation.measure import Sample, Total, Variant, measure_round
from hf_specgen.evaluation.workloads import NGRAM, PEER, PLAIN, Difference, encode, first_difference
from hf_specgen.version import __version__

BAR = 15
"""Width of the longest bar, in columns of the terminal."""
ACCEPTED = "black on green"
"""Style of accepted draft tokens."""


@dataclass
class MeasuredTarget:
    """A target and what was measured on it: totals by variant, the domain of each batch, answers that were compared.

    `differences` holds the variant and the first difference of each compared answer that has other tokens.
    """

    title: str
    dtype: str
    totals: dict[str, Total]
    domains: list[str] = field(default_factory=list)
    prompts: int = 0
    length: int = 0
    answers: int = 0
    differences: list[tuple[str, Difference]] = field(default_factory=list)


def show(settings: DemoSettings, console: Console | None = None) -> bool:
    """Run the demo and print it; returns False if a token differs in float32."""
    check_writable(settings.json_file)
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
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(to_json(settings, targets), indent=2, default=str), encoding="utf-8")
    return not any(target.differences for target in targets if target.dtype == "float32")


def run_demo(
    settings: DemoSettings, on_change: Callable[[list[MeasuredTarget], str], None]
) -> tuple[list[MeasuredTarget], PreTrainedTokenizerBase]:
    """Measure all variants on every target; `on_change` receives the targets and what is being done."""
    workloads.check_installed(settings)
    prompts = list(round_robin(workloads.domain_prompts(settings)))
    model, tokenizer = workloads.load(settings)
    size = sum(parameter.numel() for parameter in model.parameters())
    titles = {f"{size / 1e6:.0f}M {settings.dtype}": settings.dtype}
    if settings.widened:
        titles[f"{settings.wide}M"] = ""
    targets = [
        MeasuredTarget(title, dtype, {variant.name: Total() for variant in variants(settings)})
        for title, dtype in titles.items()
    ]
    on_change(targets, "loading")
    for target in targets:
        fraction = 1.0
        if settings.widened:  # which takes longer for each prompt
            fraction = 0.2 if target is targets[0] else 0.8
        if target is not targets[0]:
            on_change(targets, f"{target.title}: widening the layers")
            model, target.dtype = widen_in_fast_dtype(model, settings.wide * 10**6)
            target.title = f"{settings.wide}M {target.dtype}"
        seconds = settings.seconds * fraction
        _measure(target, model, tokenizer, prompts, settings, seconds, partial(on_change, targets))
    return targets, tokenizer


def _measure(
    target: MeasuredTarget,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, str]],
    settings: DemoSettings,
    seconds: float,
    on_change: Callable[[str], None],
) -> None:
    """Run all variants on one prompt after the other, as long as another prompt fits into the time."""
    size, begin, compared = settings.batch_size, perf_counter(), variants(settings)
    on_change(f"{target.title}: loading drafts, checking the target, warming up")
    speed = _warm_up(model, tokenizer, compared, size)
    left = seconds - (perf_counter() - begin)
    length = target.length = answer_length(settings.max_new_tokens, left, speed, len(compared))
    slowest = 0.0
    for number, (domain, texts) in enumerate(batches(prompts, size)):
        started = perf_counter()
        if number and started - begin + slowest > seconds:
            break
        target.domains.append(domain)
        generation = {"max_new_tokens": length, **workloads.DOMAINS.get(domain, workloads.GREEDY)}
        exact = settings.verification == "exact"
        exact |= settings.verification == "rejection" and not generation["do_sample"]
        for inputs in encode(tokenizer, texts, size):
            plain: Sample | None = None
            for variant in order(compared, number):
                on_change(f"{target.title}: {domain}, {variant.name}")
                found = measure_round(model, inputs, [variant], generation, settings.seed + number)
                sample = found[variant.name]
                plain = plain or sample
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
    (inputs,) = encode(tokenizer, ["Write a function that adds two numbers."] * size, size)
    plain = measure_round(model, inputs, compared, {"max_new_tokens": 8, "do_sample": False}, 0)[PLAIN]
    return max(1, plain.tokens - size) / max(1e-3, plain.seconds - plain.first_token)


def to_json(settings: DemoSettings, targets: Sequence[MeasuredTarget]) -> dict[str, Any]:
    """All numbers, with the settings and versions that they belong to."""
    numbers = ("tokens", "seconds", "tokens_per_second", "tokens_per_step", "acceptance_rate", "identical")
    return {
        "versions": {"hf-specgen": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "settings": asdict(settings),
        "targets": {
            target.title: {
                "prompts": target.prompts,
                "domains": target.domains,
                "max_new_tokens": target.length,
                "variants": {
                    name: {key: getattr(total, key) for key in numbers} for name, total in target.totals.items()
                },
                "differences": [{"variant": name, **asdict(difference)} for name, difference in target.differences],
            }
            for target in targets
        },
    }


def variants(settings: DemoSettings) -> list[Variant]:
    """Plain `generate`, Transformers' prompt lookup, then our strategies: those named, or the fastest embedded ones."""
    draft, adapter, heads = settings.draft, settings.adapter, [settings.heads] if settings.heads else []
    if not settings.model:
        draft = draft or str(workloads.EMBEDDED_DRAFT)
        adapter = adapter or (str(workloads.EMBEDDED_ADAPTER) if settings.every else "")
        further = (workloads.EMBEDDED_HEADS, workloads.EMBEDDED_DFLASH) if settings.every else ()
        shipped = (workloads.EMBEDDED_EAGLE, *further)
        heads = heads or [str(folder) for folder in shipped if folder.exists()]
    built = [
        *workloads.strategies([draft] if draft else [], [], adapter, dtype=settings.dtype),
        *map(workloads.head_strategy, heads),
    ]
    found: dict[str, Candidates] = {strategy.name: strategy.candidates for strategy in built}
    found[NGRAM] = NgramCandidates(k=settings.k)
    ours: Any = partial(dict, verification=settings.verification)
    peer = Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}, batched=False)
    return [
        Variant(PLAIN, dict),
        *([peer] if settings.batch_size == 1 else []),
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


def batches(prompts: Sequence[tuple[str, str]], size: int) -> Iterator[tuple[str, list[str]]]:
    """Batches of `size` prompts of one domain; the rest of each domain at the end."""
    incomplete: dict[str, list[str]] = {}
    for domain, prompt in prompts:
        incomplete.setdefault(domain, []).append(prompt)
        if len(incomplete[domain]) == size:
            yield domain, incomplete.pop(domain)
    yield from incomplete.items()


def comparison(targets: Sequence[MeasuredTarget], now: str = "") -> RenderableType:
    """A row for each variant, a bar for each target; strategies in increasing order of speed on the last target."""
    view = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    view.add_column("tokens per second", no_wrap=True)
    for target in targets:
        view.add_column(target.title, no_wrap=True)
    for name in _ordered(targets[-1].totals):
        label = f"[dim]{'HF ' if name == PEER else ''}{name}[/]" if name in (PLAIN, PEER) else name
        view.add_row(label, *(_bar(target.totals, name) for target in targets))
    return Group("", view, Text(now, style="dim"))


def closing_lines(targets: Sequence[MeasuredTarget], widened: bool) -> Iterator[str]:
    """The conclusion: the fastest strategy, whether tokens were the same, what the second target is."""
    for target in targets:
        totals = target.totals
        best = _ordered(totals)[-1]
        if best not in (PLAIN, PEER) and totals[best].tokens:
            speedup = _speedup(totals, best)
            yield (
                f"[bold]{target.title}[/]: {best} is [bold {_colour(speedup)}]{speedup:.2f}x[/] as fast as plain "
                f"generate, with {totals[best].tokens_per_step:.1f} tokens per step, on {target.prompts} "
                f"{'prompt' if target.prompts == 1 else 'prompts'} and up to {target.length} new tokens for each."
            )
    for target in targets:
        yield _same_tokens(target)
    if widened:
        yield (
            f"[dim]{targets[-1].title} computes the function of the small model with wider layers: a latency model of "
            "a larger target. Texts and acceptance are those of the small one, the cost of a step is not.[/]"
        )
        if targets[-1].dtype == "float32":
            yield "[dim]It runs in float32, since this processor has no fast kernels for several tokens in bfloat16.[/]"


def one_answer(totals: dict[str, Total], tokenizer: PreTrainedTokenizerBase) -> RenderableType:
    """The answer with the most tokens per step of the fastest strategy, its accepted draft tokens coloured."""
    for name in reversed(_ordered(totals)):
        samples = totals[name].samples if name in totals else []
        answers = [(sample, sample.speculation) for sample in samples if sample.speculation is not None]
        if answers:
            break
    else:
        return ""
    sample, statistics = max(answers, key=lambda answer: answer[1].tokens_per_step)
    text = Text()
    tokens = sample.ids[0, sample.ids.shape[1] - max(statistics.lengths) :].tolist()
    for token, accepted in zip(tokens, statistics.origins(0), strict=False):
        text.append(str(tokenizer.decode([token], skip_special_tokens=True)), style=ACCEPTED if accepted else "")
    title = f"\nOne answer, with {name}. [{ACCEPTED}]Accepted draft tokens[/]; the others are the target's own.\n"
    return Group(Text.from_markup(title), text, "")


def _ordered(totals: dict[str, Total]) -> list[str]:
    """Plain, Transformers' prompt lookup, then our strategies by increasing speed; unmeasured ones as given."""
    ours = [name for name in totals if name not in (PLAIN, PEER)]
    return [PLAIN, PEER, *sorted(ours, key=lambda name: totals[name].tokens_per_second)]


def _bar(totals: dict[str, Total], name: str) -> Text:
    """A bar as long as the throughput, with the throughput and its ratio to that of plain `generate`."""
    if name not in totals or not totals[name].tokens:
        return Text("waiting" if name in totals else "one row only", style="dim")
    total, fastest = totals[name], max(one.tokens_per_second for one in totals.values())
    speedup = _speedup(totals, name)
    style = "dim" if name in (PLAIN, PEER) else _colour(speedup)
    bar = "█" * max(1, round(BAR * total.tokens_per_second / fastest))
    text = Text(f"{bar:<{BAR}}", style=style)
    digits = 0 if fastest >= 20 else 1
    text.append(f"{total.tokens_per_second:>6.{digits}f}", style="default")
    text.append("       " if name == PLAIN else f"{speedup:6.2f}x", style="bold" if name not in (PLAIN, PEER) else "")
    return text


def _colour(speedup: float) -> str:
    return "green" if speedup > 1 else "yellow"


def _speedup(totals: dict[str, Total], name: str) -> float:
    """Throughput relative to plain `generate` on the same prompts."""
    plain = totals[PLAIN].tokens_per_second
    return totals[name].tokens_per_second / plain if plain else 0.0


def _same_tokens(target: MeasuredTarget) -> str:
    if not target.answers:
        return f"{target.title}: this verification does not promise the tokens of plain generate."
    if not target.differences:
        return f"{target.title}: the tokens of all {target.answers} answers are those of plain generate."
    name, d = target.differences[0]
    return (
        f"[yellow]{target.title}: {len(target.differences)} of {target.answers} answers differ from plain generate; "
        f"{name} first at position {d.position}, plain took token {d.plain_token} (logit {d.plain_logit:.4f}) and ours "
        f"{d.our_token} (logit {d.our_logit:.4f}).[/]"
    )
