"""Task domains: prompts and their generation settings, described in `domains.yaml` and read with `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

CATALOGUE = Path(__file__).with_name("domains.yaml")
FIELDS = {"data", "hub", "config", "split", "revision", "where", "prompt", "turns", "generation", "about"}


@dataclass(frozen=True)
class Domain:
    """Prompts of one task, and their generation settings."""

    name: str
    conversations: list[list[str]]  # the user's turns of each conversation; most have one
    generation: dict[str, Any]  # arguments of `generate`
    about: str = ""  # in one line


class DomainError(ValueError):
    """A domain that does not exist, has an invalid description, cannot be read, or is empty."""


def names_of(wanted: Sequence[str], path: Path = CATALOGUE) -> list[str]:
    """Names of domains, with sets expanded; a `DomainError` for a name that is neither."""
    catalogue = _catalogue(path)
    names: list[str] = []
    for name in wanted:
        if name not in catalogue["domains"] and name not in catalogue["sets"]:
            known = ", ".join([*catalogue["sets"], *catalogue["domains"]])
            raise DomainError(f"there is no domain {name!r}; there are {known} (add yours to {path.name})")
        names += catalogue["sets"].get(name, [name])
    return list(dict.fromkeys(names))


def load_domain(name: str, path: Path = CATALOGUE) -> Domain:
    """Read one domain; a `DomainError` if its description is invalid, or its data cannot be had."""
    catalogue = _catalogue(path)
    spec = catalogue["domains"][name]
    unknown = set(spec) - FIELDS
    if unknown or ("data" in spec) == ("hub" in spec) or ("prompt" in spec) == ("turns" in spec):
        problem = f"has unknown fields {sorted(unknown)}" if unknown else "needs data or hub, and prompt or turns"
        raise DomainError(f"domain {name!r} in {path.name} {problem}")
    rows = _read(name, spec, path.parent)
    for column, values in spec.get("where", {}).items():
        kept = values if isinstance(values, list) else [values]
        rows = [row for row in rows if row.get(column) in kept]
    if not rows:
        raise DomainError(
            f"domain {name!r} has no prompts: its dataset is empty, or no row matches `where` in {path.name}"
        )
    try:
        conversations = [row[spec["turns"]] if "turns" in spec else [spec["prompt"].format_map(row)] for row in rows]
    except KeyError as missing:
        raise DomainError(
            f"domain {name!r}: its rows have no column {missing}; there are {', '.join(rows[0])}"
        ) from None
    generation = spec.get("generation", "greedy")
    if isinstance(generation, str):
        generation = catalogue["generation"][generation]
    return Domain(name, conversations, generation, spec.get("about", ""))


def _catalogue(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {"generation": found["generation"], "sets": found.get("sets", {}), "domains": found["domains"]}
    except (OSError, TypeError, KeyError, yaml.YAMLError) as error:
        raise DomainError(f"cannot read domains from {path}: {error}") from None


def _read(name: str, spec: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    import datasets

    if "data" in spec:
        file = folder / spec["data"]
        if not file.exists():
            raise DomainError(f"domain {name!r}: there is no file {file}")
        if not file.read_text(encoding="utf-8").strip():
            return []
        return cast(Any, datasets.load_dataset("json", data_files=str(file), split="train")).to_list()
    missing = [field for field in ("split", "revision") if field not in spec]
    if missing:
        raise DomainError(f"domain {name!r} comes from the Hub and must name its {' and '.join(missing)}")
    try:
        return cast(
            Any, datasets.load_dataset(spec["hub"], spec.get("config"), split=spec["split"], revision=spec["revision"])
        ).to_list()
    except Exception as error:  # datasets and the Hub's client raise what their network libraries raise
        raise DomainError(f"domain {name!r} cannot be read from {spec['hub']} (no network?): {error}") from error
