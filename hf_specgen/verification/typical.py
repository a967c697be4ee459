"""Typical acceptance: LOSSY. A guess stands if the target finds it plausible, whatever the target would have written.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024),
section 2.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.state import GenerationState
from hf_specgen.tree import DraftTree, Parents
from hf_specgen.verification.base import Verifier
from hf_specgen.verification.processors import LogitsPipeline
from hf_specgen.verification.sampling import DraftSampler, exponential, exponential_race
from hf_specgen.verification.siblings import child_table, tokens_of


class TypicalVerifier(Verifier):
    """LOSSY: accepts a guess with p > min(epsilon, alpha * exp(-entropy(p))); the text is not the target's own.

    Of several such guesses, the one that leads deepest into the draft is taken. The target's favourite is always
    accepted. After the last guess follows a token of the target's own: its favourite when greedy, else drawn from p.

    Args:
        epsilon: a guess with more than this probability is always accepted.
        alpha: scales the threshold where the target itself is unsure.

    Raises:
        ValueError: for a parameter outside (0, 1].

    Example:
        >>> from hf_specgen.verification import TypicalVerifier
        >>> mode = TypicalVerifier(epsilon=0.1)  # model.generate(..., candidate_generator=…, verification=mode)
    """

    def __init__(self, epsilon: float = 0.3, alpha: float = 0.09):
        for name, value in (("epsilon", epsilon), ("alpha", alpha)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
        self.epsilon, self.alpha = epsilon, alpha

    def begin(self, scorer: LogitsPipeline, sequences: GenerationState, do_sample: bool, keep_scores: bool) -> None:
        super().begin(scorer, sequences, do_sample, keep_scores)
        self._drafts = DraftSampler() if do_sample else None

    def draft_weights(self, scores: torch.Tensor, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """A race of the draft's own: its winner is drawn from `softmax(scores)`."""
        return self._drafts.weights(scores) if self._drafts else super().draft_weights(scores, steps)

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        p = scores.softmax(dim=-1)
        own = exponential_race(p, exponential(p.shape, p.device)) if self.do_sample else scores.argmax(dim=-1)
        table = child_table(tree, nodes, p.device)
        tokens = tokens_of(tree, table)
        plausible = p.gather(-1, tokens.clamp(min=0)) > self.threshold(p).unsqueeze(-1)
        accepted = torch.where(plausible, tokens, -1)  # [batch, slots, siblings]
        chosen = []
        decided = torch.cat([own.unsqueeze(-1), table, accepted], dim=-1).tolist()  # the one wait for the device
        for parents, slots in zip(tree.parents, decided, strict=True):
            chosen.append(_deepest(parents, slots, siblings=table.shape[2]))
        return torch.tensor(chosen)

    def threshold(self, p: torch.Tensor) -> torch.Tensor:
        """`[…, vocab]` to `[…]`: the probability above which a guess stands."""
        entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(dim=-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.epsilon)


def _deepest(parents: Parents, slots: list[list[int]], siblings: int) -> list[int]:
    """The token of each slot of a row: the accepted child with the longest way on, else the target's own.

    Args:
        parents: of the row's nodes.
        slots: for each slot the target's own token, its children, and their tokens where accepted; -1 for none.
        siblings: how many children a slot has room for.
    """
    stands = [True] * len(parents)  # below slots that are decided later, as far as is known
    for _, *children in slots:
        for child, token in zip(children[:siblings], children[siblings:], strict=True):
            if child >= 0:
                stands[child] = token >= 0
    reach = [0] * (len(parents) + 1)  # how far the accepted guesses go on: from the row's end, then from each node
    for node in reversed(range(len(parents))):
        if stands[node]:
            reach[parents[node] + 1] = max(reach[parents[node] + 1], 1 + reach[node + 1])
    chosen = []
    for own, *children in slots:
        guesses = [(child, token) for child, token in zip(children, children[siblings:], strict=False) if token >= 0]
        chosen.append(max(guesses, key=lambda guess: reach[guess[0] + 1])[1] if guesses else own)
    return chosen
