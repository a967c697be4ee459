"""Token Recycling: drafts from the tokens that the target itself considered likely in earlier steps.

Verification computes the target's logits after every node of a draft, also after those that are rejected. The most
likely tokens after each token are kept in a table, one row for each token of the vocabulary. Following the table from
the last token on gives a tree; nothing is trained, and drafting needs no forward pass.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(2024). There the tree is a fixed template; here it grows best-first by measured acceptance.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_specgen.candidates.acceptance import BIN_CENTERS, RANKS, Calibration
from hf_specgen.candidates.base import Candidates, Depth, DraftCall, DraftSession, Tree, check_tree, vocabulary_size
from hf_specgen.candidates.recycling_table import SUCCESSORS, RecyclingTable
from hf_specgen.candidates.tree_search import MAX_PROBABILITY as MAX_JOINT
from hf_specgen.candidates.tree_search import TreeBuilder, tree_size
from hf_specgen.depth import Policy
from hf_specgen.memory import memory
from hf_specgen.tree import DraftTree, Parents
from hf_specgen.verification.result import VerificationResult, verified_nodes

CENTERS: list[float] = BIN_CENTERS.tolist()
MAX_DEPTH = 8
"""Maximum depth of k="auto": the template of the paper has 6 levels."""
RECYCLED_SHARE = 0.45
"""Acceptance of a token over the probability that the target last gave it after the same token, as measured with the
embedded model; assumed before acceptance was observed. With 1 the projected speed of n-grams and Token Recycling with
the latencies of a 300M target on two cores is 1.21x of plain decoding, with 0.25, 0.35 and 0.45 1.37x to 1.39x."""


class RecyclingCandidates(Candidates):
    """Drafts with Token Recycling. Needs nothing; what it has learnt about a target is kept from call to call.

    Args:
        k: maximum depth of a draft, in tokens; "auto" for as many as are expected to be faster.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the size of every tree. Left out, it is "auto" with k="auto", and with a number for
            k the draft is a chain of k tokens.
        table: what to start from, such as `RecyclingTable.load("table.safetensors")`; it is updated by every call. Left
            out, there is an empty one for each target.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        ValueError: if a number is out of range; at the first call, if the table belongs to another vocabulary.

    Example:
        >>> RecyclingCandidates(k=6, tree=32)
        RecyclingCandidates(k=6, tree=32)
    """

    negligible_draft_cost = True

    def __init__(
        self,
        k: Depth = "auto",
        *,
        tree: Tree = None,
        table: RecyclingTable | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=MAX_DEPTH)
        self.tree = check_tree(tree, k)
        self.adaptive_tree = self.tree == "auto"
        self._given = table
        self._tables: WeakKeyDictionary[PreTrainedModel, RecyclingTable] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": None}  # they belong to targets of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tables = WeakKeyDictionary()

    def table(self, model: PreTrainedModel) -> RecyclingTable:
        """The table that calls with this target use and update, for example to save it.

        Raises:
            ValueError: if the table that was given belongs to another vocabulary.
        """
        vocab_size = vocabulary_size(model)
        if self._given is None:
            return self._tables.setdefault(model, RecyclingTable(vocab_size))
        if self._given.vocab_size != vocab_size:
            raise ValueError(
                f"the table is for a vocabulary of {self._given.vocab_size} tokens, the target has {vocab_size}; "
                "give the table of this target, or none"
            )
        return self._given

    def start(self, call: DraftCall) -> DraftSession:
        if call.model is None:
            raise ValueError("RecyclingCandidates works with generate(candidate_generator=…) only")
        if call.verification is not None and call.verification.wants_q:
            # In rejection sampling the text depends on the draft: it must not depend on earlier calls too.
            return RecyclingSession(self, call, RecyclingTable(vocabulary_size(call.model)))
        return RecyclingSession(self, call, self.table(call.model))

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        return ("recycling", self.k, str(self.tree))

    def __repr__(self) -> str:
        tree = "" if self.tree is None else f", tree={self.tree!r}"
        table = "" if self._given is None else f", table={self._given!r}"
        return f"RecyclingCandidates(k={self.k}{tree}{table}{self._show_policy()})"


class RecyclingSession(DraftSession):
    """The state of one call.

    Args:
        settings: of the strategy.
        call: the call.
        table: is drafted from, and updated.
    """

    passes = ()
    top_tokens = SUCCESSORS

    def __init__(self, settings: RecyclingCandidates, call: DraftCall, table: RecyclingTable):
        super().__init__(call)
        self._settings, self._table = settings, table
        self._key = (settings.profile_key(), call.do_sample, round(call.temperature, 2))
        self._calibration = memory.recall(call.model if self.remembers else None, self._key, Calibration)
        self._trees: list[_Tree] = []

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, SUCCESSORS)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, 1)  # the prefill pass verifies chains

    def candidate_tokens(self, token: int) -> list[tuple[int, float, tuple[int, int]]]:
        """Likely next tokens after a token, the probability that each is accepted, and a key for `count`."""
        acceptance = self._calibration.by_bin(RECYCLED_SHARE)
        tokens, bins = self._table.row(token)
        keys = [(min(rank, RANKS - 1), index) for rank, index in enumerate(bins)]
        return [(token, float(acceptance[key]), key) for token, key in zip(tokens, keys, strict=True)]

    def count(self, key: tuple[int, int], accepted: bool) -> None:
        """Count the outcome of one of `candidate_tokens`."""
        self._calibration.count(*key, accepted)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance by rank and confidence, and learn the successors of every input token of the step."""
        for tree, emitted in zip(self._trees, result.tokens, strict=False):
            judged = verified_nodes(tree.tokens, tree.parents, emitted)
            for node, accepted in judged:
                self._calibration.count(min(tree.ranks[node], RANKS - 1), tree.bins[node], accepted)
        self._trees = []
        if result.top_tokens is not None:
            self._table.update(result.top_tokens)

    def end(self) -> None:
        if self.remembers:
            memory.store(self.call.model, self._key, self._calibration)

    def _draft(self, max_depths: Sequence[int], children: int) -> DraftTree:
        settings, state = self._settings, self.call.state
        depths = [min(settings.k, depth) for depth in max_depths]
        size = tree_size(settings.tree, self.call, depths)
        count = size.max_nodes if size.children > 1 else size.nodes(TreeBuilder(depths))
        children = min(children, size.children)
        min_joint = size.min_probability
        acceptance = self._calibration.by_bin(RECYCLED_SHARE).tolist()
        last = [state.last_token(row) for row in range(state.batch)]
        self._trees = [
            grow_tree(self._table, token, acceptance, depth, count, min_joint, children)
            for token, depth in zip(last, depths, strict=True)
        ]
        if size.is_fastest:
            count = size.best_size([tree.joint for tree in self._trees])
        joint = tuple(tuple(tree.joint[:count]) for tree in self._trees)
        return DraftTree.from_nodes([tree.first(count) for tree in self._trees], probability=joint)


