"""Tables from records. Throughput is a sum divided by a sum; a ratio has its confidence interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.acceptance import PER_POSITION, Acceptance
from benchmarks.harness.journal import Record
from benchmarks.harness.projection import Projection
from benchmarks.harness.runner import DEFAULT_PLAIN
from benchmarks.harness.variants import PLAIN
from benchmarks.report.tables import Rows
from hf_specgen import Statistics
from hf_specgen.call_statistics import RowStep
from hf_specgen.depth import CostCurve
from hf_specgen.evaluation.measure import ROUNDING, Interval, speedup_interval

ALL = "all"
MIN_REQUESTS = 3
"""With fewer requests no confidence interval is given."""
PROJECTED = "projected speedup"
COUNTED = {"drafted": "drafted", "accepted": "accepted", "emitted": "emitted", "depths": "depth"}
"""Columns of the metric `Acceptance`, and the counters of a step that they consist of."""


@dataclass(frozen=True)
class Cell:
    """One variant in one domain, batch size, …: its records, and those of plain decoding on the same inputs."""

    name: str
    variant: str
    records: list[Record]
    plain: list[Record]

    @property
    def tokens_per_second(self) -> float:
        """Measured throughput."""
        return sum(r["tokens"] for r in self.records) / sum(r["seconds"] for r in self.records)

    @property
    def requests(self) -> int:
        """Number of different requests; repeats of a request are not counted."""
        return len(_by_request(self.records))

    @property
    def speedup(self) -> Interval:
        """Measured speedup. Repeats of a prompt count as one request, as the bootstrap resamples requests."""
        mine, theirs = _by_request(self.records), _by_request(self.plain)
        (tokens, seconds), (plain_tokens, plain_seconds) = zip(*mine, strict=True), zip(*theirs, strict=True)
        return speedup_interval(tokens, seconds, plain_tokens, plain_seconds)

    @property
    def projected(self) -> float | None:
        """Speedup by counted forward passes and the latency profile of the run; None without a profile."""
        known = [Projection(**r["projected"]) for r in self.records if r.get("projected")]
        return sum(known, Projection()).speedup if known else None

    @property
    def counts(self) -> Statistics | None:
        """The statistics of all records together; None for variants without statistics."""
        known = [r for r in self.records if "steps" in r]
        if not known:
            return None
        steps = [RowStep(*step) for r in known for step in r["steps"]]
        return Statistics([steps], [sum(r["tokens"] for r in known)])


def cells(records: Sequence[Record], section: str, *, together: bool = False) -> list[Cell]:
    """The cells of a section in the order of measurement; with `together`, one over all of them is added."""
    groups: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["section"] == section:
            groups[record["cell"], record["variant"]][record["unit"]] = record
            if together:
                groups[ALL, record["variant"]][record["unit"]] = record
    ordered = sorted(groups, key=lambda group: group[0] == ALL)
    return [
        Cell(name, variant, list(groups[name, variant].values()),
             [groups[name, PLAIN.name][unit] for unit in groups[name, variant]])
        for name, variant in ordered
    ]  # fmt: skip


def speed(found: Sequence[Cell], first: str) -> Rows:
    """Throughput, speedup over plain decoding that runs as all other sides do, and whether tokens are the same.

    Where plain decoding was measured in several settings (eager, prepacked, graphs), also the ratio to the best one.
    `first` is the heading of the first column.
    """
    rows: Rows = []
    plain = {(cell.name, cell.variant): cell.tokens_per_second for cell in found if cell.variant.startswith(PLAIN.name)}
    for cell in found:
        row: dict[str, Any] = {first: cell.name, "variant": cell.variant, "tokens/s": cell.tokens_per_second}
        if cell.variant != PLAIN.name:
            interval = cell.speedup
            row["speedup"] = interval.value
            settings = {variant: speed for (name, variant), speed in plain.items() if name == cell.name}
            if len(settings) > 1:
                row["over best plain"] = cell.tokens_per_second / max(settings.values())
            if DEFAULT_PLAIN in settings:
                row["over default plain"] = cell.tokens_per_second / settings[DEFAULT_PLAIN]
            if cell.requests < MIN_REQUESTS:
                row["verdict"] = "too few requests"
            else:
                row |= {"low": interval.low, "high": interval.high, "verdict": _verdict(interval)}
            if cell.projected is not None:
                row[PROJECTED] = cell.projected
            row["identical"] = _identical(cell.records)
        rows.append(row)
    return rows


def acceptance(found: Sequence[Cell], first: str) -> Rows:
    """Acceptance rate, both definitions of the mean accepted length, acceptance by position; mean size of drafts."""
    rows: Rows = []
    for cell in found:
        if cell.counts is None:
            continue
        columns = {name: [getattr(step, column) for step in cell.counts.rows[0]] for name, column in COUNTED.items()}
        rates: Any = Acceptance().compute(**columns)
        drafts = [step for step in cell.counts.rows[0] if step.drafted]
        rows.append(
            {
                first: cell.name,
                "variant": cell.variant,
                "tokens/step": rates["tokens_per_step"],
                "mean acceptance length": rates["mean_acceptance_length"],
                "accepted": rates["acceptance_rate"],
                "draft depth": mean(step.depth for step in drafts) if drafts else 0.0,
                "draft tokens": mean(step.drafted for step in drafts) if drafts else 0.0,
                "by position": " ".join(f"{share:.2f}" for share in rates[PER_POSITION][:8]),
            }
        )
    return rows


def latency(found: Sequence[Cell]) -> Rows:
    """Seconds of whole requests and until the first token, per variant."""
    rows: Rows = []
    for cell in found:
        seconds = [r["seconds"] for r in cell.records]
        p50, p95, p99 = np.percentile(seconds, [50, 95, 99])
        row: dict[str, Any] = {"variant": cell.variant, "mean s": mean(seconds), "p50 s": float(p50)}
        row |= {"p95 s": float(p95), "p99 s": float(p99)}
        row["first token ms"] = 1000 * mean(r["first_token"] for r in cell.records)
        rows.append(row)
    return rows


def cost(curve: CostCurve) -> Rows:
    """T(q) as measured."""
    return [
        {"q": q, "ms": 1000 * seconds, "T(q)/T(1)": curve.relative(q)}
        for q, seconds in zip(curve.queries, curve.seconds, strict=True)
    ]


def differences(records: Sequence[Record]) -> Rows:
    """The first token that differs from plain decoding in each unit, by what decides it (`first_difference`)."""
    columns = ("position", "plain_token", "our_token", "decided by", "margin", "explained")
    return [
        {"unit": r["unit"], "variant": r["variant"]}
        | {name.replace("_", " "): r["difference"][name] for name in columns if name in r["difference"]}
        for r in records
        if r.get("difference")
    ]


def is_explained(record: Record) -> bool:
    """Whether the tokens are those of plain decoding, or differ first where rounding decides."""
    return bool(record["identical"]) or (record.get("difference") or {}).get("explained") == ROUNDING


def _verdict(interval: Interval) -> str:
    if not interval.differs:
        return "no difference"
    return "faster" if interval.value > 1 else "slower"


def _identical(records: Sequence[Record]) -> bool | str:
    """Transformers' assistants draw other random numbers when sampling: other tokens with the same distribution."""
    if all(r["identical"] for r in records):
        return True
    if all(r["identical"] or (r["sampled"] and "steps" not in r) for r in records):
        return "independent samples"
    return "rounding" if all(map(is_explained, records)) else False


def _by_request(records: Sequence[Record]) -> list[tuple[int, float]]:
    sums: dict[tuple[str, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for record in records:
        request = record["cell"], record["number"]
        tokens, seconds = sums[request]
        sums[request] = tokens + record["tokens"], seconds + record["seconds"]
    return [sums[request] for request in sorted(sums)]
