"""A whole run: tune, measure, sweep; over one process or several; interrupted or not."""

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
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.domains import Domain, DomainError, load_domain, names_of
from benchmarks.journal import Journal, Record, read
from benchmarks.plan import Plan
from benchmarks.prompts import first_turns
from benchmarks.replay import traces
from benchmarks.strategies import PLAIN, Family, build
from benchmarks.synthetic import synthetic
from benchmarks.units import Unit, measured_units, mixed_prompts, tuning_units
from benchmarks.widen import widen
from hf_specgen.evaluation.cost import QUERIES, CostCurve, measure_cost_curve
from hf_specgen.evaluation.measure import Sample, Variant, measure_round
from hf_specgen.evaluation.workloads import WorkloadSettings, first_difference, load


@dataclass
class Outcome:
    """What a run found.

    Args:
        plan: what was asked for.
        records: one for each variant in each round.
        chosen: the setting of each family, by its name.
        ours: names of our variants, as chosen.
        curve: T(q), if it came that far.
        scripted: rows of the scripted targets, by section.
        notes: sentences that belong to the results.
        about: one line for each domain.
        seconds: from the first measurement to the last; of this run only, where an earlier one was resumed.
        interrupted: Ctrl-C ended the run.
    """

    plan: Plan
    records: list[Record] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)
    curve: CostCurve | None = None
    scripted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    interrupted: bool = False


def run(plan: Plan, folder: Path, console: Console, *, resume: bool = False) -> Outcome | None:
    """Measure everything in the plan.

    Ctrl-C ends the measuring, and what is there by then is returned with a note.

    Returns:
        the outcome; None in every process but the first.

    Raises:
        ValueError: for domains, strategies or a run to resume that are not there.
    """
    state = PartialState(cpu=plan.device == "cpu")
    device = plan.device if plan.device == "cpu" else str(state.device)
    model, tokenizer = load(WorkloadSettings(model=plan.model, dtype=plan.dtype, device=device))
    if plan.widen:
        model = widen(model, plan.widen)
    outcome = Outcome(plan)
    domains = _domains(plan, model, tokenizer, outcome.notes)
    outcome.about = {domain.name: domain.about for domain in domains}
    families = build(plan.strategies, plan.peers, model)
    bench = Bench(model, tokenizer, Journal(folder, plan, state.process_index, resume=resume), state, plan.seed)
    begin = perf_counter()
    try:
        with _progress(console) if state.is_main_process else nullcontext() as bar:
            _measure(plan, domains, families, bench, outcome, bar)
        outcome.records = bench.gathered()
    except KeyboardInterrupt:
        outcome.interrupted = True
        outcome.notes.append("This run was interrupted: tables hold what was measured by then; --resume goes on.")
        outcome.records = read(folder)
    outcome.seconds = perf_counter() - begin
    return outcome if state.is_main_process else None


class Bench:
    """The target, and where its measurements go."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        journal: Journal,
        state: PartialState,
        seed: int,
    ):
        self.model, self.tokenizer, self.journal, self.state, self.seed = model, tokenizer, journal, state, seed

    def work(self, units: Sequence[Unit], bar: Progress | None, task: TaskID | None) -> None:
        """This process's share of the rounds, less those that an earlier run has done."""
        for place in range(self.state.process_index, len(units), self.state.num_processes):
            unit = units[place]
            if unit.key not in self.journal:
                seed = self.seed + 1000 * unit.repeat + unit.number
                samples = measure_round(
                    self.model,
                    unit.inputs,
                    unit.variants,
                    unit.generation,
                    seed,
                    first=place,
                    followups=unit.followups,
                )
                self.journal.add(unit.key, [self.record(unit, name, samples) for name in samples])
            if bar is not None and task is not None:
                bar.update(task, advance=unit.weight * self.state.num_processes, description=unit.section)

    def record(self, unit: Unit, name: str, samples: dict[str, Sample]) -> Record:
        """One sample in plain numbers, compared with plain decoding token by token."""
        sample, plain = samples[name], samples[PLAIN.name]
        found: Record = {"section": unit.section, "cell": unit.cell, "number": unit.number, "repeat": unit.repeat}
        found |= {"variant": name, "rows": len(sample.ids), "tokens": sample.tokens, "seconds": sample.seconds}
        found |= {"first_token": sample.first_token, "peak": asdict(sample.peak) if sample.peak else {}}
        found["sampled"] = bool(unit.generation.get("do_sample"))
        found["identical"] = torch.equal(plain.ids, sample.ids)
        if sample.speculation is not None:
            difference = None if found["identical"] else first_difference(self.model, plain, sample)
            found["difference"] = asdict(difference) if difference else None
            rows = sample.speculation.rows
            found["steps"] = [[s.drafted, s.depth, s.accepted, s.emitted] for row in rows for s in row]
            found["times"] = sample.speculation.seconds
            if unit.section == "domains" and unit.number == unit.repeat == 0:
                found["text"] = self._text(sample)
        return found

    def _text(self, sample: Sample) -> list[tuple[str, bool]]:
        """The last answer, token by token, with whether it was guessed."""
        assert sample.speculation is not None
        origins = sample.speculation.origins(len(sample.speculation.rows) - 1)
        tokens = sample.ids[0, -sample.speculation.lengths[-1] :].tolist()
        return [(str(self.tokenizer.decode([t])), guessed) for t, guessed in zip(tokens, origins, strict=False)]

    def gathered(self) -> list[Record]:
        """The records of all processes, in all of them."""
        new = gather_object(self.journal.new) if self.state.num_processes > 1 else self.journal.new
        return [*self.journal.old, *new]


