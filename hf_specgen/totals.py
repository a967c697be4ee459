"""Counters of many speculative calls of one model, in constant memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from hf_specgen.counters import Statistics


@dataclass
class CallTotals:
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

    Example:
        >>> totals = CallTotals()
        >>> totals.add(Statistics.of_steps([3, 3], [3, 1]))
        >>> totals.calls, totals.drafted, totals.accepted, totals.tokens_per_step
        (1, 6, 4, 3.0)
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
        self.steps += call.steps
        self.drafts += call.drafts
        self.drafted += call.drafted
        self.accepted += call.accepted
        self.emitted += call.emitted
        self.emitted_in_steps += sum(step.emitted for row in call.rows for step in row)
        self.drafted_per_position = _sums(self.drafted_per_position, call.drafted_per_position)
        self.accepted_per_position = _sums(self.accepted_per_position, call.accepted_per_position)
        self.seconds += call.seconds.get("total", 0.0)

    def add_plain(self, reason: str) -> None:
        """Count a call that fell back to plain generation."""
        self.plain_calls[reason] = self.plain_calls.get(reason, 0) + 1

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean accepted length over all steps, the bonus token included (Spec-Bench's definition)."""
        return self.emitted_in_steps / self.steps if self.steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: only steps with a draft (vLLM's definition)."""
        return 1 + (self.accepted / self.drafts if self.drafts else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        rates = ("acceptance_rate", "tokens_per_step", "mean_acceptance_length")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}

    def summary(self) -> str:
        """The main counters in a few lines of text."""
        lines = [
            f"{_calls(self.calls)}, {self.emitted} tokens in {self.seconds:.2f} s, "
            f"{self.tokens_per_step:.2f} tokens per step",
            f"drafted {self.drafted}, accepted {self.accepted} ({self.acceptance_rate:.0%})",
        ]
        lines += [f"{_calls(count)} without speculation: {reason}" for reason, count in self.plain_calls.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


def _sums(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
