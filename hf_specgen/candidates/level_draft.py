"""A draft with a pass of a drafter for each level: a chain, or a tree whose most likely nodes are expanded.

Each pass of the drafter runs on the most likely nodes of the last level, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.

    forward_text   logits after each row's last token ─► candidates of level 1
    forward_nodes  logits after the likeliest of them ─► candidates of level 2, and so on

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from typing import Generic

import torch

from hf_specgen.candidates.acceptance_estimator import AcceptanceEstimator
from hf_specgen.candidates.base import vocabulary_size
from hf_specgen.candidates.captured_levels import CandidateProposer, CapturedLevelsOutput, add_captured_levels
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.candidates.tree_size import ExpansionPlan, must_verify_expanded, tree_sizer
from hf_specgen.drafter import Drafter, T
from hf_specgen.targets.passes import CapturablePasses
from hf_specgen.tree import DraftTree


class LevelDraft(Generic[T]):
    """The draft of one step while it is made.

    `uncached` is the text that the drafter has not processed yet; `k` the maximum depth of the strategy, which captured
    passes may reach; a node is not expanded if its token's probability is below `threshold`; `estimator` is that of the
    call.
    """

    builder: TreeBuilder  # the trees; set by `build`

    def __init__(
        self,
        batch: DraftBatch,
        drafter: Drafter[T],
        uncached: T,
        k: int,
        tree: str | int | None,
        threshold: float,
        estimator: AcceptanceEstimator,
    ):
        self._batch = batch
        self._drafter = drafter
        self._uncached = uncached
        self._sizer = tree_sizer(tree, batch, uncached.depths, drafter, estimator, may_end_early=threshold > 0)
        self._k = k
        self._threshold = threshold
        self._qs: list[torch.Tensor] = []  # q after the nodes of each pass, for rejection sampling
        self._can_capture = False  # whether passes can run as captured functions
        self.tokens_per_pass: list[int] = []  # tokens, over all rows, of each pass over nodes

    def build(self) -> DraftTree:
        """Make the drafter's passes; returns the nodes to verify, with q for rejection sampling."""
        self._make_first_level()
        # Captured functions may go beyond the deepest limit, so that there are few different ones.
        k = self._k if self._can_capture else max(self._uncached.depths)
        while (plan := self._sizer.next_plan(self.builder, k)) is not None:
            self._expand(plan)
            self._sizer.record_passes(plan)
        self._sizer.record_levels()
        return self._tree_to_verify()

    def _make_first_level(self) -> None:
        """Start the trees and add level 1, the candidates after each row's last token; more levels if captured."""
        capturable = self._capturable_passes(self._uncached)
        if capturable is not None:  # the pass over the text can be captured, together with further levels
            self._can_capture = True
            self._start_builder(capturable.device)
            if self._add_first_levels_captured(capturable):
                return
        # No graph: the pass over the text runs eagerly; later passes may still be captured.
        logits = self._drafter.forward_text(self._uncached)[:, None]
        if capturable is None:
            self._can_capture = self._capturable_passes() is not None  # further levels alone
        # The number of logits is known now: a draft model may have fewer tokens than a node has children.
        if capturable is None or logits.shape[-1] < self._proposer.children:
            self._start_builder(logits.device, draft_vocab=logits.shape[-1])
        self._add_level(logits)

    def _capturable_passes(self, text: T | None = None) -> CapturablePasses | None:
        """Passes over several levels, and over text before them; None if they cannot be captured."""
        # In a graph scores are perturbed by noise that is drawn before, and no logits processor reads them on the host.
        if not self._batch.uses_draft_noise_only or self._batch.score_processors.reads_on_host:
            return None
        return self._drafter.capturable_passes(text)

    def _start_builder(self, device: torch.device, draft_vocab: int | None = None) -> None:
        """Set `builder`, whose trees have only their roots yet, and the proposer.

        `draft_vocab` is the number of logits after a token, once a pass has given some.
        """
        depths = self._uncached.depths
        tokens = [self._batch.state.last_token(row) for row in range(len(depths))]
        # In one transfer. CUDA stages a temporary tensor before `to` returns; elsewhere it could be freed too early.
        values = torch.tensor([tokens, list(depths)]).to(device, non_blocking=device.type == "cuda")[..., None]
        last_tokens = values[0]
        max_depths = values[1] if self._can_capture else None
        ids = self._drafter.token_ids
        vocab = vocabulary_size(self._batch.model)
        # A small vocabulary has fewer tokens than a node may have children.
        children = min(self._sizer.children, vocab if ids is None else len(ids))
        if draft_vocab is not None:
            children = min(children, draft_vocab)
        self.builder = TreeBuilder(depths, children, last_tokens, max_depths)
        processors = self._batch.score_processors
        self._proposer = CandidateProposer(children, vocab, self._threshold, processors, ids, self._batch.wants_q)

    def _expand(self, plan: ExpansionPlan) -> None:
        """Make the passes of a plan, in one captured function if there is one."""
        capturable = self._capturable_passes()
        if capturable is None or self._expand_captured(plan, capturable) is None:
            for _ in range(plan.num_passes):
                self._add_level(self._drafter.forward_nodes(self.builder.select_frontier(plan.expansion_width)))
        self._count_passes(plan)

    def _add_first_levels_captured(self, capturable: CapturablePasses) -> bool:
        """Process new text and expand the first levels in one captured function; False if there is none."""
        plan = self._sizer.plan_without_sync(self.builder, self._k)
        if plan is None:
            return False
        output = self._expand_captured(plan, capturable)
        if output is None:
            return False
        assert capturable.store_text is not None
        capturable.store_text(output.text_outputs)
        self._sizer.record_passes(plan)
        self._count_passes(plan)
        return True

    def _expand_captured(self, plan: ExpansionPlan, capturable: CapturablePasses) -> CapturedLevelsOutput | None:
        """Make the passes of a plan, after a pass over new text if there is any, by one captured function.

        None, and nothing is done, if there is no graph of them.
        """
        builder = self.builder
        # A pass over new text adds level 1.
        num_levels = plan.num_passes + (capturable.text is not None)
        # By row, the index of the generated token that each level proposes: one deeper each.
        first_indices = [len(generated) + builder.num_levels for generated in self._batch.state.generated]
        token_indices = [list(range(first, first + num_levels)) for first in first_indices]
        noise = self._batch.draft_noise(token_indices, builder.device)
        output = add_captured_levels(builder, *plan, self._sizer.max_nodes, capturable, self._proposer, noise)
        if output is not None:
            capturable.store_levels(output.states, builder.num_expanded)
        return output

    def _count_passes(self, plan: ExpansionPlan) -> None:
        """Count passes over nodes, unless deeper levels need no pass, see `Drafter.single_pass_tokens`."""
        if not self._drafter.single_pass_tokens:
            rows = sum(depth > 0 for depth in self._uncached.depths)
            self.tokens_per_pass += [rows * plan.expansion_width] * plan.num_passes

    def _add_level(self, logits: torch.Tensor) -> None:
        """Add the most likely tokens after each node of a pass; `logits` are `[batch, nodes, draft vocab]`."""
        scores = self._proposer.scores(logits)
        # By row, the index of the generated token that this level proposes.
        token_indices = [[len(generated) + self.builder.num_levels] for generated in self._batch.state.generated]
        ids = self._drafter.token_ids
        if ids is not None:
            ids = ids.expand(len(scores), 1, -1)
        draft_scores = self._batch.draft_scores(scores, token_indices, ids)
        tokens, log_acceptance, may_expand, q = self._proposer(scores, draft_scores)
        if q is not None:
            self._qs.append(q)
        self.builder.add(tokens, log_acceptance, may_expand)

    def _tree_to_verify(self) -> DraftTree:
        """The nodes that are verified, with q for rejection sampling."""
        builder = self.builder
        nodes = self._sizer.num_verified_of_builder(builder)
        if must_verify_expanded(self._batch, self._drafter):
            nodes = max(nodes, builder.num_expanded)
            draft, parents = builder.best_with_expanded(nodes, self._drafter.expanded_nodes_first)
            if self._batch.wants_q and draft.nodes:
                q = torch.cat(self._qs, dim=1)  # [batch, 1 + expanded, vocab], by the expansion index of the parent
                draft.q = q.gather(1, parents[..., None].expand(-1, -1, q.shape[-1]))
        else:
            draft = builder.best(nodes)
        if self._batch.do_sample:  # the verification reads depths and tokens before it chooses tokens
            draft.start_reading()
        return draft
