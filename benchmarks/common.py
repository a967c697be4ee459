"""What the sections of the benchmark share: the variants, the size of the wide target, how spread is reported."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from hf_specgen import NgramCandidates
from hf_specgen.evaluation.measure import Variant

Rows = list[dict[str, Any]]
WIDE = 300_000_000


def ours(**settings: Any) -> dict[str, Any]:
    """The arguments of our side."""
    return {"candidate_generator": NgramCandidates(**settings)}


PLAIN = Variant("plain", dict)
PEERS = [
    Variant("lookup n=2", lambda: {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}, batched=False),
    Variant("lookup n=3", lambda: {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}, batched=False),
]
OURS = Variant("ours k=16", partial(ours, k=16))


def spread(values: list[float], name: str) -> dict[str, float]:
    """The median under `name`, with the lowest and the highest beside it."""
    return {name: median(values), "lowest": min(values), "highest": max(values)}
