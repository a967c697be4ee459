"""Records of one decoding step: the outcome of each row, and the sizes of the forward passes."""

from __future__ import annotations

from dataclasses import dataclass


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
