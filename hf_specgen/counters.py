"""Counters of speculative decoding: of one step, of one `generate` call, and of many calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from hf_specgen.tree import DraftTree, depths
from hf_specgen.verification import VerificationResult

COUNTS = ("steps", "drafts", "drafted", "accepted", "emitted")
RATES = ("acceptance_rate", "tokens_per_step", "mean_acceptance_length")
POSITIONS = ("drafted_per_position", "accepted_per_position")
"""Properties that `to_dict` contains."""


@dataclass
class RowStep:
    """One row in one verification step: draft nodes, the depth they reached, tokens accepted and emitted."""

    drafted: int
    depth: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class StepPasses:
    """The forward passes of one decoding step, for all rows together: what its latency depends on.

    Args:
        rows: rows that took part.
        context: tokens in the longest row, prompt included.
        target: tokens in the target's pass without the prompt: per row the pending token and as many nodes as the
            largest draft has.
        drafter: tokens in each forward pass of the drafter, without its prefill. Empty if drafting needed no forward
            pass; None if no draft was requested.
    """

    rows: int
    context: int
    target: int
    drafter: tuple[int, ...] | None


@dataclass(slots=True)
class StepRecord:
    """The outcome of one decoding step.

    Args:
        requested: `[rows]` maximum draft depth of each row, after it was cut to what the row can use.
        rows: `[rows]` drafted, accepted and emitted tokens; None for a row that took no part.
        tokens_per_row: tokens of each row in the target's forward pass: the pending token, the largest draft, padding.
        seconds: wall time by part: "draft", "forward", "verify". No "forward" where drafts were verified together
            with the prompt.
        drafter_passes: tokens in each forward pass of the drafter, over all rows. None if unknown: then one pass with
            one token per row is assumed for each level of the deepest draft.
    """

    requested: Sequence[int]
    rows: Sequence[RowStep | None]
    tokens_per_row: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    drafter_passes: Sequence[int] | None = None

    @property
    def batch(self) -> int:
        """Number of rows that took part."""
        return sum(row is not None for row in self.rows)

    @property
    def depth(self) -> int:
        """Depth of the deepest draft."""
        return max((row.depth for row in self.rows if row is not None), default=0)

    @property
    def passes(self) -> Sequence[int]:
        """Tokens in each forward pass of the drafter."""
        return [self.batch] * self.depth if self.drafter_passes is None else self.drafter_passes


class Rates:
    """Ratios of the counters `steps`, `drafts`, `drafted`, `accepted` and `emitted_in_steps`."""

    @property
    def acceptance_rate(self: Any) -> float:
        """accepted / drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def tokens_per_step(self: Any) -> float:
        """Mean accepted length over all steps, the bonus token included (Spec-Bench's definition)."""
        return _ratio(self.emitted_in_steps, self.steps)

    @property
    def mean_acceptance_length(self: Any) -> float:
        """1 + accepted / drafts: only steps with a draft (vLLM's definition)."""
        return 1 + _ratio(self.accepted, self.drafts)

    def __str__(self: Any) -> str:
        return str(self.summary())


