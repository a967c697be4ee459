"""Typical acceptance: LOSSY. Accepts draft tokens whose target probability exceeds an entropy-dependent threshold.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024),
section 2.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree, Parents
from hf_specgen.verification.base import VerificationSession, Verifier
from hf_specgen.verification.sampling import (
    DraftSampler,
    argmax,
    child_table,
    exponential,
    exponential_race,
    tokens_of,
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


class _TypicalSession(VerificationSession):
    def __init__(self, settings: TypicalVerifier, call: Call):
        super().__init__(call)
        self._settings = settings
        self._drafts = DraftSampler() if call.do_sample else None

    def draft_weights(self, scores: torch.Tensor, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """In descending order, a sample without replacement from `softmax(scores)`."""
        return self._drafts.weights(scores) if self._drafts else super().draft_weights(scores, steps)

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        p = scores.softmax(dim=-1)
        own = exponential_race(p, exponential(p.shape, p.device)) if self.call.do_sample else argmax(scores)
        table = child_table(tree, nodes, p.device)
        tokens = tokens_of(tree, table)
        plausible = p.gather(-1, tokens.clamp(min=0)) > self._settings.threshold(p).unsqueeze(-1)
        accepted = torch.where(plausible, tokens, -1)  # [batch, slots, siblings]
        decided = torch.cat([own.unsqueeze(-1), table, accepted], dim=-1).tolist()  # the one host synchronisation
        rows = zip(tree.parents, decided, strict=True)
        return torch.tensor([_deepest(parents, slots, siblings=table.shape[2]) for parents, slots in rows])


def _deepest(parents: Parents, slots: list[list[int]], siblings: int) -> list[int]:
    """The token chosen at each slot of a row: the child with the longest accepted path, else the target's own."""
    is_accepted = [True] * len(parents)  # nodes of slots that are decided in a later call count as accepted
    for _, *children in slots:
        for child, token in zip(children[:siblings], children[siblings:], strict=True):
            if child >= 0:
                is_accepted[child] = token >= 0
    reach = [0] * (len(parents) + 1)  # accepted tokens below the row's last token, then below each node
    for node in reversed(range(len(parents))):
        if is_accepted[node]:
            reach[parents[node] + 1] = max(reach[parents[node] + 1], 1 + reach[node + 1])
    chosen = []
    for own, *children in slots:
        siblings_accepted = [
            (child, token) for child, token in zip(children, children[siblings:], strict=False) if token >= 0
        ]
        chosen.append(max(siblings_accepted, key=lambda pair: reach[pair[0] + 1])[1] if siblings_accepted else own)
    return chosen
