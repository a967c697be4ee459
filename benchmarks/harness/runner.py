"""Runs a plan: chooses settings, measures, sweeps; in one process or several, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.harness.journal import Journal, Record, read
from benchmarks.harness.loading import build
from benchmarks.harness.memory import measure_memory
from benchmarks.harness.plan import Plan
from benchmarks.harness.projection import latency_for, project
from benchmarks.harness.rounds import measure_round
from benchmarks.harness.units import Unit, load_domains, measured_units, mixed_prompts, tuning_units
from benchmarks.harness.variants import PLAIN, Family, captured, check_level
from benchmarks.harness.wide import widen
from benchmarks.workloads.domains import Domain
from benchmarks.workloads.prompts import first_turns
from hf_specgen import Candidates
from hf_specgen.cli.generate import digest
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.evaluation.cost import QUERIES, measure_cost_curve
from hf_specgen.evaluation.measure import Sample, Variant, first_difference
from hf_specgen.evaluation.published import PUBLISHED, published
from hf_specgen.evaluation.workloads import load, local_files
from hf_specgen.prepacked_weights import prepacked

DEFAULT_PLAIN = "plain, default"
"""Plain `generate` as it runs without any setting, beside comparisons in which all sides run otherwise."""


@dataclass
class Outcome:
    """What a run measured."""

    plan: Plan
    records: list[Record] = field(default_factory=list)  # one for each variant of each unit
    chosen: dict[str, str] = field(default_factory=dict)  # the setting of each family, by name
    ours: dict[str, str] = field(default_factory=dict)  # by name, what builds each of this package's variants
    curve: CostCurve | None = None  # T(q), if it was measured
    counted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # further tables, not made from units
    notes: list[str] = field(default_factory=list)  # sentences for the report
    about: dict[str, str] = field(default_factory=dict)  # one line for each domain
    seconds: float = 0.0  # of this run only, if it resumed another one
    interrupted: bool = False  # by Ctrl-C


@dataclass
class Bench:
    """Measures units on one target and records them.

    `state` is that of the processes that share the units. With a `profile`, speedups are projected too.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    journal: Journal
    state: PartialState
    plan: Plan
    profile: LatencyModel | None = None

    def work(self, units: Sequence[Unit], console: Console, name: str) -> None:
        """Measure this process's share of the units, without those that are recorded already."""
        places = range(self.state.process_index, len(units), self.state.num_processes)
        is_shown = self.state.is_main_process
        for place in track(places, name, console=console, transient=True, disable=not is_shown):
            if units[place].key not in self.journal:
                self.journal.add(units[place].key, self.measure(units[place], place))

    def measure(self, unit: Unit, place: int) -> list[Record]:
        """The records of one unit; `place` determines which variant runs first."""
        seed = self.plan.seed + 1000 * unit.repeat + unit.number

        def run(variants: Sequence[Variant], is_prepacked: bool = False) -> dict[str, Sample]:
            with prepacked(self.model) if is_prepacked else nullcontext():
                return measure_round(
                    self.model, unit.inputs, variants, unit.generation, seed, first=place, followups=unit.followups
                )

        samples = run(self.level(unit.variants))
        by_name = {variant.name: variant for variant in unit.variants}
        for other, is_prepacked in self.other_plain(unit):
            by_name[other.name] = other
            samples |= run([other], is_prepacked)
        return [self.record(unit, by_name[name], samples, seed) for name in samples]

    def level(self, variants: Sequence[Variant]) -> list[Variant]:
        """The variants, all of which run as the plan says."""
        return [captured(variant) for variant in variants] if self.plan.graphs else list(variants)

    def other_plain(self, unit: Unit) -> list[tuple[Variant, bool]]:
        """Plain decoding in the other setting that this machine has, and whether that prepacks the weights.

        So that speedups can be given over the best plain setting, and over the default one.
        """
        if unit.section != "domains" or self.profile is not None:
            return []
        if self.plan.execution != "eagerly":
            return [(replace(PLAIN, name=DEFAULT_PLAIN), False)]
        if self.plan.device == "cpu":
            return [(replace(PLAIN, name="plain, prepacked"), True)] if self.plan.dtype != "float16" else []
        return [(replace(captured(PLAIN), name="plain, graphs"), False)] if "cuda" in self.plan.device else []

    def record(self, unit: Unit, variant: Variant, samples: dict[str, Sample], seed: int) -> Record:
        """One sample in plain numbers, compared with plain decoding token by token."""
        sample, plain = samples[variant.name], samples[PLAIN.name]
        found: Record = {"section": unit.section, "cell": unit.cell, "number": unit.number, "repeat": unit.repeat}
        found |= {"variant": variant.name, "rows": len(sample.ids), "tokens": sample.tokens, "seconds": sample.seconds}
        found["first_token"] = sample.first_token
        found["sampled"] = bool(unit.generation.get("do_sample"))
        found["identical"] = torch.equal(plain.ids, sample.ids)
        if sample.speculation is not None and not variant.name.startswith(PLAIN.name):
            # Which turn of a chat differs first is not recorded.
            inputs = None if unit.followups else unit.inputs
            found["difference"] = first_difference(self.model, plain, sample, unit.generation, seed, inputs)
            rows = sample.speculation.rows
            found["steps"] = [[s.drafted, s.depth, s.accepted, s.emitted] for row in rows for s in row]
            if self.profile is not None:
                candidates: Candidates = variant.arguments()["candidate_generator"]
                found["projected"] = asdict(project(sample.speculation, latency_for(candidates, self.profile)))
            if unit.section == "domains" and unit.number == unit.repeat == 0:
                found["text"] = self._text(sample)
        return found

    def _text(self, sample: Sample) -> list[tuple[str, bool]]:
        """The last answer, token by token, each with whether it is an accepted draft token."""
        assert sample.speculation is not None
        origins = sample.speculation.origins(len(sample.speculation.rows) - 1)
        tokens = sample.ids[0, -sample.speculation.lengths[-1] :].tolist()
        return [(str(self.tokenizer.decode([t])), drafted) for t, drafted in zip(tokens, origins, strict=False)]

    def gathered(self) -> list[Record]:
        """The records of all processes, in all of them."""
        new = gather_object(self.journal.new) if self.state.num_processes > 1 else self.journal.new
        return [*self.journal.old, *new]


