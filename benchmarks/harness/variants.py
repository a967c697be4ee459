"""What is compared: plain decoding, strategies of this package in several settings, and their peers in Transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from hf_specgen import AdaptiveDepth, Candidates, FixedDepth, NgramCandidates, Policy
from hf_specgen.candidates.base import Depth
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.measure import Variant

Arguments = Callable[[], dict[str, Any]]
AUTO: Literal["auto"] = "auto"
PLAIN = Variant("plain", dict)


@dataclass(frozen=True)
class Family:
    """One strategy with all settings that are tried."""

    name: str  # in tables
    settings: Mapping[str, Arguments]  # arguments of `generate` for each setting, by name
    code: str = ""  # builds it, with "{}" in place of the setting; empty for a strategy of Transformers

    def with_defaults(self) -> Family:
        """The family with its default setting alone; those of Transformers keep all, as there is no such default."""
        kept = {name: made for name, made in self.settings.items() if name.endswith(f"={AUTO}") or not self.code}
        return replace(self, settings=kept)

    def variant(self, setting: str) -> Variant:
        """The family with one of its settings."""
        return Variant(f"{self.name} {setting}", self.settings[setting])

    def code_of(self, setting: str) -> str:
        """The expression that builds the strategy with one of its settings."""
        given = ", ".join(part for part in setting.split() if not part.endswith(f"={AUTO}"))
        return self.code.format(given).replace(", )", ")")


@dataclass(frozen=True)
class Strategy:
    """A strategy of this package for one target, with everything that it needs loaded."""

    name: str
    code: str  # as in `Family`
    make: Callable[[Depth, Policy | None], Candidates]  # from a depth or "auto", and a policy or None for the default
    depths: Sequence[int]  # that are tried, besides "auto"
    peer: Family | None = None  # the same strategy in Transformers
    more: Mapping[str, Arguments] = field(default_factory=dict)  # arguments of further settings, by name

    def family(self, latency: LatencyModel | None = None) -> Family:
        """All settings; with a latency model, "auto" decides by it."""
        adaptive = None if latency is None else AdaptiveDepth(latency)
        made = {f"k={depth}": ours(self.make(depth, None)) for depth in self.depths}
        return Family(self.name, {**made, f"k={AUTO}": ours(self.make(AUTO, adaptive)), **self.more}, self.code)


def ours(candidates: Candidates) -> Arguments:
    """The arguments of `generate` for a strategy of this package."""
    return partial(dict, candidate_generator=candidates)


def captured(variant: Variant) -> Variant:
    """The variant with passes captured as CUDA graphs; plain decoding is then a call that drafts nothing."""
    arguments = ours(NgramCandidates(policy=FixedDepth(0))) if variant.name == PLAIN.name else variant.arguments
    return replace(variant, arguments=lambda: {**arguments(), "compile": "graphs"})


def check_level(variants: Sequence[Variant]) -> None:
    """Raise a `ValueError` unless all variants but plain decoding run alike: eagerly, or captured."""
    by_execution: dict[str, str] = {}
    for variant in variants:
        if not variant.name.startswith(PLAIN.name):
            arguments = variant.arguments()
            execution = str(arguments.get("compile") or "eager")
            by_execution.setdefault(execution, variant.name)
    if len(by_execution) > 1:
        sides = " and ".join(f"{name!r} ({execution})" for execution, name in by_execution.items())
        raise ValueError(f"{sides} are no level comparison; run all of them alike, or measure them separately")
