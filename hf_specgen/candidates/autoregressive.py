"""Drafting with a network that predicts one token at a time: chains, and trees that grow by a pass per level.

Each pass of the drafter runs on the most likely nodes that were not expanded yet, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch

from hf_specgen.candidates.acceptance import NetworkSession
from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.captured_levels import Drafted, Proposals, grow_captured
from hf_specgen.candidates.growth import Growth
from hf_specgen.candidates.tree_size import Plan, TreeSize, tree_size
from hf_specgen.device_tree import NUMBER, DeviceTree, Frontier
from hf_specgen.targets.passes import LevelPasses
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.processors import ScoreProcessors


class AutoregressiveSession(NetworkSession):
    """Drafts trees with a network.

    Nodes whose token has a probability below the threshold are not expanded. `vocab` is the size of the target's
    vocabulary; the drafter's may be padded to another size.
    """

    token_ids: torch.Tensor | None = None
    """`[draft vocab]` the target's ids of the tokens that the logits are of, if they are not those of all tokens."""
    expanded_nodes_first = False
    """Whether the nodes of a tree begin with those that were expanded."""

    def __init__(
        self,
        call: DraftCall,
        k: int,
        tree: str | int | None,
        vocab: int,
        confidence_threshold: float = 0.0,
    ):
        super().__init__(call)
        chains_only = call.target is not None and call.target.verifies_chains_only
        self._k, self._size, self._vocab = k, None if chains_only else tree, vocab
        self._threshold = confidence_threshold
        self._qs: list[torch.Tensor] = []
        self._expanded = 0  # nodes of each row that were expanded in the current draft
        self._nodes = 0  # that it has at most
        self.max_depths: Sequence[int] = ()
        self.passes: list[int] = []

    def max_draft_tokens(self, row: int) -> int:
        """How deep a row's draft can be at most."""
        return self._k

    def tree_size(self, depths: Sequence[int]) -> TreeSize:
        """How large the trees of the next step become."""
        return tree_size(self._size, self.call, depths)

    def first_levels(self) -> LevelPasses | None:
        """What the drafter provides for a pass over new text and levels after it in one captured function.

        Called once before each draft; None if that pass is not captured with others.
        """
        return None

    @abstractmethod
    def first_scores(self) -> torch.Tensor:
        """Run the drafter on what is new in the rows' texts: `[batch, draft vocab]` logits after each row's last token.

        Adds the pass to `passes` unless it reads the prompt.
        """

    @abstractmethod
    def next_scores(self, frontier: Frontier) -> torch.Tensor:
        """Run the drafter on a frontier; `[batch, new, draft vocab]` logits after each of its nodes."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was computed for these nodes of the last tree, and drop the others."""

    def observe(self, result: VerificationResult) -> None:
        """Keep what was computed for accepted nodes."""
        super().observe(result)
        if self._expanded:
            # The nodes of a path that were expanded come first: a child is expanded after its parent.
            known = zip(cast(DeviceTree, self._tree).node_values, result.paths, strict=True)
            numbers = [row[path or [], NUMBER].tolist() for row, path in known]
            self.commit([[number - 1 for number in row if 0 < number <= self._expanded] for row in numbers])

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self.max_depths, self.passes, self._qs, self._expanded = max_depths, [], [], 0
        depths = [min(self._k, depth, self.max_draft_tokens(row)) for row, depth in enumerate(max_depths)]
        active = sum(depth > 0 for depth in depths)
        if not active:
            return self.not_drafted(len(depths))
        size = self.tree_size(depths)
        levels = self.first_levels()
        logits, device = None, None if levels is None else levels.device
        if levels is None:
            logits = self.first_scores()[:, None]
            device = logits.device
        last_tokens = [self.call.state.last_token(row) for row in range(len(depths))]
        # Only CUDA has copied a temporary tensor before it can be freed.
        given = torch.tensor([last_tokens, depths])
        pending, limits = given.to(device, non_blocking=device is not None and device.type == "cuda")[..., None]
        is_captured = levels is not None or self.level_passes() is not None
        children = min(size.children, self._vocab if self.token_ids is None else len(self.token_ids))
        if logits is not None:
            children = min(children, logits.shape[-1])
        growth = Growth(depths, children, pending, limits if is_captured else None)
        self._proposals, self._nodes = self._settings(growth.children), size.max_nodes
        if levels is not None and not self._grow_first(growth, size, levels, active):
            logits = self.first_scores()[:, None]
        if logits is not None:
            self._add(growth, logits)
        while (plan := size.next(growth, self._k if is_captured else max(depths))) is not None:
            self._grow(growth, plan)
            size.count(plan)
            self.passes += [active * plan.width] * plan.passes
        self._expanded, first = growth.expanded, self.expanded_nodes_first
        # In rejection sampling a node must not be left out because of its token, nor because of what follows it.
        least = growth.expanded if first or self.wants_q else 0
        draft, parents = growth.best(max(size.nodes(growth), least), first, with_expanded=self.wants_q)
        if self.wants_q and draft.nodes and parents is not None:
            q = torch.cat(self._qs, dim=1)  # [batch, 1 + expanded, vocab]
            draft = draft.with_q(q.gather(1, parents[..., None].expand(-1, -1, q.shape[-1])))
        if self.call.do_sample:  # the verification needs to know where each node is
            draft.start_reading()
        self._tree = draft
        return draft

    def _settings(self, children: int) -> Proposals:
        verification = self.call.verification
        processors = ScoreProcessors.of([]) if verification is None else verification.processors.score_processors
        return Proposals(children, self._vocab, self._threshold, processors, self.token_ids, self.wants_q)

    def _grow(self, growth: Growth, plan: Plan) -> None:
        """Make the passes of a plan."""
        drafter = self.level_passes()
        if drafter is None or self._grow_captured(growth, plan, drafter) is None:
            for _ in range(plan.passes):
                self._add(growth, self.next_scores(growth.expand(plan.width)))

    def _grow_first(self, growth: Growth, size: TreeSize, drafter: LevelPasses, active: int) -> bool:
        """Process new text and expand the first levels in one captured function; False if there is none."""
        plan = size.first(growth, self._k)
        drafted = None if plan is None else self._grow_captured(growth, plan, drafter)
        if plan is None or drafted is None:
            return False
        self.after_text(*drafted.after_text)
        size.count(plan)
        self.passes += [active * plan.width] * plan.passes
        return True

    def _grow_captured(self, growth: Growth, plan: Plan, drafter: LevelPasses) -> Drafted | None:
        """Make passes by one captured function; None if there is none."""
        verification = self.call.verification
        if verification is None or not verification.shares_noise or self._proposals.processors.reads_scores:
            return None
        first = [len(text) + growth.levels for text in self.call.state.generated]
        steps = [list(range(start, start + (drafter.text is not None) + plan.passes)) for start in first]
        noise = verification.draft_noise(steps, growth.device)
        drafted = grow_captured(growth, *plan, self._nodes, drafter, self._proposals, noise)
        if drafted is not None:
            self.after_levels(drafted.states, growth.expanded)
        return drafted

    def level_passes(self) -> LevelPasses | None:
        """What the drafter provides for several levels in one captured function; None if it captures nothing."""
        return None

    def after_text(self, *results: Any) -> None:
        """Store the results of new text that a captured function has processed: those of `LevelPasses.level`."""

    def after_levels(self, states: torch.Tensor | None, expanded: int) -> None:
        """Store the states of passes of a captured function, after which so many nodes of each row are expanded."""

    def _add(self, growth: Growth, logits: torch.Tensor) -> None:
        """Add the most likely tokens after each node of a pass; `logits` are `[batch, nodes, draft vocab]`."""
        verification, scores = self.call.verification, self._proposals.scores(logits)
        draft_scores = scores
        if verification is not None:
            steps = [[len(text) + growth.levels] for text in self.call.state.generated]
            ids = None if self.token_ids is None else self.token_ids.expand(len(scores), 1, -1)
            draft_scores = verification.draft_scores(scores, steps, ids)
        proposed, q = self._proposals(scores, draft_scores)
        if q is not None:
            self._qs.append(q)
        growth.add(*proposed)


def last_of(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """`[batch, tokens, …]` to `[batch, …]`: of row ``b`` those of token ``counts[b] - 1``; of token 0 where it is 0."""
    if len(set(counts)) == 1:
        return values[:, max(0, counts[0] - 1)]
    last = torch.tensor([max(0, count - 1) for count in counts], device=values.device)
    return values[torch.arange(len(counts), device=values.device), last]