@dataclass
class Statistics(Rates):
    """Counters of one `generate` call.

    A *step* of a row is one verification (a forward pass of the target) in which the row took part; a *draft* is a step
    in which at least one token was proposed for it. The prefill is a step for the rows whose draft was verified in it.
    Tokens cut off by a stop do not count as accepted.

    Args:
        rows: the steps of each row, in order.
        lengths: generated tokens of each row in the output, including a first token from a prefill without a draft.
        seconds: wall time in `prefill`, `draft`, `forward`, `verify`, `policy` (choosing draft depths), `total`.
        passes: the forward passes of each step of the batch, in order.
        strategy: what drafted, as a Python expression.

    Example:
        >>> stats = Statistics(rows=[[RowStep(3, 3, 3, 4), RowStep(3, 3, 1, 2), RowStep(2, 2, 0, 1)]], lengths=[8])
        >>> stats.drafted, stats.accepted, stats.accepted_per_position
        (8, 4, [2, 1, 1])
        >>> round(stats.tokens_per_step, 3), round(stats.mean_acceptance_length, 3)
        (2.333, 2.333)
    """

    rows: list[list[RowStep]]
    lengths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[StepPasses] = field(default_factory=list)
    strategy: str = ""

    def record(self, tree: DraftTree, result: VerificationResult, is_prefill: bool = False) -> list[RowStep | None]:
        """Count one verification; returns the outcome of each row, None for a row that took no part."""
        steps: list[RowStep | None] = [None] * len(self.rows)
        for row, path in enumerate(result.paths):
            parents = tree.parents[row]
            if path is not None and (parents or not is_prefill):
                depth = max(depths(parents), default=0)
                step = RowStep(len(parents), depth, result.accepted[row], len(result.tokens[row]))
                self.rows[row].append(step)
                steps[row] = step
        return steps

    def finish(self, lengths: Sequence[int], without_step: Sequence[int]) -> None:
        """Set the final length of each row, and remove tokens beyond it from the counts.

        Args:
            lengths: generated tokens of each row.
            without_step: how many of them no step emitted: 1 where the first came from a prefill without a draft.
        """
        self.lengths = list(lengths)
        for steps, length, uncounted in zip(self.rows, lengths, without_step, strict=True):
            remaining = length - uncounted
            for step in steps:
                step.emitted = max(0, min(step.emitted, remaining))
                step.accepted = min(step.accepted, step.emitted)
                remaining -= step.emitted
            while steps and steps[-1].emitted == 0:
                steps.pop()

    def __add__(self, other: Statistics) -> Statistics:
        """Both calls together: the rows of the second call follow those of the first."""
        names = {**self.seconds, **other.seconds}
        seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        passes = self.passes + other.passes
        return Statistics(self.rows + other.rows, self.lengths + other.lengths, seconds, passes, self.strategy)

    def row(self, index: int) -> Statistics:
        """The statistics of one row alone; times and forward passes are those of the whole batch."""
        return Statistics([self.rows[index]], [self.lengths[index]], self.seconds, self.passes, self.strategy)

    @property
    def _steps(self) -> list[RowStep]:
        return [step for row in self.rows for step in row]

    @property
    def steps(self) -> int:
        """Verifications, summed over rows."""
        return len(self._steps)

    @property
    def drafts(self) -> int:
        """Steps with a draft."""
        return sum(step.drafted > 0 for step in self._steps)

    @property
    def drafted(self) -> int:
        """Draft tokens (tree nodes) that the target verified."""
        return sum(step.drafted for step in self._steps)

    @property
    def accepted(self) -> int:
        """Draft tokens that are part of the output."""
        return sum(step.accepted for step in self._steps)

    @property
    def emitted(self) -> int:
        """Tokens in the output, over all rows."""
        return sum(self.lengths)

    @property
    def emitted_in_steps(self) -> int:
        """The same without first tokens from a prefill that verified no draft."""
        return sum(step.emitted for step in self._steps)

    @property
    def drafted_per_position(self) -> list[int]:
        """How many drafts reached position 1, 2, …"""
        return _reached([step.depth for step in self._steps])

    @property
    def accepted_per_position(self) -> list[int]:
        """How many drafts had position 1, 2, … accepted."""
        counts = _reached([step.accepted for step in self._steps])
        return counts + [0] * (len(self.drafted_per_position) - len(counts))

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """For each position, the share of the drafts reaching it in which it was accepted."""
        return [_ratio(a, d) for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    def origins(self, row: int = 0) -> list[bool]:
        """For each generated token of a row, whether it is an accepted draft token."""
        marks = [False] * (self.lengths[row] - sum(step.emitted for step in self.rows[row]))
        for step in self.rows[row]:
            marks += [True] * step.accepted + [False] * (step.emitted - step.accepted)
        return marks

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        names = (*COUNTS, *RATES, *POSITIONS, "acceptance_rate_per_position")
        result: dict[str, Any] = {name: getattr(self, name) for name in names}
        result["seconds"] = dict(self.seconds)
        if len(self.rows) > 1:
            result["rows"] = [self.row(index).to_dict() for index in range(len(self.rows))]
        return result

    def summary(self) -> str:
        """The main counters in a few lines of text."""
        times = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in self.seconds.items())
        positions = " ".join(f"{rate:.2f}" for rate in self.acceptance_rate_per_position)
        return (f"{self.strategy}\n" if self.strategy else "") + (
            f"{self.emitted} tokens, {self.steps} verification steps: {self.tokens_per_step:.2f} tokens per step\n"
            f"drafted {self.drafted}, accepted {self.accepted} ({self.acceptance_rate:.0%}); "
            f"mean acceptance length {self.mean_acceptance_length:.2f} over {self.drafts} drafts\n"
            f"acceptance by position: {positions or '(nothing was drafted)'}\n"
            f"time: {times or '(not measured)'}"
        )

    def to_json(self) -> str:
        """`to_dict` as a JSON text."""
        return json.dumps(self.to_dict(), indent=2)


@dataclass
class CallTotals(Rates):
    """Sums over the `generate` calls of a model that a strategy is attached to; see `hf_specgen.attach`.

    Args:
        calls: calls that speculated.
        plain_calls: calls that fell back to plain generation, by reason.
        steps: verifications, summed over rows.
        drafts: steps with a draft.
        drafted: draft tokens (tree nodes) that the target verified.
        accepted: draft tokens that are part of the output.
        emitted: tokens in the output, over all rows.
        emitted_in_steps: the same without first tokens from a prefill that verified no draft.
        drafted_per_position, accepted_per_position: how many drafts reached, and were accepted at, position 1, 2, …
        seconds: wall time of the calls.
    """

    calls: int = 0
    plain_calls: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    emitted_in_steps: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, call: Statistics) -> None:
        """Add a call that speculated."""
        self.calls += 1
        for name in (*COUNTS, "emitted_in_steps"):
            setattr(self, name, getattr(self, name) + getattr(call, name))
        for name in POSITIONS:
            columns = zip_longest(getattr(self, name), getattr(call, name), fillvalue=0)
            setattr(self, name, [sum(column) for column in columns])
        self.seconds += call.seconds.get("total", 0.0)

    def add_plain(self, reason: str) -> None:
        """Count a call that fell back to plain generation."""
        self.plain_calls[reason] = self.plain_calls.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in RATES}

    def summary(self) -> str:
        """The main counters in a few lines of text."""
        lines = [
            f"{_calls(self.calls)}, {self.emitted} tokens in {self.seconds:.2f} s, "
            f"{self.tokens_per_step:.2f} tokens per step",
            f"drafted {self.drafted}, accepted {self.accepted} ({self.acceptance_rate:.0%})",
        ]
        lines += [f"{_calls(count)} without speculation: {reason}" for reason, count in self.plain_calls.items()]
        return "\n".join(lines)


def _reached(values: Sequence[int]) -> list[int]:
    return [sum(value >= position for value in values) for position in range(1, max(values, default=0) + 1)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"
