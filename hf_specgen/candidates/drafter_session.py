"""The session of strategies whose drafts take forward passes: it owns a `Drafter`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, cast

import torch

from hf_specgen.call import memory
from hf_specgen.candidates.acceptance_estimator import AcceptanceEstimator
from hf_specgen.candidates.base import DraftSession
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_window import warn_of_length
from hf_specgen.candidates.level_draft import LevelDraft
from hf_specgen.candidates.one_pass import one_pass_draft
from hf_specgen.device_tree import EXPANSION_INDEX, DeviceTree
from hf_specgen.drafter import Drafter, T
from hf_specgen.linear_layers import FastLinearLayers
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult


class DrafterSession(DraftSession, Generic[T]):
    """The state of one call with a drafter.

    Args:
        batch, drafter, k, tree: the rows, what runs the passes, and the maximum depth and size of a draft.
        confidence_threshold: nodes whose token has a probability below it are not expanded.
        warns_of_length: whether to warn where acceptance falls with the length of the texts, as for drafters that could
            have a window.
    """

    def __init__(
        self,
        batch: DraftBatch,
        drafter: Drafter[T],
        k: int,
        tree: str | int | None,
        *,
        confidence_threshold: float = 0.0,
        warns_of_length: bool = False,
    ):
        super().__init__(batch)
        self.drafter = drafter
        self._linear_layers = FastLinearLayers(*drafter.modules)
        self.tokens_per_pass: Sequence[int] = []
        self._k = int(min(k, drafter.max_depth))
        self._tree_setting = tree
        self._threshold = confidence_threshold
        self._tree = DraftTree.empty(batch.state.batch)
        self._expanded = 0  # nodes of each row that were expanded in the last draft
        self._estimator = AcceptanceEstimator()
        self._drafts_by_length: Counter[tuple[int, bool]] | None = None
        self._length_key = "length", batch.call.drafting.key
        if warns_of_length:
            model = batch.model if batch.call.settings.memory else None
            self._drafts_by_length = Counter(memory.recall(model, self._length_key, Counter))

    @property
    def rows_can_change(self) -> bool:
        return self.drafter.rows_can_change

    def keep_rows(self, kept: Sequence[int]) -> None:
        self.drafter.keep_rows(kept)

    def append_rows(self, new: int) -> None:
        self.drafter.append_rows(new)

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._tree = DraftTree.empty(len(max_depths))
        self._expanded = 0
        self.tokens_per_pass = []
        uncached = self.drafter.take_uncached([min(self._k, depth) for depth in max_depths])
        if uncached is None:
            return self._tree
        self.tokens_per_pass = uncached.tokens_per_pass
        if self.drafter.is_one_pass:
            with self._linear_layers.in_use():
                self._tree = one_pass_draft(self.batch, self.drafter, uncached, self._tree_setting)
            return self._tree
        draft = LevelDraft(
            self.batch, self.drafter, uncached, self._k, self._tree_setting, self._threshold, self._estimator
        )
        with self._linear_layers.in_use():
            self._tree = draft.build()
        self._expanded = draft.builder.num_expanded
        self.tokens_per_pass = [*uncached.tokens_per_pass, *draft.tokens_per_pass]
        return self._tree

    def observe(self, result: VerificationResult) -> None:
        """Count the outcome, and keep what was computed for accepted nodes."""
        self._count_by_length(result)
        probability = self._tree.probability or ()
        num_in_pass = result.num_in_pass or map(len, probability)
        expected = sum(sum(row[:count]) for row, count in zip(probability, num_in_pass, strict=False))
        self._estimator.record_outcome(sum(result.accepted), expected)
        self.drafter.commit(self._expanded_paths(result))

    def _expanded_paths(self, result: VerificationResult) -> list[list[int]]:
        """The nodes of each accepted path that were expanded, by the order of expansion: 0 was expanded first.

        They are the first nodes of the path, since a child is expanded after its parent. `EXPANSION_INDEX` counts from
        1, as 0 is the last token of the row.
        """
        if not self._expanded:
            return [[] for _ in result.paths]
        values = cast(DeviceTree, self._tree).node_values
        paths = []
        for nodes, path in zip(values, result.paths, strict=True):
            indices = nodes[path or [], EXPANSION_INDEX].tolist()
            paths.append([index - 1 for index in indices if 0 < index <= self._expanded])
        return paths

    def _count_by_length(self, result: VerificationResult) -> None:
        """Count drafts by text length (in powers of two) and by whether a draft token was accepted."""
        if self._drafts_by_length is None or not self._tree.nodes:
            return
        for row, path in enumerate(result.paths):
            if path is not None and self._tree.parents[row]:
                length = len(self.batch.state.prompts[row]) + len(self.batch.state.generated[row])
                self._drafts_by_length[length.bit_length(), result.accepted[row] > 0] += 1

    def end(self) -> None:
        if self._drafts_by_length is not None:
            warn_of_length(self._drafts_by_length, self.batch.call.drafting.name)
            if self.batch.call.settings.memory:
                memory.store(self.batch.model, self._length_key, Counter(self._drafts_by_length))
