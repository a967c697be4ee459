"""`hf-specgen doctor`: checks whether speculation works and is faster with these models on this machine.

Checks that load no weights come first: support, tokenizers, sizes, heads. If they find no problem, every
strategy is timed on a few prompts, and the fastest one is recommended as a line of code. `hf-specgen tune` measures
latencies alone, and writes them to a file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any, get_args

import torch
from rich.bar import Bar
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from hf_specgen import __version__
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates import CombinedCandidates, DFlashCandidates, NgramCandidates
from hf_specgen.candidates.combined import Preset, PresetCandidates
from hf_specgen.cli import checkpoints
from hf_specgen.cli.checkpoints import BAD, GOOD, WARNING, Finding
from hf_specgen.cli.settings import DoctorSettings, TuneSettings, terminal
from hf_specgen.depth import CostCurve, FixedDepth
from hf_specgen.depth.latency import ANY_DRAFTER
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.cost import least_acceptance, measure_cost_curve, measure_latency
from hf_specgen.evaluation.measure import Comparison, Interval, Variant, measure_call, total_counts
from hf_specgen.evaluation.workloads import PLAIN, Strategy, strategies
from hf_specgen.heads.source import Source

LINE = "model.generate(**inputs, candidate_generator={})"
SIGNS = {GOOD: "[green]✓[/]", WARNING: "[yellow]![/]", BAD: "[red]✗[/]"}
BAR = 10
"""Width of the longest bar, in columns of the terminal."""
BUSY = 1.3
"""Time of plain `generate` over the time in which its thread ran, above which times are not reliable."""
MAX_OTHERS_SHARE = 0.1
"""Part of the processor that other programs used, above which times are not reliable."""
MAX_ROUNDS = 3
"""Times as many rounds as asked for, while whether the best strategy is faster than plain `generate` is not decided."""
TIE = 0.97
"""Smallest speed over that of the fastest variant at which a simpler one is recommended."""


@dataclass
class Report:
    """All findings, a recommended line of code with its reason, and by variant what was measured."""

    findings: list[Finding] = field(default_factory=list)
    recommendation: str = ""
    reason: str = ""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranking: Table | None = None

    @property
    def bad(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.result == BAD]


def show(settings: DoctorSettings) -> bool:
    """Examine, and print the report; returns False if a problem has to be solved first."""
    report = examine(settings)
    if settings.as_json:
        print(json.dumps(asdict(replace(report, ranking=None)), indent=2))
        return not report.bad
    console = terminal()
    view = Table(box=SIMPLE, pad_edge=False, show_header=False)
    for finding in report.findings:
        text = escape(finding.found) + (f"\n[dim]{escape(finding.meaning)}[/]" if finding.meaning else "")
        view.add_row(SIGNS[finding.result], f"[bold]{escape(finding.subject)}[/]", text)
    console.print(view)
    if report.ranking is not None:
        console.print(report.ranking)
    if report.recommendation:
        console.print(f"[bold]{escape(report.recommendation)}[/]", highlight=False, soft_wrap=True)
    console.print(report.reason, markup=False)
    return not report.bad


def ranking(measured: Comparison, title: str = "", texts: Mapping[str, str] = {}) -> Table:
    """The variants that were measured, fastest first, with a text for each, such as its code.

    A bar is green where the interval of the speedup over plain `generate` lies above 1.
    """
    speeds = {name: measured.tokens_per_second(name) for name, samples in measured.samples.items() if samples}
    view = Table(box=None, padding=(0, 1, 0, 0), title=escape(title), title_justify="left", title_style="bold")
    for column in ("", "tokens/s", "", "over plain", "per step", "accepted", "same"):
        view.add_column(column, justify="right" if column else "left", no_wrap=True)
    if texts:
        view.add_column("candidate_generator=")
    for name in sorted(speeds, key=speeds.__getitem__, reverse=True):
        counts = total_counts(measured.samples[name])
        speed = measured.speed(name)
        bar = Bar(max(speeds.values()), 0, speeds[name], width=BAR, color="green" if speed.low > 1 else "yellow")
        steps = (f"{counts.tokens_per_step:.2f}", f"{counts.acceptance_rate:.0%}") if counts.steps else ("", "")
        same = "[red]✗[/]" if measured.different[name] else "✓"
        about = filter(None, [texts.get(name)])
        view.add_row(
            escape(name), f"{speeds[name]:.1f}", bar, "" if name == PLAIN else str(speed), *steps, same, *about
        )
    return view


def examine(settings: DoctorSettings) -> Report:
    """Check a target, with a draft model and heads if they are given; no weights are loaded if a problem is found."""
    device = workloads.usable_device(settings.device)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    here = f"hf_specgen {__version__}, {versions}, Python {platform.python_version()}; device {device}"
    report = Report([Finding("versions", GOOD, here)])
    target = checkpoints.without_weights(settings.target, settings.dtype)
    named = strategies(settings.draft, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code)
    report.findings.append(checkpoints.support(target, "target"))
    warned = set()
    for one in named:
        if one.source is not None and not isinstance(one.candidates, CombinedCandidates):
            label = f"{one.source.path_or_id}: " if len(settings.draft) > 1 else ""
            found = checkpoints.check(one, target, settings.dtype)
            report.findings += [replace(finding, found=label + finding.found) for finding in found]
            if any(finding.result == WARNING for finding in found):
                warned.add(one.source)
    if report.bad:
        report.reason = "solve what is marked with ✗ first"
    elif settings.run:
        _measure(settings, device, target.dtype, named, report)
    else:
        report.recommendation = LINE.format(unmeasured(named, warned).code)
        report.reason = "the static checks found no problem; the speed was not measured"
        if len(settings.draft) > 1:
            report.reason += ", so the line has the first draft without a warning"
    return report


def unmeasured(named: Sequence[Strategy], warned: Collection[Source | None]) -> Strategy:
    """A strategy of the first draft without a warning, or else of the first draft; without drafts n-grams."""
    sources = [one.source for one in named if one.source is not None]
    first = next((source for source in sources if source not in warned), sources[0] if sources else None)
    return [one for one in named if one.source == first][-1]  # a draft model together with n-grams


def _measure(settings: DoctorSettings, device: str, dtype: torch.dtype, named: list[Strategy], report: Report) -> None:
    """Time T(q), and every strategy against plain `generate`; add findings and a recommendation to the report."""
    model, tokenizer = workloads.load(settings.target, dtype, device)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    if not model.config.is_encoder_decoder:
        sizes = (1, 2, 4, 8, 16)
        context = min(128, limit // 2)
        curve = measure_cost_curve(model, sizes, context=context, batch=settings.batch_size, repeats=5)
        report.findings.append(verification_cost(curve))
    generation = workloads.generation_settings(settings.max_new_tokens, settings.temperature)
    codes, variants = _variants(distinct([*_presets(model), *named]), device)
    prompts = list(settings.prompt or checkpoints.PROMPTS)
    repeats = -(-settings.batch_size // len(prompts))  # to fill a batch
    batches = list(workloads.encode(tokenizer, prompts * repeats, settings.batch_size))
    for variant in variants:  # not counted: this loads models and prepares kernels
        measure_call(model, batches[0], variant, generation, 0)
    measured = Comparison(variants, len(batches))
    for turn in range(MAX_ROUNDS * settings.rounds):
        if turn >= settings.rounds and not undecided(measured, list(codes)):
            break
        for inputs in batches:
            list(measured.measure(model, inputs, generation))
    report.findings += judge(measured, list(codes), exact=model.dtype == torch.float32)
    for one in named:
        if isinstance(one.candidates, DFlashCandidates):
            explanation = "config.json leaves it open; the first texts decided"
            inferred = one.candidates.inferred_settings(model)
            report.findings += [Finding(one.name, GOOD, setting, explanation) for setting in inferred]
    about = {}
    for name, samples in measured.samples.items():
        speed = measured.speed(name)
        counts = total_counts(samples)
        code = codes.get(name, "")
        reason = "" if name == PLAIN else note(speed, counts)
        about[name] = escape(code) + (f"\n[dim]{reason}[/]" if reason else "")
        report.measured[name] = {
            "tokens_per_second": measured.tokens_per_second(name),
            "speedup": speed.value,
            "speedup_low": speed.low,
            "speedup_high": speed.high,
            "tokens_per_step": counts.tokens_per_step,
            "acceptance_rate": counts.acceptance_rate,
            "code": code,
            "note": reason,
        }
    report.ranking = ranking(measured, texts=about)
    best, report.reason = recommend(measured, list(codes))
    report.recommendation = LINE.format(codes[best]) if best != PLAIN else "model.generate(**inputs)"


def _presets(model: PreTrainedModel) -> list[Strategy]:
    """The presets that choose different strategies for this target."""
    chosen: dict[Any, str] = {}
    for name in get_args(Preset):
        chosen.setdefault(PresetCandidates(name).for_model(model), name)
    return [Strategy(name, f'"{name}"', candidates) for candidates, name in chosen.items()]


def distinct(found: Sequence[Strategy]) -> list[Strategy]:
    """The strategies without those that draft like an earlier one, which would be measured twice."""
    kept: dict[Any, Strategy] = {}
    for one in found:
        kept.setdefault((*one.candidates.profile_key(), repr(one.candidates)), one)
    return list(kept.values())


def _variants(found: Sequence[Strategy], device: str) -> tuple[dict[str, str], list[Variant]]:
    """Plain `generate` and every strategy, on CUDA also without graphs, and graphs without drafts; the code of each."""
    if device.startswith("cuda"):
        no_drafts = NgramCandidates(policy=FixedDepth(0))
        found = [*found, Strategy("graphs, no drafts", "NgramCandidates(policy=FixedDepth(0))", no_drafts)]
    codes = {one.name: one.code for one in found}
    variants = [Variant(PLAIN, dict), *(one.variant() for one in found)]
    if device.startswith("cuda"):
        codes |= {f"{one.name}, eager": f"{one.code}, compile=False" for one in found[:-1]}
        variants += [replace(one.variant(compile=False), name=f"{one.name}, eager") for one in found[:-1]]
    return codes, variants


def verification_cost(curve: CostCurve) -> Finding:
    """T(q), and from which acceptance rate on drafts are faster here, at the depth that suits T(q) best."""
    sizes = ", ".join(f"T({size}) {curve.relative(size):.2f}" for size in curve.queries[1:])
    found = f"T(1) {1000 * curve(1):.1f} ms; relative to it: {sizes} (batch size {curve.batch})"
    acceptance, depth = least_acceptance(curve)
    if acceptance >= 1:
        return Finding("verification", WARNING, found, "no draft of up to 15 tokens is faster, whatever is accepted")
    plural = "s" if depth > 1 else ""
    meaning = f"drafts are faster from an acceptance rate of {acceptance:.2f} on, with {depth} draft token{plural}"
    return Finding("verification", GOOD if acceptance <= 0.5 else WARNING, found, meaning)


def line(finding: Finding) -> str:
    """A finding in one line of markup."""
    meaning = f"; {finding.meaning}" if finding.meaning else ""
    return f"{SIGNS[finding.result]} {escape(finding.found + meaning)}"


def note(speed: Interval, counts: Statistics) -> str:
    """Why a strategy is not clearly faster than plain `generate`; empty if it is."""
    if speed.low > 1:
        return ""
    if counts.drafted == 0:
        return "nothing was drafted"
    if not speed.differs:
        return "no difference was shown; more --rounds make the interval smaller"
    return "too few draft tokens are accepted for the time that drafting and verifying them takes"


def judge(measured: Comparison, names: Sequence[str], exact: bool) -> Iterator[Finding]:
    """Whether the tokens of variants are those of plain `generate`, and whether the times are reliable."""
    answers = len(names) * len(measured.plain)
    different = [name for name in names if measured.different[name]]
    if different:
        count = sum(measured.different[name] for name in different)
        unexplained = sum(measured.unexplained[name] for name in different)
        found = (
            f"{count} of {answers} answers differ from plain generate, of {', '.join(different)}; rounding explains "
            f"{count - unexplained if unexplained else 'all'} of them, where tokens are nearly tied"
        )
        meaning = "in float32 that must not happen: please report it, with the model's name" if exact else ""
        yield Finding("same tokens", BAD if exact else WARNING, found, meaning)
    else:
        yield Finding("same tokens", GOOD, f"the tokens of all {answers} answers are those of plain generate")
    seconds = sum(one.seconds for one in measured.plain)
    waited = seconds / max(sum(one.thread_seconds for one in measured.plain), 1e-9)
    others = sum(one.others_share * one.seconds for one in measured.plain) / max(seconds, 1e-9)
    if measured.device == "cpu" and (waited > BUSY or others > MAX_OTHERS_SHARE):
        found = f"other programs used {others:.0%} of the processor, so these figures are less reliable"
        if waited > BUSY:
            found = (
                f"plain generate took {waited:.1f} times as long as it ran; something else uses the processor. These "
                "figures count the time in which it ran, and are less reliable"
            )
        yield Finding("times", WARNING, found, "measure again when nothing else runs")


def undecided(measured: Comparison, names: Sequence[str]) -> bool:
    """Whether the fastest strategy of which tokens were accepted may be slower than plain `generate`, or faster."""
    speeds = [measured.speed(name) for name in names if total_counts(measured.samples[name]).accepted]
    return bool(speeds) and not max(speeds, key=lambda speed: speed.value).differs


def recommend(measured: Comparison, names: Sequence[str]) -> tuple[str, str]:
    """The fastest of plain `generate` and these variants, which begin with the simplest one, and the reason.

    Of variants that are at most 3% slower, by a difference within its interval, the first one. A single measurement has
    no interval, and shows no such difference.
    """
    is_single = len(measured.plain) == 1
    # A strategy of which no token was accepted has not shown that it can be faster.
    shown = [name for name in names if total_counts(measured.samples[name]).accepted]
    speeds = {name: measured.speed(name) for name in (PLAIN, *shown)}
    fastest = max(speeds, key=lambda name: speeds[name].value)
    over_fastest = ((name, measured.speed(name, fastest)) for name in speeds)
    best = next(name for name, speed in over_fastest if speed.value >= TIE and (is_single or not speed.differs))
    if best == PLAIN:
        return PLAIN, "no strategy was clearly faster than plain generate on these prompts"
    found = speeds[best]
    rank = "the fastest of hf_specgen's strategies"
    if best != fastest:
        rank = f"as fast as {fastest} and simpler"
    if is_single:
        return best, f"{rank}: {found.value:.2f}x plain in a single measurement, which shows no interval"
    doubt = "" if found.low > 1 else "; not certain yet, a longer measurement makes the interval smaller"
    return best, f"{rank}: {found.value:.2f}x plain ({found.low:.2f}-{found.high:.2f}){doubt}"


def tune(settings: TuneSettings) -> None:
    """Measure latencies, store them for `AdaptiveDepth(latency=…)`, and print them."""
    console = terminal()
    if settings.latency.is_dir() or not os.access(settings.latency.resolve().parent, os.W_OK):
        raise OSError(f"{str(settings.latency)!r} cannot be written; name a file in a folder that is writable")
    model, _ = workloads.load(settings.target, settings.dtype, settings.device)
    named = strategies(settings.draft, trust_remote_code=settings.trust_remote_code)
    candidates = [one.candidates for one in named]
    for strategy in candidates:  # every strategy must fit the target before anything is measured
        strategy.target_requirements(model)
    rows = settings.batch_size
    context = settings.context
    latency = measure_latency(model, candidates, rows=rows, context=context, progress_bar=True)
    latency.save(settings.latency)
    for curve, drafters in latency.buckets:
        passes = {f"T({tokens})": curve.relative(tokens) for tokens in (2, 4, 8, 16, 32)}
        passes |= {kind: one.seconds[0] / curve(1) for kind, one in drafters.items() if kind != ANY_DRAFTER}
        rows_of = "1 row" if curve.batch == 1 else f"{curve.batch} rows"
        step = f"{rows_of} of {curve.context} tokens: T(1) {1000 * curve(1):.1f} ms"
        console.print(f"{step}; relative to it: {', '.join(f'{name} {value:.2f}' for name, value in passes.items())}")
    console.print(
        f"{settings.latency}: read by AdaptiveDepth(latency={str(settings.latency)!r})", markup=False, highlight=False
    )