def run(plan: Plan, folder: Path, console: Console, *, resume: bool = False) -> Outcome | None:
    """Measure everything in a plan, with records in a folder, or continue the run there; None but in the first process.

    Ctrl-C ends the run; what was measured until then is returned with a note.
    """
    state = PartialState(cpu=plan.device == "cpu")
    device = plan.device if plan.device == "cpu" else str(state.device)
    profile = LatencyModel.load(plan.profile) if plan.profile else None
    outcome = Outcome(plan)
    target = published(outcome.notes.append) if plan.model == PUBLISHED else plan.model
    if target is None:
        raise ValueError("; ".join(outcome.notes))
    model, tokenizer = load(target, plan.dtype, device)
    if plan.widen:
        model = widen(model, plan.widen)
    if profile is not None:
        outcome.notes.append(
            f"Drafts were decided by the latency profile {Path(plan.profile).name}, not by the latencies of this "
            "machine. Projected speedups follow from counted forward passes and that profile; they are not measured."
        )
    domains = load_domains(plan, model, tokenizer, outcome.notes) if plan.domains else []
    outcome.about = {domain.name: domain.about for domain in domains}
    families = build(plan.strategies, plan.peers, model, profile)
    if plan.default_settings:
        families = [family.with_defaults() for family in families]
    inputs = digest([[domain.conversations for domain in domains], local_files(str(model.name_or_path))])
    journal = Journal(folder, plan, state.process_index, resume=resume, inputs=inputs)
    bench = Bench(model, tokenizer, journal, state, plan, profile)
    begin = perf_counter()
    try:
        if domains:
            _measure(plan, domains, families, bench, outcome, console)
        if state.is_main_process and plan.memory_context:
            outcome.counted["memory"] = measure_memory(plan)
        outcome.records = bench.gathered()
    except KeyboardInterrupt:
        outcome.interrupted = True
        outcome.notes.append(
            "This run was interrupted: tables show what was measured until then; --resume continues it."
        )
        outcome.records = read(folder)
    outcome.seconds = perf_counter() - begin
    return outcome if state.is_main_process else None


def _measure(
    plan: Plan, domains: Sequence[Domain], families: Sequence[Family], bench: Bench, outcome: Outcome, console: Console
) -> None:
    """Warm up, choose settings, and measure all units with them."""
    every = [PLAIN, *(family.variant(setting) for family in families for setting in family.settings)]
    check_level(every)
    prompts = mixed_prompts(domains)
    for size in {1, max(plan.batches, default=1)}:
        inputs = first_turns(bench.tokenizer, (prompts * size)[:size])
        measure_round(bench.model, inputs, bench.level(every), {"max_new_tokens": 4}, 0)
    if bench.state.is_main_process:
        outcome.curve = measure_cost_curve(bench.model, QUERIES, context=256, repeats=5)
    if tuned := [family for family in families if len(family.settings) > 1]:
        bench.work(list(tuning_units(plan, domains, bench.tokenizer, tuned)), console, "tuning")
    outcome.chosen = choose(families, bench.gathered())
    chosen = [(family, family.variant(outcome.chosen[family.name])) for family in families]
    outcome.ours = {one.name: family.code_of(outcome.chosen[family.name]) for family, one in chosen if family.code}
    variants = [PLAIN, *(variant for _, variant in chosen)]
    bench.work(list(measured_units(plan, domains, bench.tokenizer, variants)), console, "measuring")


def choose(families: Sequence[Family], records: Sequence[Record]) -> dict[str, str]:
    """The fastest setting of each family over all tuning prompts together, by projection where there is one."""
    tokens: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for record in records:
        if record["section"] == "tuning":
            name, projected = record["variant"], record.get("projected")
            tokens[name] = tokens.get(name, 0) + (projected["plain_seconds"] if projected else record["tokens"])
            seconds[name] = seconds.get(name, 0) + (projected or record)["seconds"]

    def rate(family: Family, setting: str) -> float:
        name = family.variant(setting).name
        return tokens[name] / seconds[name] if seconds.get(name) else 0.0

    return {family.name: max(family.settings, key=lambda setting: rate(family, setting)) for family in families}
