"""Statistics of speculative decoding: of a step, of a `generate` call, and of many calls.

`RowStep` counts a row in a step, `StepRecord` describes a step of the batch. `Statistics` has every step of a call.
`CallTotals` sums up any number of calls in bounded memory, so it has how often each kind of `RowStep` occurred instead.
Both derive their figures from these in the same way, see `Counts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from hf_specgen.tree import DraftTree, depths
from hf_specgen.verification import VerificationResult

COUNTS = (
    "steps", "drafts", "drafted", "accepted", "emitted", "emitted_in_steps", "acceptance_rate", "tokens_per_step",
    "mean_acceptance_length", "drafted_per_position", "accepted_per_position", "acceptance_rate_per_position",
)  # fmt: skip
"""What `to_dict` contains."""


@dataclass
class RowStep:
    """One row in one verification step: draft nodes, the depth they reached, tokens accepted and emitted."""

    drafted: int
    depth: int
    accepted: int
    emitted: int


@dataclass(slots=True)
class StepRecord:
    """One decoding step: its outcome, and the forward passes that its latency depends on.

    Args:
        requested: `[rows]` maximum draft depth of each row, after it was cut to what the row can use.
        rows: `[rows]` drafted, accepted and emitted tokens; None for a row that took no part.
        tokens_per_row: tokens of each row in the target's forward pass: the pending token, the largest draft, padding.
        seconds: wall time by part: "draft", "forward", "verify"; "thread": that in which the thread ran in "forward".
        drafter_passes: `tokens_per_pass` as the session reports them, without the prefill. None if unknown: then one
            pass with one token per row is assumed for each level of the deepest draft.
        context: tokens in the longest row, prompt included.
        computed_rows: rows of the target's pass, those that took no part included; 0: those that took part.
        excluded_time_loss: see `DraftSession.excluded_time_loss`.
    """

    requested: Sequence[int]
    rows: Sequence[RowStep | None]
    tokens_per_row: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    drafter_passes: Sequence[int] | None = None
    context: int = 1
    computed_rows: int = 0
    excluded_time_loss: float = 0.0

    @property
    def batch(self) -> int:
        """Number of rows that took part."""
        return sum(row is not None for row in self.rows)

    @property
    def pass_rows(self) -> int:
        """Rows of the target's pass."""
        return max(self.batch, self.computed_rows)

    @property
    def depth(self) -> int:
        """Depth of the deepest draft."""
        return max((row.depth for row in self.rows if row is not None), default=0)

    @property
    def tokens_per_pass(self) -> Sequence[int]:
        """Tokens in each forward pass of the drafter; empty if no draft was requested."""
        if not self.has_draft:
            return ()
        return [self.batch] * self.depth if self.drafter_passes is None else self.drafter_passes

    @property
    def has_draft(self) -> bool:
        """Whether a draft was requested; it may be empty."""
        return any(self.requested)


