"""Statistics from counts by step, which all metrics receive."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen import Statistics
from hf_specgen.counters import RowStep


def statistics_of_steps(
    drafted: Sequence[int],
    accepted: Sequence[int],
    *,
    emitted: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
) -> Statistics:
    """Statistics from counts by step.

    Args:
        drafted: draft tokens of each step.
        accepted: how many of them were accepted.
        emitted: tokens that each step added to the output; accepted + 1 if left out.
        depths: depth of each draft; `drafted` if left out, as for chains.

    Raises:
        ValueError: if the lists differ in length, or a step accepts more tokens than the depth of its draft.
    """
    emitted = [count + 1 for count in accepted] if emitted is None else emitted
    depths = drafted if depths is None else depths
    columns = (drafted, depths, accepted, emitted)
    if len({len(column) for column in columns}) != 1:
        raise ValueError(
            "drafted, depths, accepted and emitted need one number per step, "
            f"got lists of lengths {[len(column) for column in columns]}"
        )
    steps = [RowStep(*map(int, step)) for step in zip(*columns, strict=True)]
    for step in steps:
        if not 0 <= step.accepted <= step.depth <= step.drafted:
            raise ValueError(f"need 0 <= accepted <= depth <= drafted, got {step}")
    return Statistics([steps], [1 + sum(step.emitted for step in steps)])