def _measure(
    plan: Plan,
    domains: Sequence[Domain],
    families: Sequence[Family],
    bench: Bench,
    outcome: Outcome,
    bar: Progress | None,
) -> None:
    _warm_up(plan, domains, families, bench)
    if bench.state.is_main_process:
        outcome.curve = measure_cost_curve(bench.model, QUERIES, context=256, repeats=5)
    tuning = list(tuning_units(plan, domains, bench.tokenizer, families))
    any_setting = [PLAIN, *(family.variant(next(iter(family.settings))) for family in families)]
    later = sum(unit.weight for unit in measured_units(plan, domains, bench.tokenizer, any_setting))
    task = bar.add_task("tuning", total=sum(unit.weight for unit in tuning) + later) if bar else None
    bench.work(tuning, bar, task)
    outcome.chosen = choose(families, bench.gathered())
    variants = [PLAIN, *(family.variant(outcome.chosen[family.name]) for family in families)]
    outcome.ours = [f.variant(outcome.chosen[f.name]).name for f in families if f.ours]
    bench.work(list(measured_units(plan, domains, bench.tokenizer, variants)), bar, task)
    if plan.trace_texts and bench.state.is_main_process:
        outcome.scripted = {"traces": traces(1, texts=plan.trace_texts), "synthetic": synthetic(plan.trace_texts)}


def choose(families: Sequence[Family], records: Sequence[Record]) -> dict[str, str]:
    """The setting of each family with the most tokens per second over all tuning prompts together."""
    tokens: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for record in records:
        if record["section"] == "tuning":
            name = record["variant"]
            tokens[name] = tokens.get(name, 0) + record["tokens"]
            seconds[name] = seconds.get(name, 0) + record["seconds"]

    def rate(family: Family, setting: str) -> float:
        name = family.variant(setting).name
        return tokens[name] / seconds[name]

    return {family.name: max(family.settings, key=lambda setting: rate(family, setting)) for family in families}


def _warm_up(plan: Plan, domains: Sequence[Domain], families: Sequence[Family], bench: Bench) -> None:
    variants: list[Variant] = [PLAIN, *(f.variant(setting) for f in families for setting in f.settings)]
    prompts = mixed_prompts(domains)
    for size in {1, max(plan.batches, default=1)}:
        measure_round(
            bench.model, first_turns(bench.tokenizer, (prompts * size)[:size]), variants, {"max_new_tokens": 4}, 0
        )


def _domains(plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> list[Domain]:
    """What can be measured, with a note on what cannot."""
    if not tokenizer.chat_template:
        notes.append(f"{model.name_or_path} has no chat template: prompts are given to it as plain text.")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    domains: list[Domain] = []
    for name in names_of(plan.domains):
        try:
            domain = load_domain(name)
        except DomainError as error:
            notes.append(f"Left out: {error}.")
            continue
        if not tokenizer.chat_template and any(len(turns) > 1 for turns in domain.conversations):
            notes.append(f"Left out: domain {name!r} has several turns, and the model has no chat template.")
            continue
        wanted = plan.prompts + plan.tuning_prompts
        fitting = [c for c in domain.conversations if _length(tokenizer, c, plan) <= limit][:wanted]
        if not fitting:
            notes.append(f"Left out: no prompt of domain {name!r} fits into the model's {limit} positions.")
            continue
        domains.append(replace(domain, conversations=fitting))
    if not domains:
        raise DomainError(" ".join(["no domain is left to measure.", *notes]))
    return domains


def _length(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], plan: Plan) -> int:
    """Tokens of a whole conversation with its answers; a few for the template around each turn."""
    return sum(len(tokenizer(turn)["input_ids"]) + 16 + plan.max_new_tokens for turn in turns)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>12}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
