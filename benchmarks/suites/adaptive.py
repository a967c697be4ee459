"""Never slower, and close to hindsight: `k="auto"` against plain `generate` and against every fixed k, cell by cell.

A cell is a target, a domain, a batch size, a temperature and a strategy. In each, plain `generate`, fixed depths and
`k="auto"` take turns on the same prompts, and plain `generate` a second time: how far it seems from itself says how
far any figure of the cell may be off. Cells are measured in an order drawn by lot, so that those that are there
stand for all, and kept in a journal as they are finished: the section can be run in pieces and goes on where it was
left.

    python -m benchmarks.core adaptive                         # until all cells are there
    MINUTES=10 python -m benchmarks.core adaptive              # ten minutes of it
    CELLS='embedded/edit,*/draft' python -m benchmarks.core adaptive     # those whose name begins so
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any, Final

from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common import PLAIN, WIDE, Rows
from benchmarks.widen import widen
from benchmarks.wrong import WrongCandidates
from hf_specgen import AutoCandidates, Candidates, Controller, DraftModelCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.evaluation.intervals import Interval, speedup_interval
from hf_specgen.evaluation.measure import Sample, Variant, interleave
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    EMBEDDED_DRAFT,
    EMBEDDED_HEADS,
    WorkloadSettings,
    domain_prompts,
    encode,
    load,
)

JOURNAL = Path("benchmarks/results/adaptive-cells.jsonl")
BATCHES, TEMPERATURES, HOT = (1, 4, 16), (0.0, 1.0), 1.3
# Depths; for Medusa the nodes of its tree.
FIXED = {"ngram": (2, 5, 10, 16), "draft": (1, 2, 4, 8), "medusa": (3, 8, 20), "wrong": (5,), "choice": (2, 5, 8)}
AUTO: Final = "auto"
AGAIN = Variant("plain again", dict)
CALLS = {1: 4, 4: 2, 16: 1}
"""By batch: prompts for so many calls."""
NEW_TOKENS = {"embedded": 128, "wide": 64}
NEVER_SLOWER, CLOSE = 0.97, 0.93
"""Of plain `generate`, and of the best fixed k of each cell: what auto is held to."""


@dataclass(frozen=True)
class Cell:
    """One place of the matrix."""

    target: str
    domain: str
    batch: int
    temperature: float
    strategy: str

    @property
    def name(self) -> str:
        return f"{self.target}/{self.domain}/b{self.batch}/t{self.temperature}/{self.strategy}"


def cells() -> Iterator[Cell]:
    """The matrix, and prose at a high temperature."""
    for target, strategy in product(("embedded", "wide"), FIXED):
        for domain, batch, temperature in product(DOMAINS, BATCHES, TEMPERATURES):
            yield Cell(target, domain, batch, temperature, strategy)
        for batch in BATCHES:
            yield Cell(target, "prose", batch, HOT, strategy)


def adaptive(repeats: int, quick: bool) -> Rows:
    """Measure the cells that the journal lacks, then tabulate all that it has."""
    beginnings = os.environ.get("CELLS", "").split(",")
    wanted = [cell for cell in cells() if any(fnmatchcase(cell.name, f"{begins}*") for begins in beginnings)]
    if quick:
        wanted = [cell for cell in wanted if cell.target == "embedded" and cell.batch == 1 and cell.domain == "edit"]
    known = _journal(repeats, quick)
    until = monotonic() + 60 * float(os.environ.get("MINUTES", "inf"))
    missing = [cell for cell in wanted if cell.name not in known]
    random.Random(0).shuffle(missing)
    for cell in track(missing, "cells"):
        if monotonic() > until:
            break
        known[cell.name] = measure(cell, repeats, quick)
        JOURNAL.parent.mkdir(parents=True, exist_ok=True)
        with JOURNAL.open("a", encoding="utf-8") as file:
            entry = {"cell": cell.name, "repeats": repeats, "quick": quick, "sides": known[cell.name]}
            file.write(json.dumps(entry) + "\n")
    measured = {cell: known[cell.name] for cell in wanted if cell.name in known}
    return together(measured) + [summary(cell, sides) for cell, sides in measured.items()]


Sides = dict[str, list[tuple[float, float]]]
"""For each variant (tokens, seconds) of each call, in the same order for all."""


def measure(cell: Cell, repeats: int, quick: bool) -> Sides:
    """Let all sides take turns in a cell."""
    model, tokenizer = _target(cell.target)
    wanted = 2 if quick else CALLS[cell.batch] * cell.batch
    prompts = domain_prompts(WorkloadSettings(prompts_per_domain=wanted))[cell.domain]
    prompts = (prompts * wanted)[: max(wanted, cell.batch)]
    generation: dict[str, Any] = {"max_new_tokens": 32 if quick else NEW_TOKENS[cell.target], "do_sample": False}
    if cell.temperature:
        generation |= {"do_sample": True, "temperature": cell.temperature, "top_k": 0}
    sides = variants(cell.strategy)
    warm_up = encode(tokenizer, prompts[: cell.batch], cell.batch)
    for _ in interleave(model, warm_up, sides, {**generation, "max_new_tokens": 16}):
        pass
    result: Sides = {side.name: [] for side in sides}
    for seed in range(repeats):
        for samples in interleave(model, encode(tokenizer, prompts, cell.batch), sides, generation, 1000 * seed):
            for name, sample in samples.items():
                result[name].append(_numbers(sample))
    return result


def variants(strategy: str) -> list[Variant]:
    """Plain, twice, every fixed k, and auto."""
    depths: Sequence[int | str] = (*FIXED[strategy], AUTO)
    made = {str(k): _strategy(strategy, k) for k in depths}
    return [
        PLAIN,
        AGAIN,
        *(Variant(k, partial(dict, candidate_generator=candidates)) for k, candidates in made.items()),
    ]


def _strategy(name: str, k: Any) -> Candidates:
    if name == "ngram":
        return NgramCandidates(k=k)
    if name == "draft":
        return DraftModelCandidates(str(EMBEDDED_DRAFT), k=k)
    if name == "medusa":
        heads = str(EMBEDDED_HEADS)
        return MedusaCandidates(heads, policy=Controller()) if k == AUTO else MedusaCandidates(heads, tree=k)
    if name == "wrong":
        return WrongCandidates(k=k)
    if k == AUTO:
        return AutoCandidates([NgramCandidates(k=AUTO), DraftModelCandidates(str(EMBEDDED_DRAFT), k=AUTO)])
    return NgramCandidates(k=k)


def summary(cell: Cell, sides: Sides) -> dict[str, Any]:
    """Auto over plain and over the best fixed k of the cell, known only afterwards; plain counts as k = 0.

    *later calls* is auto over plain without the first call of the cell, in which another kind of text is forgotten.
    """
    fixed = [name for name in sides if name not in (AUTO, AGAIN.name)]
    best = max(fixed, key=lambda name: _rate(sides[name]))
    over_plain, over_best = _interval(sides[AUTO], sides[PLAIN.name]), _interval(sides[AUTO], sides[best])
    later, later_plain = sides[AUTO][1:], sides[PLAIN.name][1:]
    return {
        "cell": cell.name,
        "auto/plain": over_plain.value,
        "lowest": over_plain.low,
        "highest": over_plain.high,
        "again/plain": _interval(sides[AGAIN.name], sides[PLAIN.name]).value,
        "later calls": _rate(later) / _rate(later_plain) if later else "",
        "best fixed": best,
        "auto/best": over_best.value,
        "best lowest": over_best.low,
        "best highest": over_best.high,
    }


def together(measured: dict[Cell, Sides]) -> Rows:
    """Over all cells of a strategy: auto against the single k that would have been best for all of them.

    A cell counts by its time per token, so every cell weighs the same. Besides, the slowest cell; in how many auto is
    as fast as it is meant to be; and in how many plain `generate` is as fast as itself.
    """
    rows: Rows = []
    for strategy in FIXED:
        chosen = [sides for cell, sides in measured.items() if cell.strategy == strategy]
        if not chosen:
            continue
        names = [name for name in chosen[0] if name not in (AUTO, AGAIN.name)]

        def seconds_per_token(name: str, chosen: list[Sides] = chosen) -> float:
            """Relative to plain, the mean over cells."""
            return sum(_rate(sides[PLAIN.name]) / _rate(sides[name]) for sides in chosen) / len(chosen)

        best = min(names, key=seconds_per_token)
        each = [summary(cell, sides) for cell, sides in measured.items() if cell.strategy == strategy]
        rows.append(
            {
                "cell": f"all {len(chosen)} of {strategy}",
                "auto/plain": 1 / seconds_per_token(AUTO),
                "slowest": min(row["auto/plain"] for row in each),
                f"{NEVER_SLOWER} of plain": _share(each, "auto/plain", NEVER_SLOWER),
                "later calls": _share(each, "later calls", NEVER_SLOWER),
                "plain again": _share(each, "again/plain", NEVER_SLOWER),
                "best fixed": best,
                "auto/best": seconds_per_token(best) / seconds_per_token(AUTO),
                f"{CLOSE} of best": _share(each, "auto/best", CLOSE),
            }
        )
    return rows


def _share(rows: Rows, figure: str, least: float) -> str:
    figures = [row[figure] for row in rows if row[figure] != ""]
    return f"{sum(value >= least for value in figures)} of {len(figures)}"


def _interval(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> Interval:
    tokens, seconds = zip(*ours, strict=True)
    other_tokens, other_seconds = zip(*theirs, strict=True)
    return speedup_interval(tokens, seconds, other_tokens, other_seconds)


def _rate(calls: list[tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in calls) / sum(seconds for _, seconds in calls)


def _numbers(sample: Sample) -> tuple[float, float]:
    return float(sample.tokens), sample.seconds


def _journal(repeats: int, quick: bool) -> dict[str, Sides]:
    if not JOURNAL.exists():
        return {}
    entries = [json.loads(line) for line in JOURNAL.read_text(encoding="utf-8").splitlines()]
    return {e["cell"]: e["sides"] for e in entries if (e["repeats"], e["quick"]) == (repeats, quick)}


@lru_cache(maxsize=2)
def _target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load(WorkloadSettings(dtype="bfloat16" if name == "wide" else "float32"))
    return (widen(model, WIDE) if name == "wide" else model), tokenizer
