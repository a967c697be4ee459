"""What is recorded of the checkpoints, the documentation's table of it, and the types that nobody has tried.

The record, `tests/assets/checkpoints.json`, has what the text and the image or audio of every checkpoint gave, and the
types of Transformers' mapping tables that are untried.
"""

import json
from pathlib import Path
from typing import Any

from transformers.models.auto import modeling_auto

from tests.checkpoints.cases import PLAIN_FAILS, SAME, SIBLINGS, TABLES, Outcome, class_name, verdict
from tests.checkpoints.inputs import AUDIO
from tests.checkpoints.table import CHECKPOINTS, Checkpoint

RECORD = Path(__file__).parents[1] / "assets" / "checkpoints.json"
TYPES = Path(__file__).parents[1] / "assets" / "architectures.json"
TREES, CHAINS = "trees", "chains"
Result = dict[str, list[str]]
"""By "text" and the kind of media: the verdict in float32, the reason of refusals, the verdict in bfloat16."""


def recorded() -> dict[str, Any]:
    """The whole record."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def record(results: dict[str, Result]) -> None:
    """Put these results into the record."""
    whole = recorded()
    known = {**whole["checkpoints"], **results}
    whole["checkpoints"] = {row.name: known[row.name] for row in CHECKPOINTS if row.name in known}
    RECORD.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def result(outcomes: dict[str, Outcome]) -> Result:
    """The verdicts of text and of media; in float32 "trees" or "chains" in place of "same"."""
    by_kind: dict[str, dict[str, Outcome]] = {}
    for name, outcome in outcomes.items():
        kind, _, case = name.partition(": ")
        by_kind.setdefault(kind, {})[case] = outcome
    results = {}
    for kind, of_kind in by_kind.items():
        half = [of_kind.pop(case) for case in list(of_kind) if "bfloat16" in case]
        status, reason = verdict(list(of_kind.values()))
        if status == SAME:  # the first path of the trees with wrong siblings is always wrong
            accepted = sum(outcome.accepted for case, outcome in of_kind.items() if case.startswith(SIBLINGS))
            status = TREES if accepted else CHAINS
        results[kind] = [status, reason, verdict(half).status]
    return results


def section() -> str:
    """The table of the page."""
    results = recorded()["checkpoints"]
    lines = [
        "| checkpoint | class | text | image or audio | published heads | refused because |",
        "|---|---|---|---|---|---|",
        *(_line(row, results[row.name]) for row in CHECKPOINTS if row.name in results),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Checkpoint, result: Result) -> str:
    text, media, reasons = "", "", list[str]()
    for kind, (status, reason, half) in result.items():
        shown = status if half in (SAME, status) else f"{status} ({half} in bfloat16)"
        if kind in ("text", "encoder_text"):
            text = "" if status == PLAIN_FAILS else shown
        else:
            media = f"{'audio' if kind.removeprefix('encoder_') in AUDIO else 'image'}: {shown}"
        if status != PLAIN_FAILS and reason not in reasons:
            reasons += [reason] * bool(reason)
    cells = (row.name, f"`{class_name(row)}`", text, media, row.heads, "; ".join(reasons).replace("|", "/"))
    return f"| {' | '.join(cells)} |"


# Types


def types() -> set[str]:
    """All types of the mapping tables that the installed Transformers has."""
    return {kind for table in TABLES for kind in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")}


def tried_types() -> set[str]:
    """Those with a line on the page."""
    listed = json.loads(TYPES.read_text(encoding="utf-8"))
    return {name.partition(" (")[0] for name in listed} | {row.kind for row in CHECKPOINTS}


def unlisted() -> list[str]:
    """Types that are neither tried nor recorded as untried: those that a newer Transformers has added."""
    return sorted(types() - tried_types() - set(recorded()["untried"]))


def untried_section() -> str:
    """The page's list of types that nobody has tried; the self-check decides about them before the first token."""
    return ", ".join(f"`{kind}`" for kind in sorted(set(recorded()["untried"]) - tried_types())) + "\n"
