"""Counters for Prometheus, under the names that vLLM uses."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter

PREFIX = "spec_decode_num_"


class Counters:
    """Counts drafts, draft tokens and accepted tokens of this process in the default registry.

    Prometheus appends `_total` to each name.
    """

    def __init__(self) -> None:
        self._drafts = Counter(f"{PREFIX}drafts", "Drafts that the target verified.")
        self._drafted = Counter(f"{PREFIX}draft_tokens", "Draft tokens that the target verified.")
        self._accepted = Counter(f"{PREFIX}accepted_tokens", "Draft tokens that were accepted.")
        self._by_position = Counter(
            f"{PREFIX}accepted_tokens_per_pos", "Drafts in which this position was accepted.", ["position"]
        )

    def add(self, drafted: int, accepted: int) -> None:
        """Count one draft of one row."""
        self._drafts.inc()
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        for position in range(accepted):
            self._by_position.labels(position=str(position)).inc()


@lru_cache(maxsize=1)
def counters() -> Counters:
    """The counters of this process: Prometheus registers each name once."""
    return Counters()
