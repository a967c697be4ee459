"""Several strategies, of which the one that brings most drafts, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hf_specgen.adaptive.chooser import Chooser
from hf_specgen.adaptive.controller import Controller
from hf_specgen.candidates.base import Candidates, DraftContext, Drafter
from hf_specgen.tree import DraftTree

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

    from hf_specgen.target.base import Target
    from hf_specgen.verification import VerificationResult


class AutoCandidates(Candidates):
    """Chooses among strategies, step by step: n-grams where the text repeats itself, a network elsewhere, or nothing.

    Each strategy keeps a `Controller` of its own, so that its own estimates say what it may draft; what it was given as
    k is its limit. In a batch one strategy drafts for all rows in a step. With another policy (`generate(policy=…)`)
    the strategies are asked in their order, and the first draft is taken.

    Args:
        strategies: at least one; those that cost next to nothing (n-grams) are asked first wherever they stand.

    Raises:
        ValueError: if there are none, or two of them divide the target, each in its own way.
        TypeError: if one of them is no strategy.

    Example:
        >>> from hf_specgen import NgramCandidates
        >>> AutoCandidates([NgramCandidates(k=16)])
        AutoCandidates([NgramCandidates(k=16, min_ngram=1, max_ngram=8, branches=1, history=None)])
    """

    def __init__(self, strategies: Sequence[Candidates]):
        if not strategies:
            raise ValueError("AutoCandidates needs at least one strategy, such as NgramCandidates()")
        for strategy in strategies:
            if not isinstance(strategy, Candidates):
                raise TypeError(f"AutoCandidates takes strategies such as NgramCandidates(), got {strategy!r}")
        self.strategies = list(strategies)
        self._own_target = [s for s in strategies if type(s).make_target is not Candidates.make_target]
        if len(self._own_target) > 1:
            names = " and ".join(map(repr, self._own_target))
            raise ValueError(f"{names} each run the target in a way of their own; keep one of them")
        self.k = max(strategy.k for strategy in strategies)
        self.policy = Chooser(
            [
                (
                    repr(s),
                    s.k,
                    s.negligible_draft_cost,
                    s.adaptive_tree,
                    s.policy if isinstance(s.policy, Controller) else Controller(),
                )
                for s in self.strategies
            ]
        )

    def make_target(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> Target:
        chosen = self._own_target[0].make_target if self._own_target else super().make_target
        return chosen(model, input_ids, generation_config, model_kwargs)

    def bind(self, context: DraftContext, model: PreTrainedModel | None) -> Drafter:
        return _AutoDrafter([strategy.bind(context, model) for strategy in self.strategies], context.policy)

    def __repr__(self) -> str:
        return f"AutoCandidates({self.strategies})"


class _AutoDrafter(Drafter):
    def __init__(self, drafters: list[Drafter], policy: Any):
        self._drafters = drafters
        self._chooser = policy if isinstance(policy, Chooser) else None

    def draft(self, context: DraftContext) -> DraftTree:
        return self._first_taken(context, [drafter.draft for drafter in self._drafters])

    def open(self, context: DraftContext) -> DraftTree:
        return self._first_taken(context, [drafter.open for drafter in self._drafters])

    def _first_taken(self, context: DraftContext, drafts: Sequence[Callable[[DraftContext], DraftTree]]) -> DraftTree:
        """The first draft that is taken. Every strategy is called, those that are not asked with a budget of zero."""
        chooser, budget = self._chooser, context.budget
        order = range(len(drafts)) if chooser is None else chooser.asked()
        taken: DraftTree | None = None
        asked = set()
        for index in order:
            if taken is not None:
                break
            asked.add(index)
            if chooser is not None:
                context.budget = list(map(min, budget, chooser.arms[index].depths))
            tree = drafts[index](context)
            depths = [max(tree.depths(row)) for row in range(tree.batch)] if tree.nodes else [0] * tree.batch
            if chooser.accepts(index, depths) if chooser is not None else any(depths):
                taken = tree
        context.budget = [0] * len(budget)
        for index, draft in enumerate(drafts):
            if index not in asked:
                draft(context)
        context.budget = budget
        return taken or DraftTree.empty(len(budget))

    def observe(self, verdict: VerificationResult) -> None:
        for drafter in self._drafters:
            drafter.observe(verdict)

    def end(self) -> None:
        for drafter in self._drafters:
            drafter.end()
