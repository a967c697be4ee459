"""Measures how often the target generates the tokens of Medusa heads, by rank: this determines the best draft tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.medusa import MedusaCandidates, MedusaSession
from hf_specgen.heads.medusa import CONFIDENCE_EDGES, RANKS, Acceptance, MedusaHeads, confidence_bin
from hf_specgen.tree import DraftTree


@dataclass
class Counts:
    """How often the target generated the tokens of each Medusa head, by confidence and rank.

    Head h is counted only in steps in which every head before it had the generated token among its first `RANKS`:
    otherwise the token of head h could not have been accepted.
    """

    heads: int
    hits: torch.Tensor = field(init=False)  # [heads, bins, ranks]
    seen: torch.Tensor = field(init=False)  # [heads, bins]

    def __post_init__(self) -> None:
        bins = len(CONFIDENCE_EDGES) + 1
        self.hits, self.seen = torch.zeros(self.heads, bins, RANKS), torch.zeros(self.heads, bins)

    def add(self, proposals: list[list[int]], confidences: list[float], generated: list[int]) -> None:
        """Count one step: the tokens of each head, most likely first, and the generated tokens."""
        for head, (tokens, confidence, token) in enumerate(zip(proposals, confidences, generated, strict=False)):
            bin_ = confidence_bin(confidence)
            self.seen[head, bin_] += 1
            if token not in tokens[:RANKS]:
                return
            self.hits[head, bin_, tokens.index(token)] += 1

    def acceptance(self) -> Acceptance:
        """Acceptance rates, shrunk towards those of heads without measurements, which weigh as much as 10 steps."""
        prior = torch.tensor(Acceptance.untuned(self.heads).table)
        shares = (self.hits + 10.0 * prior) / (self.seen.unsqueeze(-1) + 10.0)
        return Acceptance.from_lists(shares.sort(dim=-1, descending=True).values.tolist())

    def by_rank(self) -> torch.Tensor:
        """`[heads, ranks]` acceptance rates over all confidences."""
        return self.hits.sum(dim=1) / self.seen.sum(dim=1).clamp(min=1).unsqueeze(-1)


class _Recording(MedusaCandidates):
    """Medusa heads whose draft tokens, by rank, are compared with the generated tokens at the end of each call."""

    def __init__(self, heads: MedusaHeads, counts: Counts, lora: Any):
        super().__init__(heads, tree=16, lora=lora)
        self._counts = counts

    def start(self, call: DraftCall) -> DraftSession:
        return _RecordingSession(call, cast(MedusaSession, super().start(call)), self._counts)


class _RecordingSession(DraftSession):
    def __init__(self, call: DraftCall, session: MedusaSession, counts: Counts):
        super().__init__(call)
        self._session, self._counts = session, counts
        self._steps: list[tuple[int, int, list[list[int]], list[float]]] = []

    def draft(self, budget: Sequence[int]) -> DraftTree:
        if max(budget):
            _, tokens, confidences = self._session.ranked_tokens(self._session.depth_logits(max(budget)))
            for row, depth in enumerate(budget):
                if depth:
                    known = len(self.call.state.generated[row])
                    self._steps.append((row, known, tokens[row].tolist(), confidences[row, :, 0].tolist()))
        return self._session.draft(budget)

    def end(self) -> None:
        for row, known, tokens, confidences in self._steps:
            self._counts.add(tokens, confidences, self.call.state.generated[row][known:])


def measure_acceptance(
    model: PreTrainedModel, heads: MedusaHeads, calls: Iterable[dict[str, Any]], lora: Any = None, seed: int = 0
) -> Counts:
    """Generate, and count how often the target generates the tokens of Medusa heads."""
    if heads.config.reads_path:
        raise ValueError("heads that read the path learn their acceptance while they draft")
    counts = Counts(heads.config.num_heads)
    recording = _Recording(heads, counts, lora)
    for number, arguments in enumerate(calls):
        torch.manual_seed(seed + number)
        cast(Any, model).generate(**arguments, candidate_generator=recording)
    return counts


def save_acceptance(heads: MedusaHeads, counts: Counts) -> None:
    """Store acceptance rates in the heads' config; `save_pretrained` writes them."""
    heads.config.acceptance = [[list(ranks) for ranks in bins] for bins in counts.acceptance().table]
