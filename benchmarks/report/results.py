"""All tables of a run, the dictionary that is saved as `report.json`, and what to use by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness.provenance import provenance
from benchmarks.harness.runner import Outcome
from benchmarks.report import summary
from benchmarks.report.summary import ALL
from benchmarks.report.tables import Rows, by_domain, tables_of


def tables(outcome: Outcome) -> dict[str, Rows]:
    """Every table that has rows, by name."""
    records = outcome.records
    domains = summary.cells(records, "domains", together=True)
    over_all = [cell for cell in domains if cell.name == summary.ALL]
    speed = summary.speed(domains, "domain")
    found: dict[str, Rows] = {"by domain": by_domain(speed)}
    found["projected by domain"] = by_domain(speed, summary.PROJECTED)
    found |= {"speed": speed, "acceptance": summary.acceptance(domains, "domain")}
    found["latency"] = summary.latency(over_all)
    if outcome.curve is not None:
        found["cost"] = summary.cost(outcome.curve)
    tuning = [cell for cell in summary.cells(records, "tuning", together=True) if cell.name == summary.ALL]
    found["tuning"] = [{k: v for k, v in row.items() if k != "domain"} for row in summary.speed(tuning, "domain")]
    for section in ("batch", "temperature", "context"):
        found[section] = summary.speed(summary.cells(records, section), section)
        found[f"projected by {section}"] = by_domain(found[section], summary.PROJECTED, section)
    found |= outcome.counted
    found["differences"] = summary.differences(records)
    return {name: rows for name, rows in found.items() if rows}


def result(outcome: Outcome, suite: str = "full", kept: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that is saved of a run, ready for JSON: the report and the tables of a README are made from it.

    `kept` are the tables that are saved; empty for all.
    """
    return {
        "suite": suite,
        "provenance": provenance(),
        "plan": asdict(outcome.plan),
        "execution": outcome.plan.execution,
        "seed": outcome.plan.seed,
        "seconds": outcome.seconds,
        "chosen": outcome.chosen,
        "ours": outcome.ours,
        "notes": outcome.notes,
        "domains": outcome.about,
        "curve": asdict(outcome.curve) if outcome.curve else None,
        "tables": {name: rows for name, rows in tables(outcome).items() if not kept or name in kept},
        "texts": [
            {"domain": r["cell"], "variant": r["variant"], "tokens": r["text"]} for r in outcome.records if "text" in r
        ],
    }


def differing(outcome: Outcome) -> list[str]:
    """Names of this package's variants with a token that differs from plain decoding.

    In lower precision than float32, only where rounding does not explain it.
    """
    strict = outcome.plan.dtype == "float32"
    ours = [r for r in outcome.records if "steps" in r and not r["identical"]]
    return sorted({r["variant"] for r in ours if strict or not summary.is_explained(r)})


def choices(result: dict[str, Any]) -> Rows:
    """The best of this package's variants over all domains, then for each; empty for a run without the table "speed".

    Each has the `variant` and the `code` that builds it, None if none is faster than plain `generate`; the `speedup` of
    the fastest one and its 95% interval, `low` and `high`, None for too few requests.
    """
    rows = [row for row in result["tables"].get("speed", []) if row["variant"] in result["ours"]]
    domains = sorted(dict.fromkeys(row["domain"] for row in rows), key=lambda domain: domain != ALL)
    found: Rows = []
    for domain in domains:
        best = max((row for row in rows if row["domain"] == domain), key=lambda row: row["speedup"])
        is_faster = best["verdict"] == "faster" or (best["verdict"] == "too few requests" and best["speedup"] > 1)
        variant = best["variant"] if is_faster else None
        measured = {name: best.get(name) for name in ("speedup", "low", "high")}
        found.append({"domain": domain, "variant": variant, "code": result["ours"].get(variant), **measured})
    return found


def sentence(result: dict[str, Any]) -> str | None:
    """What to use, in one line or two; None for projected speedups, which hold for another machine."""
    if "projected by domain" in tables_of(result):
        return None
    best = next(iter(choices(result)), None)
    if best is None:
        return None
    if best["variant"] is None:
        return (
            f"Use plain generate: no strategy was clearly faster over all domains (the best: {best['speedup']:.2f}x)."
        )
    interval = " (95% interval {low:.2f} to {high:.2f})".format(**best) if best["low"] is not None else ""
    return f"Use {best['code']}: {best['speedup']:.2f}x{interval}."