class Counts(ABC):
    """Figures derived from the steps of rows."""

    @abstractmethod
    def _counted(self) -> Iterable[tuple[RowStep, int]]:
        """The steps, each with how often it occurred."""

    @abstractmethod
    def summary(self) -> str:
        """The main figures in a few lines of text."""

    def _sum(self, value: Callable[[RowStep], int]) -> int:
        return sum(value(step) * count for step, count in self._counted())

    @property
    def steps(self) -> int:
        """Verifications, summed over rows."""
        return self._sum(lambda step: 1)

    @property
    def drafts(self) -> int:
        """Steps with a draft."""
        return self._sum(lambda step: step.drafted > 0)

    @property
    def drafted(self) -> int:
        """Draft tokens (tree nodes) that the target verified."""
        return self._sum(lambda step: step.drafted)

    @property
    def accepted(self) -> int:
        """Draft tokens that are part of the output."""
        return self._sum(lambda step: step.accepted)

    @property
    def emitted_in_steps(self) -> int:
        """Tokens in the output without the first ones, which the prefill gives."""
        return self._sum(lambda step: step.emitted)

    @property
    def drafted_per_position(self) -> list[int]:
        """How many drafts reached position 1, 2, …"""
        deepest = max((step.depth for step, _ in self._counted()), default=0)
        return [self._sum(lambda step, at=at: step.depth >= at) for at in range(1, deepest + 1)]  # type: ignore[misc]

    @property
    def accepted_per_position(self) -> list[int]:
        """How many drafts had position 1, 2, … accepted."""
        positions = range(1, len(self.drafted_per_position) + 1)
        return [self._sum(lambda step, at=at: step.accepted >= at) for at in positions]  # type: ignore[misc]

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """For each position, the fraction of the drafts reaching it in which it was accepted."""
        return [_ratio(a, d) for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def tokens_per_step(self) -> float:
        """Mean accepted length over all steps, the bonus token included (Spec-Bench's definition)."""
        return _ratio(self.emitted_in_steps, self.steps)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: only steps with a draft (vLLM's definition)."""
        return 1 + _ratio(self.accepted, self.drafts)

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        return {name: getattr(self, name) for name in COUNTS}


@dataclass
class Statistics(Counts):
    """The statistics of one `generate` call.

    A *step* of a row is one verification (a forward pass of the target) in which the row took part; a *draft* is a step
    in which at least one token was proposed for it. Tokens cut off by a stop do not count as accepted.

    Args:
        rows: the steps of each row, in order.
        lengths: generated tokens of each row in the output, including the first token, from the prefill.
        seconds: wall time in `prefill`, `draft`, `forward`, `verify`, `policy` (choosing draft depths), `total`.
        batch_steps: the steps of the batch, in order, with their forward passes.
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
    batch_steps: list[StepRecord] = field(default_factory=list)
    strategy: str = ""

    def _counted(self) -> Iterable[tuple[RowStep, int]]:
        return ((step, 1) for row in self.rows for step in row)

    @property
    def emitted(self) -> int:
        """Tokens in the output, over all rows."""
        return sum(self.lengths)

    def record(self, tree: DraftTree, result: VerificationResult) -> list[RowStep | None]:
        """Count one verification; returns the outcome of each row, None for a row that took no part."""
        steps: list[RowStep | None] = [None] * len(self.rows)
        for row, path in enumerate(result.paths):
            parents = tree.parents[row]
            if path is not None:
                depth = max(depths(parents), default=0)
                step = RowStep(len(parents), depth, result.accepted[row], len(result.tokens[row]))
                self.rows[row].append(step)
                steps[row] = step
        return steps

    def finish(self, lengths: Sequence[int]) -> None:
        """Set the number of generated tokens of each row, and remove tokens beyond it from the counts."""
        self.lengths = list(lengths)
        for steps, length in zip(self.rows, lengths, strict=True):
            remaining = length - 1  # the prefill gives the first token
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
        batch_steps = self.batch_steps + other.batch_steps
        return Statistics(self.rows + other.rows, self.lengths + other.lengths, seconds, batch_steps, self.strategy)

    def row(self, index: int) -> Statistics:
        """The statistics of one row alone; times and forward passes are those of the whole batch."""
        return replace(self, rows=[self.rows[index]], lengths=[self.lengths[index]])

    def origins(self, row: int = 0) -> list[bool]:
        """For each generated token of a row, whether it is an accepted draft token."""
        marks = [False] * (self.lengths[row] - sum(step.emitted for step in self.rows[row]))
        for step in self.rows[row]:
            marks += [True] * step.accepted + [False] * (step.emitted - step.accepted)
        return marks

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        result = super().to_dict() | {"seconds": dict(self.seconds)}
        if len(self.rows) > 1:
            result["rows"] = [self.row(index).to_dict() for index in range(len(self.rows))]
        return result

    def summary(self) -> str:
        """The main figures in a few lines of text."""
        times = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in self.seconds.items())
        positions = " ".join(f"{rate:.2f}" for rate in self.acceptance_rate_per_position)
        lines = [
            self.strategy,
            f"{self.emitted} tokens, {self.steps} verification steps: {self.tokens_per_step:.2f} tokens per step",
            f"drafted {self.drafted}, accepted {self.accepted} ({self.acceptance_rate:.0%}); "
            f"mean acceptance length {self.mean_acceptance_length:.2f} over {self.drafts} drafts",
            f"acceptance by position: {positions or '(nothing was drafted)'}",
            times and f"time: {times}",
        ]
        return "\n".join(filter(None, lines))


@dataclass
class CallTotals(Counts):
    """Sums over the `generate` calls of a model that a strategy is attached to; see `hf_specgen.attach`.

    Args:
        calls: calls that speculated.
        plain_calls: calls that fell back to plain generation, by reason.
        emitted: tokens in the output, over all rows.
        seconds: wall time of the calls.
    """

    calls: int = 0
    plain_calls: Counter[str] = field(default_factory=Counter)
    emitted: int = 0
    seconds: float = 0.0
    _steps: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    """How often each `RowStep` occurred, by its fields."""

    def _counted(self) -> Iterable[tuple[RowStep, int]]:
        return ((RowStep(*step), count) for step, count in self._steps.items())

    def add(self, call: Statistics) -> None:
        """Add a call that speculated."""
        self.calls += 1
        self.emitted += call.emitted
        self.seconds += call.seconds.get("total", 0.0)
        self._steps.update(astuple(step) for row in call.rows for step in row)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        totals = {"calls": self.calls, "plain_calls": dict(self.plain_calls), "seconds": self.seconds}
        return totals | super().to_dict()

    def summary(self) -> str:
        """The main figures in a few lines of text."""
        lines = [
            f"{_calls(self.calls)}, {self.emitted} tokens in {self.seconds:.2f} s, "
            f"{self.tokens_per_step:.2f} tokens per step",
            f"drafted {self.drafted}, accepted {self.accepted} ({self.acceptance_rate:.0%})",
        ]
        lines += [f"{_calls(count)} without speculation: {reason}" for reason, count in self.plain_calls.items()]
        return "\n".join(lines)


def _ratio(count: float, total: float) -> float:
    return count / total if total else 0.0


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"
