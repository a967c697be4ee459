"""Measures what Medusa heads are worth on a dataset and a machine, so that the best tree can be chosen.

Real generations, with the decoding settings of each domain: what the heads guessed at each step is compared with the
text that came. Head h counts where the right token was among the first guesses of every head before it: elsewhere its
guess could not have been accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.base import DraftSession
from hf_specgen.candidates.medusa import MedusaCandidates, MedusaSession
from hf_specgen.depth import CostCurve
from hf_specgen.evaluation.cost import measure_cost_curve
from hf_specgen.heads.acceptance import CONFIDENCE_EDGES, RANKS, Acceptance, confidence_bin
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.state import Call
from hf_specgen.tree import DraftTree

QUERIES = (1, 2, 4, 8, 16, 32, 64)
PRIOR_WEIGHT = 10.0
PROBE_NODES = 16


@dataclass
class Counts:
    """How often guesses were right.

    Args:
        heads: how many there are.

    Example:
        >>> counts = Counts(heads=1)
        >>> counts.add([[7, 8]], [0.9], [8])  # head 0 guessed 7, then 8; 8 it was
        >>> int(counts.seen[0, confidence_bin(0.9)]), counts.hits[0, confidence_bin(0.9), 1].item()
        (1, 1.0)
    """

    heads: int
    hits: torch.Tensor = field(init=False)  # [heads, bins, ranks]
    seen: torch.Tensor = field(init=False)  # [heads, bins]

    def __post_init__(self) -> None:
        bins = len(CONFIDENCE_EDGES) + 1
        self.hits, self.seen = torch.zeros(self.heads, bins, RANKS), torch.zeros(self.heads, bins)

    def add(self, guesses: list[list[int]], confidences: list[float], truth: list[int]) -> None:
        """Count one step: the guesses of each head, best first, and the tokens that came."""
        for head, (tokens, confidence, token) in enumerate(zip(guesses, confidences, truth, strict=False)):
            bin_ = confidence_bin(confidence)
            self.seen[head, bin_] += 1
            if token not in tokens[:RANKS]:
                return
            self.hits[head, bin_, tokens.index(token)] += 1

    def acceptance(self) -> Acceptance:
        """Shares, drawn towards what is assumed of unmeasured heads where little was seen."""
        prior = torch.tensor(Acceptance.untuned(self.heads).table)
        shares = (self.hits + PRIOR_WEIGHT * prior) / (self.seen.unsqueeze(-1) + PRIOR_WEIGHT)
        return Acceptance.from_lists(shares.sort(dim=-1, descending=True).values.tolist())

    def by_rank(self) -> torch.Tensor:
        """`[heads, ranks]` over all confidences."""
        return self.hits.sum(dim=1) / self.seen.sum(dim=1).clamp(min=1).unsqueeze(-1)


class _Recording(MedusaCandidates):
    """Counts which of its draft tokens were generated."""

    def __init__(self, heads: MedusaHeads, counts: Counts, lora: Any):
        super().__init__(heads, tree=PROBE_NODES, lora=lora)
        self._counts = counts

    def start(self, call: Call) -> DraftSession:
        return _RecordingSession(call, cast(MedusaSession, super().start(call)), self._counts)


class _RecordingSession(DraftSession):
    def __init__(self, call: Call, session: MedusaSession, counts: Counts):
        super().__init__(call)
        self._session, self._counts = session, counts
        self._steps: list[tuple[int, int, list[list[int]], list[float]]] = []

    def draft(self, budget: Sequence[int]) -> DraftTree:
        if max(budget):
            _, tokens, confidences = self._session.head_tokens()
            for row, depth in enumerate(budget):
                if depth:
                    known = len(self.call.state.generated[row])
                    self._steps.append((row, known, tokens[row].tolist(), confidences[row]))
        return self._session.draft(budget)

    def end(self) -> None:
        for row, known, tokens, confidences in self._steps:
            self._counts.add(tokens, confidences, self.call.state.generated[row][known:])


def measure_acceptance(
    model: PreTrainedModel,
    heads: MedusaHeads,
    calls: Iterable[dict[str, Any]],
    lora: Any = None,
    seed: int = 0,
) -> Counts:
    """Generate, and count.

    Args:
        model: the target.
        heads: its heads.
        calls: arguments of `generate` for each call: inputs, decoding settings, `max_new_tokens`.
        lora: the `PeftModel` of the heads' deltas, for heads that were loaded by hand.
        seed: of the first call; the next has the next.
    """
    counts = Counts(heads.config.num_heads)
    recording = _Recording(heads, counts, lora)
    for number, arguments in enumerate(calls):
        torch.manual_seed(seed + number)
        cast(Any, model).generate(**arguments, candidate_generator=recording)
    return counts


def save_tuning(heads: MedusaHeads, counts: Counts, cost: CostCurve) -> None:
    """Put what was measured into the heads' config; `save_pretrained` then writes it."""
    heads.config.acceptance = [[list(ranks) for ranks in bins] for bins in counts.acceptance().table]
    heads.config.cost = asdict(cost)


def measure_cost(model: PreTrainedModel, context: int = 256) -> CostCurve:
    """T(q) as far as trees reach."""
    return measure_cost_curve(model, QUERIES, context=context)
