"""Drafting with a pass of a drafter for each level: chains, and trees whose most likely nodes are expanded.

Each pass of the drafter runs on the most likely nodes that were not expanded yet, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.

    take    the text that the drafter has not processed
    read    logits after each row's last token ─► candidates of level 1
    expand  logits after the likeliest of them ─► candidates of level 2, and so on
    commit  the accepted ones of the expanded nodes

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, cast

import torch

from hf_specgen.candidates.captured_levels import Drafted, Proposals, grow_captured
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.drafter import DrafterSession, LevelDrafter, T
from hf_specgen.candidates.growth import Growth
from hf_specgen.candidates.tree_size import Plan, TreeSize, tree_size
from hf_specgen.device_tree import NUMBER, DeviceTree
from hf_specgen.targets.passes import CapturablePasses
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class LevelSession(DrafterSession[LevelDrafter[T]], Generic[T]):
    """The state of one call with a `LevelDrafter`.

    Args:
        confidence_threshold: nodes whose token has a probability below it are not expanded.
        others: as for `DrafterSession`.
    """

    def __init__(
        self,
        batch: DraftBatch,
        drafter: LevelDrafter[T],
        k: int,
        tree: str | int | None,
        *,
        confidence_threshold: float = 0.0,
        watches_length: bool = False,
    ):
        super().__init__(batch, drafter, k, None if batch.verifies_chains_only else tree, watches_length)
        self._threshold = confidence_threshold
        self._qs: list[torch.Tensor] = []  # q after the nodes of each pass of a draft, for rejection sampling
        self._expanded = 0  # nodes of each row that were expanded in the last draft
        self._max_nodes = 0  # of each row of the current draft
        self._is_captured = False  # whether passes of the current draft can run as captured functions

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._qs = []
        self._expanded = 0
        self.passes = []
        text = self.drafter.take([min(self._k, depth) for depth in max_depths])
        if text is None:
            return self.not_drafted(len(max_depths))
        self.passes = list(text.passes)
        size = tree_size(self._size, self.batch, text.depths, self.drafter.single_pass_tokens)
        growth = self._first_level(text, size)
        # Captured functions may go beyond the deepest limit, so that there are few different ones.
        k = self._k if self._is_captured else max(text.depths)
        while (plan := size.next(growth, k)) is not None:
            self._grow(growth, plan)
            size.count(plan)
        self._expanded = growth.expanded
        self._tree = self._best(growth, size)
        return self._tree

    def _first_level(self, text: T, size: TreeSize) -> Growth:
        """A tree with the candidates after each row's last token; with further levels if a captured function ran."""
        logits = None
        captured = self.drafter.capture(text)
        if captured is None:
            logits = self.drafter.read(text)[:, None]
            device = logits.device
        else:
            device = captured.device
        self._is_captured = captured is not None or self.drafter.capture() is not None
        growth = self._new_growth(text.depths, size, device, logits)
        if captured is not None and not self._grow_first(growth, size, captured):
            logits = self.drafter.read(text)[:, None]
        if logits is not None:
            self._add(growth, logits)
        return growth

    def _new_growth(
        self, depths: Sequence[int], size: TreeSize, device: torch.device, logits: torch.Tensor | None
    ) -> Growth:
        """A tree without nodes; sets `_proposals` and `_max_nodes`. `logits` are of level 1, if they are computed."""
        last_tokens = [self.batch.state.last_token(row) for row in range(len(depths))]
        # CUDA stages a temporary tensor before `to` returns; elsewhere it could be freed before it is copied.
        values = torch.tensor([last_tokens, list(depths)]).to(device, non_blocking=device.type == "cuda")
        pending, limits = values[..., None]
        ids = self.drafter.token_ids
        children = min(size.children, self._vocab if ids is None else len(ids))
        if logits is not None:
            children = min(children, logits.shape[-1])
        growth = Growth(depths, children, pending, limits if self._is_captured else None)
        self._max_nodes = size.max_nodes
        self._proposals = Proposals(
            growth.children, self._vocab, self._threshold, self.batch.score_processors, ids, self.wants_q
        )
        return growth

    def _grow(self, growth: Growth, plan: Plan) -> None:
        """Make the passes of a plan, in one captured function if there is one."""
        captured = self.drafter.capture()
        if captured is None or self._grow_captured(growth, plan, captured) is None:
            for _ in range(plan.passes):
                self._add(growth, self.drafter.expand(growth.expand(plan.width)))
        self._count_passes(growth, plan)

    def _grow_first(self, growth: Growth, size: TreeSize, captured: CapturablePasses) -> bool:
        """Process new text and expand the first levels in one captured function; False if nothing was done."""
        plan = size.first(growth, self._k)
        drafted = None if plan is None else self._grow_captured(growth, plan, captured)
        if plan is None or drafted is None:
            return False
        assert captured.store_text is not None
        captured.store_text(drafted.after_text)
        size.count(plan)
        self._count_passes(growth, plan)
        return True

    def _grow_captured(self, growth: Growth, plan: Plan, captured: CapturablePasses) -> Drafted | None:
        """Make the passes of a plan, after a pass over new text if `captured` has any, by one captured function.

        None, and nothing is done, if they cannot be captured or are not captured yet.
        """
        if not self.batch.shares_noise or self._proposals.processors.reads_scores:
            return None
        first = [len(text) + growth.levels for text in self.batch.state.generated]
        # The index of the generated token that each pass proposes: first, if there is new text, the pass over it.
        steps = [list(range(start, start + (captured.text is not None) + plan.passes)) for start in first]
        noise = self.batch.draft_noise(steps, growth.device)
        drafted = grow_captured(growth, *plan, self._max_nodes, captured, self._proposals, noise)
        if drafted is not None:
            captured.store_levels(drafted.states, growth.expanded)
        return drafted

    def _count_passes(self, growth: Growth, plan: Plan) -> None:
        """Count passes over nodes, unless deeper levels need no pass, see `LevelDrafter.single_pass_tokens`."""
        if not self.drafter.single_pass_tokens:
            self.passes = [*self.passes, *[growth.rows * plan.width] * plan.passes]

    def _add(self, growth: Growth, logits: torch.Tensor) -> None:
        """Add the most likely tokens after each node of a pass; `logits` are `[batch, nodes, draft vocab]`."""
        scores = self._proposals.scores(logits)
        steps = [[len(text) + growth.levels] for text in self.batch.state.generated]
        ids = self.drafter.token_ids
        draft_scores = self.batch.draft_scores(scores, steps, None if ids is None else ids.expand(len(scores), 1, -1))
        proposed, q = self._proposals(scores, draft_scores)
        if q is not None:
            self._qs.append(q)
        growth.add(*proposed)

    def _best(self, growth: Growth, size: TreeSize) -> DraftTree:
        """The draft: the nodes that are verified, with q for rejection sampling."""
        expanded_first = self.drafter.expanded_nodes_first
        # In rejection sampling a node must not be left out because of its token, nor because of what follows it.
        least = growth.expanded if expanded_first or self.wants_q else 0
        draft, parents = growth.best(max(size.nodes(growth), least), expanded_first, with_expanded=self.wants_q)
        if self.wants_q and draft.nodes and parents is not None:
            q = torch.cat(self._qs, dim=1)  # [batch, 1 + expanded, vocab], by the number of the parent
            draft = draft.with_q(q.gather(1, parents[..., None].expand(-1, -1, q.shape[-1])))
        if self.batch.do_sample:  # the verification reads depths and tokens before it chooses tokens
            draft.start_reading()
        return draft

    def _expanded_paths(self, result: VerificationResult) -> list[list[int]]:
        """The accepted nodes that were expanded, which come first in their path: a child is expanded after its parent.

        Here the node that was expanded first is 0, while its `NUMBER` is 1.
        """
        if not self._expanded:
            return super()._expanded_paths(result)
        values = cast(DeviceTree, self._tree).node_values
        paths = []
        for nodes, path in zip(values, result.paths, strict=True):
            numbers = nodes[path or [], NUMBER].tolist()
            paths.append([number - 1 for number in numbers if 0 < number <= self._expanded])
        return paths
