"""A strategy that is always wrong: what speculation costs where it can bring nothing."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_specgen import Candidates, DraftTree, Policy
from hf_specgen.candidates import DraftContext, Drafter
from hf_specgen.candidates.base import Depth


class WrongCandidates(Candidates):
    """Guesses k times a token that the target never writes.

    Args:
        k: length of every draft, or "auto".
        policy: how much of k is used.
        token: that is guessed; 0 is the padding of the embedded model.
    """

    negligible_draft_cost = True

    def __init__(self, k: Depth = "auto", *, policy: Policy | None = None, token: int = 0):
        self._set_depth(k, policy, greatest=16)
        self.token = token

    def bind(self, context: DraftContext, model: PreTrainedModel | None) -> Drafter:
        return _WrongDrafter(self.k, self.token)

    def __repr__(self) -> str:
        return f"WrongCandidates(k={self.k}{self._show_policy()})"


class _WrongDrafter(Drafter):
    def __init__(self, k: int, token: int):
        self._k, self._token = k, token

    def draft(self, context: DraftContext) -> DraftTree:
        return DraftTree.chains([[self._token] * min(self._k, budget) for budget in context.budget])
