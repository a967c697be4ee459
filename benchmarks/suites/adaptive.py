"""Adaptive depth against plain decoding and against every fixed depth, cell by cell.

A cell is a target, a domain, a batch size, a temperature and a strategy. In each of them plain decoding, fixed depths
and `k="auto"` are interleaved on the same prompts, and plain decoding a second time: its speedup over itself shows how
far any speedup of the cell may be off. Cells are measured in a random order and recorded one by one, so that the suite
can be run in pieces and the finished cells are a sample of all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

from accelerate import PartialState
from rich.progress import track

from benchmarks.harness.journal import Journal, Record
from benchmarks.harness.loading import load_strategy
from benchmarks.harness.plan import WIDE, Plan
from benchmarks.harness.runner import Bench
from benchmarks.harness.units import Unit
from benchmarks.harness.variants import AUTO, PLAIN, PLAIN_AGAIN, ours
from benchmarks.report.adaptive import tables
from benchmarks.report.tables import Rows
from hf_specgen.candidates.base import Depth
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.cost import widen
from hf_specgen.evaluation.measure import Variant, measure_round
from hf_specgen.evaluation.workloads import DOMAINS, domain_prompts, encode, load

BATCHES, TEMPERATURES, HIGH_TEMPERATURE = (1, 4, 16), (0.0, 1.0), 1.3
DEPTHS = {
    "ngram": (2, 5, 10, 16),
    "draft": (1, 2, 4, 8),
    "medusa": (3, 8, 20),
    "rejected": (5,),
    "ngram+draft": (2, 5, 8),
}
"""Fixed depths of each strategy; for Medusa the nodes of its tree."""
CALLS = {1: 4, 4: 2, 16: 1}
"""Calls in a cell, by batch size."""
NEW_TOKENS = {"embedded": 128, "wide": 64}
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """What a recorded cell depends on."""

    repeats: int = 3
    quick: bool = False


@dataclass(frozen=True)
class Cell:
    """One combination of conditions."""

    target: str
    domain: str
    batch: int
    temperature: float
    strategy: str

    @property
    def name(self) -> str:
        """Unique name, which patterns of cells are matched with."""
        return f"{self.target}/{self.domain}/b{self.batch}/t{self.temperature}/{self.strategy}"


def cells() -> Iterator[Cell]:
    """All cells; prose also at a high temperature."""
    for target, strategy in product(("embedded", "wide"), DEPTHS):
        for domain, batch, temperature in product(DOMAINS, BATCHES, TEMPERATURES):
            yield Cell(target, domain, batch, temperature, strategy)
        for batch in BATCHES:
            yield Cell(target, "prose", batch, HIGH_TEMPERATURE, strategy)


def adaptive(settings: Settings, folder: Path, patterns: Sequence[str] = ("",), minutes: float = float("inf")) -> Rows:
    """Measure the cells that the journal lacks, and tabulate all cells that it has.

    Args:
        settings: of every cell.
        folder: of the journal.
        patterns: only cells whose name begins so are measured and tabulated; wildcards are allowed.
        minutes: no cell is started after that time.
    """
    wanted = [cell for cell in cells() if any(fnmatchcase(cell.name, f"{pattern}*") for pattern in patterns)]
    if settings.quick:
        wanted = [cell for cell in wanted if (cell.target, cell.batch, cell.domain) == ("embedded", 1, "edit")]
    journal = Journal(folder, settings, resume=any(folder.glob("records-*.jsonl")))
    end = monotonic() + 60 * minutes
    missing = [cell for cell in wanted if cell.name not in journal]
    random.Random(0).shuffle(missing)
    for cell in track(missing, "cells"):
        if monotonic() > end:
            break
        journal.add(cell.name, measure(cell, settings, journal))
    known: dict[str, list[Record]] = {}
    for record in journal.records:
        known.setdefault(record["unit"], []).append(record)
    return tables({cell.name: known[cell.name] for cell in wanted if cell.name in known})


def measure(cell: Cell, settings: Settings, journal: Journal) -> list[Record]:
    """The records of a cell."""
    bench = _bench(cell.target, journal)
    count = 2 if settings.quick else CALLS[cell.batch] * cell.batch
    prompts = domain_prompts(WorkloadSettings(prompts_per_domain=count))[cell.domain]
    prompts = (prompts * count)[: max(count, cell.batch)]
    generation: dict[str, Any] = {"max_new_tokens": 32 if settings.quick else NEW_TOKENS[cell.target]}
    sampling = {"do_sample": True, "temperature": cell.temperature, "top_k": 0}
    generation |= sampling if cell.temperature else {"do_sample": False}
    variants = variants_of(cell.strategy, bench)
    batches = list(encode(bench.tokenizer, prompts, cell.batch))
    measure_round(bench.model, batches[0], variants, {**generation, "max_new_tokens": WARM_UP_TOKENS}, 0)
    units = [
        Unit("adaptive", cell.name, number, repeat, inputs, generation, variants)
        for repeat in range(settings.repeats)
        for number, inputs in enumerate(batches)
    ]
    return [record for place, unit in enumerate(units) for record in bench.measure(unit, place)]


def variants_of(strategy: str, bench: Bench) -> list[Variant]:
    """Plain decoding, twice, every fixed depth, and adaptive depth."""
    made = load_strategy(strategy, bench.model)
    depths: tuple[Depth, ...] = (*DEPTHS[strategy], AUTO)
    return [PLAIN, PLAIN_AGAIN, *(Variant(str(depth), ours(made.make(depth, None))) for depth in depths)]


@lru_cache(maxsize=2)
def _bench(target: str, journal: Journal) -> Bench:
    wide = target == "wide"
    model, tokenizer = load(WorkloadSettings(dtype=WIDE["dtype"] if wide else "float32"))
    return Bench(widen(model, WIDE["widen"]) if wide else model, tokenizer, journal, PartialState(cpu=True), Plan())
