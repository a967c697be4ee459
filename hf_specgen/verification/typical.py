"""Typical acceptance: LOSSY. Accepts draft tokens whose target probability exceeds an entropy-dependent threshold.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024),
section 2.3.1.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import (
    Nodes,
    PathSession,
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


class _TypicalSession(PathSession):
    def __init__(self, settings: TypicalVerifier, call: Call):
        super().__init__(call)
        self._settings = settings

    def accept(self, scores: torch.Tensor, tree: DraftTree, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        p, (depths, ancestors) = scores.softmax(dim=-1), (part.to(scores.device) for part in tree.structure())
        probability = p[torch.arange(len(p), device=p.device)[:, None], nodes.parents, nodes.tokens]
        accepted = (probability > self._settings.threshold(p).gather(1, nodes.parents)) & nodes.are_real
        is_reached = (pad(accepted, (1, 0), value=True)[:, None] | ~ancestors).all(dim=2)
        own = exponential_race(p, exponential(p.shape, p.device)) if self.call.do_sample else argmax(scores)
        return depths.masked_fill(~is_reached, -1).argmax(dim=1), own
