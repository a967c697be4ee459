"""Acceptance: maps a drafter's confidence in a token to the probability that the target accepts it, learnt in use.

A confidence is the drafter's probability of the token, or its part of the weights of
`VerificationSession.draft_weights`. Acceptance is counted by rank and confidence; with few counts, the estimate is
shrunk towards the confidence itself. Counts of earlier calls are kept in `hf_specgen.call.memory`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.call import memory
from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.draft_window import warn_of_length
from hf_specgen.candidates.growth import Floats
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, verified_nodes

EDGES = np.concatenate([np.geomspace(0.001, 0.5, 64), 1 - np.geomspace(0.5, 0.002, 48)[1:]])
"""Bounds of the confidence bins, narrower towards 0 and 1: relative errors matter there."""
CENTERS = (np.append(0.0005, EDGES) + np.append(EDGES, 1.0)) / 2
COUNTED = np.searchsorted([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95, 0.985], CENTERS)
"""The number under which each bin is counted: those of similar confidences are counted together."""
MAX_PROBABILITY = 0.999
"""Upper limit of an acceptance probability: keeps every node strictly less likely than its parent."""
RANKS = 4
"""Ranks with bins of their own; later ones share the last."""


class Calibration:
    """Counts of accepted tokens by rank and confidence: `seen` and `accepted`, `[RANKS, counts]`.

    Example:
        >>> calibration = Calibration()
        >>> calibration.acceptance(np.array([[0.5, 0.2]])).round(2).tolist()  # no observations yet
        [[0.5, 0.2]]
        >>> for _ in range(100):
        ...     calibration.observe(np.array([0]), np.array([0.5]), np.array([True]))
        >>> calibration.acceptance(np.array([[0.5, 0.2]])).round(2).tolist()
        [[0.97, 0.03]]
    """

    def __init__(self) -> None:
        self.seen: Floats = np.zeros((RANKS, COUNTED[-1] + 1))
        self.accepted: Floats = np.zeros((RANKS, COUNTED[-1] + 1))

    def acceptance(self, confidence: Floats) -> Floats:
        """`[…, children]` acceptance of siblings, most preferred first: not increasing, with a sum of at most 1."""
        rank = np.minimum(np.arange(confidence.shape[-1]), RANKS - 1)
        index = rank, COUNTED[np.searchsorted(EDGES, confidence)]
        estimate = (self.accepted[index] + 6.0 * confidence) / (self.seen[index] + 6.0)
        estimate = np.minimum.accumulate(estimate, axis=-1)
        before = np.cumsum(estimate, axis=-1) - estimate
        return np.minimum(estimate, np.clip(1.0 - before, 0.0, 1.0))

    def table(self, prior: Floats = CENTERS) -> Floats:
        """`[RANKS, bins]` acceptance by rank and bin of confidence, shrunk towards a prior; lower for later ranks."""
        estimate = (self.accepted[:, COUNTED] + 6.0 * prior) / (self.seen[:, COUNTED] + 6.0)
        return np.minimum(np.minimum.accumulate(estimate, axis=0), MAX_PROBABILITY)

    def observe(self, rank: NDArray[np.integer[Any]], confidence: Floats, accepted: NDArray[np.bool_]) -> None:
        """Count tokens whose parent was accepted; three `[tokens]` arrays."""
        index = np.minimum(rank, RANKS - 1), COUNTED[np.searchsorted(EDGES, confidence)]
        np.add.at(self.seen, index, 1.0)
        np.add.at(self.accepted, index, accepted.astype(float))

    def copy(self) -> Calibration:
        """A copy in which old observations have a limited weight: texts differ from call to call."""
        copied = Calibration()
        scale = np.minimum(1.0, 200.0 / np.maximum(self.seen, 1.0))
        copied.seen, copied.accepted = self.seen * scale, self.accepted * scale
        return copied


class CalibratedSession(DraftSession):
    """Counts how often draft tokens were accepted, by rank and confidence, and remembers it for later calls."""

    def __init__(self, call: DraftCall):
        super().__init__(call)
        self.wants_q = call.verification is not None and call.verification.wants_q
        mode = "rejection" if self.wants_q else "sampled" if call.do_sample else "greedy"
        self._acceptance_key = ("acceptance", call.drafting.key, mode, round(call.temperature, 2))
        self.calibration = memory.recall(call.model if self.remembers else None, self._acceptance_key, Calibration)
        self._tree = DraftTree.empty(call.state.batch)
        # For each row the rank and confidence of its nodes.
        self._features: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._by_length: Counter[tuple[int, bool]] | None = None

    def watch_length(self) -> None:
        """Warn if acceptance falls with the length of the texts: of a drafter that could have a window."""
        model = self.call.model if self.call.remembers else None
        self._by_length = memory.recall(model, ("length", self.call.drafting.key), Counter)

    def not_drafted(self, batch: int) -> DraftTree:
        """An empty draft."""
        self._tree, self._features = DraftTree.empty(batch), []
        return self._tree

    def observe(self, result: VerificationResult) -> None:
        """Count which nodes were accepted, among the children of each row's last token and of its accepted nodes."""
        for row, path in enumerate(result.paths):
            if path is None or not self._features or not self._tree.parents[row]:
                continue
            if self._by_length is not None:
                length = len(self.call.state.prompts[row]) + len(self.call.state.generated[row])
                self._by_length[length.bit_length(), result.accepted[row] > 0] += 1
            outcomes = verified_nodes(self._tree.token_lists()[row], self._tree.parents[row], result.tokens[row])
            accepted = np.array([is_accepted for _, is_accepted in outcomes], dtype=bool)
            rank, confidence = (values[[node for node, _ in outcomes]] for values in self._features[row])
            self.calibration.observe(rank, confidence, accepted)

    def end(self) -> None:
        if self._by_length is not None:
            warn_of_length(self._by_length, self.call.drafting.name)
            if self.call.remembers:
                memory.store(self.call.model, ("length", self.call.drafting.key), self._by_length)
        if self.remembers:
            memory.store(self.call.model, self._acceptance_key, self.calibration)


def confidence_by_rank(largest: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[…]` largest probabilities of distributions to `[…, ranks]` confidences in samples drawn from them.

    In rejection sampling a node must not be left out because of its token, only because of its rank: otherwise the
    sampled tokens would not have the distribution q.
    """
    rest = 1 - largest.clamp(max=0.95)
    return largest[..., None] * rest[..., None] ** torch.arange(ranks, device=largest.device)