class _Tree:
    """Nodes in descending order of their joint probability of being accepted, with rank and confidence bin."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.ranks: list[int] = []
        self.bins: list[int] = []

    def first(self, count: int) -> tuple[list[int], Parents]:
        return self.tokens[:count], tuple(self.parents[:count])


def grow_tree(
    table: RecyclingTable,
    token: int,
    acceptance: Sequence[Sequence[float]],
    depth: int,
    nodes: int,
    min_joint: float = 0.0,
    children: int = SUCCESSORS,
) -> _Tree:
    """The most probable continuations of a token by the table, best-first.

    Args:
        table: of successors.
        token: the last one of the text.
        acceptance: `[ranks][bins]` probability that a successor is accepted, given that its parent is.
        depth: maximum depth.
        nodes: maximum number of nodes.
        min_joint: joint probability below which a node is left out.
        children: of a node at most.
    """
    tree = _Tree()
    heap: list[tuple[float, int, int, int, float, tuple[list[int], list[int]]]] = []
    pushed = 0

    def push(parent: int, level: int, rank: int, above: float, row: tuple[list[int], list[int]]) -> None:
        """Push one successor; its next sibling, which is less probable, is pushed when it is added."""
        nonlocal pushed
        if rank < min(children, len(row[0])):
            value = above * min(MAX_JOINT, acceptance[min(rank, RANKS - 1)][row[1][rank]])
            if value > min_joint:
                pushed += 1
                # `pushed` breaks ties: rows are never compared.
                heapq.heappush(heap, (-value, pushed, parent, level * SUCCESSORS + rank, above, row))

    if depth:
        push(-1, 1, 0, 1.0, table.row(token))
    while heap and len(tree.tokens) < nodes:
        negative, _, parent, level_and_rank, above, row = heapq.heappop(heap)
        level, rank = divmod(level_and_rank, SUCCESSORS)
        node = len(tree.tokens)
        tree.tokens.append(row[0][rank])
        tree.parents.append(parent)
        tree.joint.append(-negative)
        tree.ranks.append(rank)
        tree.bins.append(row[1][rank])
        push(parent, level, rank + 1, above, row)
        if level < depth:
            push(node, level + 1, 0, -negative, table.row(row[0][rank]))
    return tree
