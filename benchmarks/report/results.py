"""The tables of a run, and the file that holds them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks import summary
from benchmarks.common import Rows
from benchmarks.runner import Outcome
from hf_specgen.evaluation.provenance import provenance


def tables(outcome: Outcome) -> dict[str, Rows]:
    """Every table that the records give, by name; those with nothing in them are left out."""
    records = outcome.records
    domains = summary.cells(records, "domains", together=True)
    over_all = [cell for cell in domains if cell.name == summary.ALL]
    found: dict[str, Rows] = {"speed": summary.speed(domains, "domain")}
    found["acceptance"] = summary.acceptance(domains, "domain")
    found["latency"] = summary.latency(over_all)
    if outcome.curve is not None:
        found["limits"] = summary.limits(domains, outcome.curve)
        found["cost"] = summary.cost(outcome.curve)
    tuning = [cell for cell in summary.cells(records, "tuning", together=True) if cell.name == summary.ALL]
    found["tuning"] = [{k: v for k, v in row.items() if k != "domain"} for row in summary.speed(tuning, "domain")]
    for section in ("batch", "temperature", "context"):
        found[section] = summary.speed(summary.cells(records, section), section)
    found |= outcome.scripted
    found["differences"] = summary.differences(records)
    return {name: rows for name, rows in found.items() if rows}


def result(outcome: Outcome) -> dict[str, Any]:
    """Everything of a run that is worth keeping, ready for JSON; the report and the README are made from it."""
    return {
        "provenance": provenance(),
        "plan": asdict(outcome.plan),
        "seed": outcome.plan.seed,
        "seconds": outcome.seconds,
        "chosen": outcome.chosen,
        "ours": outcome.ours,
        "notes": outcome.notes,
        "domains": outcome.about,
        "curve": asdict(outcome.curve) if outcome.curve else None,
        "tables": tables(outcome),
        "texts": [
            {"domain": r["cell"], "variant": r["variant"], "tokens": r["text"]} for r in outcome.records if "text" in r
        ],
    }


def differing(outcome: Outcome) -> list[str]:
    """Our variants of which a token differed from plain decoding somewhere."""
    return sorted({r["variant"] for r in outcome.records if "steps" in r and not r["identical"]})
