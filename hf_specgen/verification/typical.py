"""Typical acceptance: LOSSY. Accepts draft tokens whose target probability exceeds an entropy-dependent threshold.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024),
section 2.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree, Parents, children
from hf_specgen.verification.base import (
    IndependentDraftSession,
    VerificationSession,
    Verifier,
    argmax,
    exponential,
    exponential_race,
)


class TypicalVerifier(Verifier):
    """LOSSY: accepts a draft token with p > min(epsilon, alpha * exp(-entropy(p))); the output distribution differs.

    Of several such siblings, the one with the longest accepted path below it is chosen. The most likely token is always
    accepted. The bonus token is the argmax in greedy decoding, otherwise sampled from p.

    Args:
        epsilon: a draft token with more than this probability is always accepted.
        alpha: scales the threshold where the target's distribution has high entropy.
    """

    def __init__(self, epsilon: float = 0.3, alpha: float = 0.09):
        for name, value in (("epsilon", epsilon), ("alpha", alpha)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
        self.epsilon, self.alpha = epsilon, alpha

    def start(self, call: Call) -> VerificationSession:
        return _TypicalSession(self, call)

    def threshold(self, p: torch.Tensor) -> torch.Tensor:
        """`[…, vocab]` to `[…]`: the probability above which a draft token is accepted."""
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(dim=-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.epsilon)


class _TypicalSession(IndependentDraftSession):
    def __init__(self, settings: TypicalVerifier, call: Call):
        super().__init__(call)
        self._settings = settings

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        p = scores.softmax(dim=-1)
        own = exponential_race(p, exponential(p.shape, p.device)) if self.call.do_sample else argmax(scores)
        tokens = tree.token_lists()
        drafted = [
            (row, slot, node)
            for row, (parents, slots) in enumerate(zip(tree.parents, nodes, strict=True))
            for slot, parent in enumerate(slots)
            if parent < len(parents)
            for node in children(parents)[parent + 1]
        ]
        places = [(row, slot, tokens[row][node]) for row, slot, node in drafted]
        rows, at, token = torch.tensor(places, dtype=torch.long, device=p.device).view(-1, 3).unbind(dim=1)
        plausible = ((p[rows, at, token] > self._settings.threshold(p)[rows, at]) & (token >= 0)).tolist()
        # Nodes of slots that are decided in a later call count as accepted.
        accepted = [[True] * len(parents) for parents in tree.parents]
        for (row, _, node), is_plausible in zip(drafted, plausible, strict=True):
            accepted[row][node] = is_plausible
        lengths = [_accepted_lengths(*row) for row in zip(tree.parents, accepted, strict=True)]
        chosen, longest = own.tolist(), [[0] * len(slots) for slots in nodes]
        for row, slot, node in drafted:
            if lengths[row][node] > longest[row][slot]:
                longest[row][slot], chosen[row][slot] = lengths[row][node], tokens[row][node]
        return torch.tensor(chosen)


def _accepted_lengths(parents: Parents, accepted: Sequence[bool]) -> list[int]:
    """The most nodes of an accepted path that begins with each node; 0 if it is not accepted."""
    lengths = [0] * len(parents)
    for node in reversed(range(len(parents))):
        lengths[node] = lengths[node] + 1 if accepted[node] else 0
        if parents[node] >= 0:
            lengths[parents[node]] = max(lengths[parents[node]], lengths[node])
    return lengths
