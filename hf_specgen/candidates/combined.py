"""Several strategies in one draft tree: text that is copied where it repeats itself, a network's draft elsewhere.

Members without a forward pass draft first, into one tree, which Token Recycling extends. If that is expected to yield
many tokens, it is verified alone; otherwise the network drafts too, and both trees are merged: most probable nodes
first, cut at the fastest size.

Source: Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton" (2024), for combining copied text with
Token Recycling or EAGLE; there one of them drafts a step, here both do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import NamedTuple

from transformers import PreTrainedModel

from hf_specgen.call import DraftingSettings, Prediction
from hf_specgen.candidates.acceptance import MAX_PROBABILITY
from hf_specgen.candidates.base import Candidates, DraftCall, DraftSession, Tree
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.candidates.recycling import RecyclingCandidates, RecyclingSession
from hf_specgen.candidates.tree_search import TreeSize, draft_of, tree_size
from hf_specgen.depth import Policy
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.tree import DraftTree, Parents
from hf_specgen.verification.result import VerificationResult, result_for, verified_nodes

ENOUGH_TOKENS = 7.0
"""Expected tokens of a step from which the draft of the members without a pass is verified alone: a network then adds
0.3 to 0.8 tokens, below 1.4 to 3.9."""
UNPROPOSED = 0.15
"""Factor of the acceptance of a copied token that the network does not propose after the same path."""


class CombinedCandidates(Candidates):
    """Combines the drafts of several strategies: n-grams where the text repeats itself, other drafts elsewhere.

    Args:
        strategies: the members. Left out, they are n-grams and Token Recycling, which need no model and no training.
        tree: how many draft tokens are verified: "auto", also if left out, the tree with the highest expected tokens
            per second, or all that is proposed if the policy has no latency model; a number is the size of every tree.
        prediction: the expected output, for the n-grams among the members; see `NgramCandidates`.
        policy: chooses the depth of all members, step by step.

    Raises:
        ValueError: if there are none, two of them run the target in different ways, or none uses a prediction.
        TypeError: if one of them is no strategy.

    Example:
        >>> CombinedCandidates([NgramCandidates(k=16)]).k
        16
    """

    def __init__(
        self,
        strategies: Sequence[Candidates] | None = None,
        *,
        tree: Tree = None,
        prediction: Prediction | None = None,
        policy: Policy | None = None,
    ):
        if strategies is None:
            strategies = [NgramCandidates(), RecyclingCandidates()]
        if not strategies:
            raise ValueError("CombinedCandidates needs at least one strategy, such as NgramCandidates()")
        for strategy in strategies:
            if not isinstance(strategy, Candidates):
                raise TypeError(f"CombinedCandidates takes strategies such as NgramCandidates(), got {strategy!r}")
        super().__init__("auto", policy, max_k=max(strategy.k for strategy in strategies))
        self.strategies = tuple(strategies)
        self._set_tree(tree, "auto")
        self.prediction = prediction
        self.uses_prediction = any(strategy.uses_prediction for strategy in strategies)
        if prediction is not None and not self.uses_prediction:
            raise ValueError("prediction= needs n-grams among the strategies; add NgramCandidates()")
        self.negligible_draft_cost = all(strategy.negligible_draft_cost for strategy in strategies)

    def settings(self) -> DraftingSettings:
        return replace(super().settings(), has_free_drafts=any(one.negligible_draft_cost for one in self.strategies))

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        needs = [strategy.target_requirements(model) for strategy in self.strategies]
        return reduce(TargetRequirements.__or__, needs)

    def start(self, call: DraftCall) -> DraftSession:
        return _CombinedSession(self, call)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """The kind is that of the member whose drafting takes time."""
        network = next((s for s in self.strategies if not s.negligible_draft_cost), self.strategies[0])
        members = (part for s in self.strategies for part in s.profile_key())
        return (network.profile_key()[0], "combined", str(self.tree), *members)

    def __repr__(self) -> str:
        tree = "" if self.tree == "auto" else f", tree={self.tree!r}"
        return f"CombinedCandidates({list(self.strategies)}{tree}{self._show()})"


class _CombinedSession(DraftSession):
    """The sessions of the members, those without a forward pass first, and their drafts of the current step."""

    def __init__(self, settings: CombinedCandidates, call: DraftCall):
        if settings.prediction is not None:
            call = replace(call, prediction=settings.prediction)
        super().__init__(call)
        strategies = sorted(settings.strategies, key=lambda strategy: not strategy.negligible_draft_cost)
        self._size = settings.tree
        self._members = [(strategy.start(call), strategy.k) for strategy in strategies]
        self._first_network = sum(strategy.negligible_draft_cost for strategy in strategies)
        self._drafts = [DraftTree.empty(call.state.batch)] * len(strategies)
        self.top_tokens = max(session.top_tokens for session, _ in self._members)
        # An early-exit target has run its first layers on the nodes of one member; others cannot be added to its draft.
        self._adds_to_networks = not isinstance(call.target, EarlyExitTarget)
        # Rejection sampling verifies every node that was drawn; a search would leave some out by their tokens.
        self._searches = self._adds_to_networks and not (call.verification is not None and call.verification.wants_q)
        recycling = (session for session, _ in self._members if isinstance(session, RecyclingSession))
        self._recycling = next(recycling, None) if self._searches else None
        self._trees: list[SearchTree[_Origin]] = []
        self._is_prefill, self._has_drafted = True, False
        self._uses_networks = call.depth is None or call.depth.affords_prefill()
        self.passes: list[int] = []

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._combine(max_depths, is_prefill=False)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        return self._combine(max_depths, is_prefill=True)

    def observe(self, result: VerificationResult) -> None:
        """Pass the outcome on to every member as one of its own draft."""
        for tree, emitted in zip(self._trees, result.tokens, strict=False):
            for node, accepted in verified_nodes(tree.tokens, tree.parents, emitted):
                recycled = tree.tags[node].recycled
                if self._recycling is not None and recycled is not None:
                    self._recycling.count(*recycled, accepted)
        for (session, _), draft in zip(self._members, self._drafts, strict=True):
            # After a prefill without drafts only members that use more than the outcome of a draft are called.
            if not self._is_prefill or draft.nodes or session.top_tokens or self._has_drafted:
                session.observe(result_for(result, draft))

    def end(self) -> None:
        for session, _ in self._members:
            session.end()

    def _combine(self, max_depths: Sequence[int], is_prefill: bool) -> DraftTree:
        self._is_prefill, self.passes = is_prefill, []
        zeros = [0] * len(max_depths)
        size = tree_size(self._size, self.call, max_depths, is_prefill=is_prefill)
        # Trees without a size hold all that was proposed, also what Token Recycling proposes on its own.
        extension = self._recycling if size.is_fastest or isinstance(self._size, int) else None
        networks = range(self._first_network, len(self._members))
        self._drafts = [DraftTree.empty(len(max_depths))] * len(self._members)
        for number in range(self._first_network):
            self._draft_member(number, zeros if self._members[number][0] is extension else max_depths)
        tree = self._merged(size, max_depths, extension)
        needs_network = self._uses_networks and (is_prefill or not _expects(tree, ENOUGH_TOKENS))
        for number in networks:
            is_free = self._adds_to_networks or not any(draft.nodes for draft in self._drafts)
            self._draft_member(number, max_depths if needs_network and is_free else zeros)
            self.passes += _passes(self._members[number][0], self._drafts[number])
        if networks and needs_network:
            tree = self._merged(size, max_depths, extension)
        self._has_drafted = tree.nodes > 0
        return tree

    def _draft_member(self, number: int, max_depths: Sequence[int]) -> None:
        session, k = self._members[number]
        draft = session.draft_at_prefill if self._is_prefill else session.draft
        self._drafts[number] = draft([min(depth, k) for depth in max_depths])

    def _merged(self, size: TreeSize, max_depths: Sequence[int], extension: RecyclingSession | None) -> DraftTree:
        """The most probable tree of what the members proposed, extended by candidate tokens of Token Recycling."""
        self._trees = []
        if not self._searches:
            return merge_trees(self._drafts)
        has_size = size.is_fastest or isinstance(self._size, int)
        nodes = size.max_nodes if has_size else sum(draft.nodes for draft in self._drafts)
        for row, depth in enumerate(max_depths):
            search = _RowSearch(self._drafts, self._first_network, row, self.call.state.last_token(row), extension)
            is_chain = self._is_prefill and has_size  # the prefill pass verifies chains
            limits = SearchLimits(nodes, size.min_probability, is_chain)
            self._trees.append(best_first(search.root, search.children, depth, limits))
        if size.latency is not None:
            has_network = any(draft.nodes for draft in self._drafts[self._first_network :])
            drafting = size.latency.drafter.draft(self.passes) if has_network else 0.0
            nodes = size.best_size([tree.probability for tree in self._trees], drafting)
        return draft_of(self._trees, nodes)


class _Origin(NamedTuple):
    """Where a token comes from: the node of each draft that it stands for, None where a draft does not have it; and for
    one of `RecyclingSession.candidate_tokens` its key, and the probability that copied text leaves to these tokens.
    """

    token: int
    nodes: tuple[int | None, ...]
    recycled: tuple[tuple[int, int], float] | None = None


class _RowSearch:
    """The children of every node of the merged tree of one row."""

    def __init__(
        self,
        drafts: Sequence[DraftTree],
        first_network: int,
        row: int,
        last_token: int,
        recycling: RecyclingSession | None,
    ):
        self._first_network, self._recycling = first_network, recycling
        self.root = _Origin(last_token, (-1,) * len(drafts))
        self._children = [node_children(draft, row) for draft in drafts]

    def children(self, origin: _Origin, depth: int) -> list[tuple[int, float, _Origin]]:
        """The children of a node, most likely first.

        Estimates of several members are combined as if they were independent. A network has processed the text that the
        others copy from, so what it does not propose is less likely.
        """
        proposals: dict[int, tuple[float, list[int | None]]] = {}
        by_network: set[int] = set()
        for number, parent in enumerate(origin.nodes):
            for child, token, acceptance in () if parent is None else self._children[number].get(parent, ()):
                before, nodes = proposals.get(token, (0.0, [None] * len(origin.nodes)))
                nodes[number] = child
                proposals[token] = 1 - (1 - before) * (1 - acceptance), nodes
                if number >= self._first_network:
                    by_network.add(token)
        has_network = bool(by_network)
        for token in proposals.keys() - by_network if has_network else ():
            proposals[token] = UNPROPOSED * proposals[token][0], proposals[token][1]
        total = sum(value for value, _ in proposals.values())
        scale, rest, recycled = 1 / max(1.0, total), max(0.0, 1 - total), []
        if self._recycling is not None and not has_network and rest:
            nowhere = (None,) * len(origin.nodes)
            for token, acceptance, key in self._recycling.candidate_tokens(origin.token):
                if token in proposals:
                    proposals[token] = proposals[token][0] + rest * acceptance, proposals[token][1]
                else:
                    recycled.append((token, rest * acceptance, _Origin(token, nowhere, (key, rest))))
        copied = [(token, scale * value, _Origin(token, tuple(nodes))) for token, (value, nodes) in proposals.items()]
        return sorted(copied + recycled, key=lambda child: -child[1])


def node_children(draft: DraftTree, row: int) -> dict[int, list[tuple[int, int, float]]]:
    """For each node of a row's draft (-1 for the last token), its children: node, token, acceptance."""
    tokens, parents = draft.token_lists()[row], draft.parents[row]
    path = None if draft.probability is None else draft.probability[row]
    below: dict[int, list[tuple[int, int, float]]] = {}
    for node, parent in enumerate(parents):
        acceptance = 0.6  # assumed where a strategy estimates nothing
        if path is not None:
            above = path[parent] if parent >= 0 else 1.0
            acceptance = min(MAX_PROBABILITY, path[node] / above) if above > 0 else 0.0
        below.setdefault(parent, []).append((node, tokens[node], acceptance))
    return below


def _expects(tree: DraftTree, tokens: float) -> bool:
    """Whether a step is expected to emit at least so many tokens, on average over the rows that have a draft."""
    expected = [1 + sum(row) for row in tree.probability or () if row]
    return bool(expected) and sum(expected) / len(expected) >= tokens


def _passes(session: DraftSession, draft: DraftTree) -> Sequence[int]:
    """Tokens of each pass of a session's last draft; one for each level of the tree if it does not count them."""
    if session.passes is not None:
        return session.passes
    rows = sum(len(parents) > 0 for parents in draft.parents)
    return [rows] * max((max(draft.depths(row)) for row in range(draft.batch)), default=0)


def merge_trees(trees: Sequence[DraftTree]) -> DraftTree:
    """Merge drafts for the same rows into one tree per row; equal paths share their nodes.

    Nodes of deterministic drafts (without `q`) come first among siblings, as `verification="rejection"` assumes: a
    sampled node then counts as drawn without replacement of the tokens before it.

    Example:
        >>> merged = merge_trees([DraftTree.chains([[5, 6]]), DraftTree.chains([[5, 7, 8]])])
        >>> merged.tokens.tolist(), merged.parents
        ([[5, 6, 7, 8]], ((-1, 0, 0, 2),))
    """
    drafts = sorted((tree for tree in trees if tree.nodes), key=lambda tree: tree.q is not None)
    if len(drafts) < 2:
        return drafts[0] if drafts else trees[0]
    rows = [_merge_row(drafts, [tree.token_lists()[row] for tree in drafts], row) for row in range(drafts[0].batch)]
    merged = DraftTree.from_nodes([(tokens, parents) for tokens, parents, _ in rows])
    sampled = [tree.q for tree in drafts if tree.q is not None]
    if not sampled:
        return merged
    q = sampled[0].new_zeros(merged.batch, merged.nodes, max(part.shape[-1] for part in sampled))
    for row, (_, _, sources) in enumerate(rows):
        for node, (draft, source) in enumerate(sources):
            part = drafts[draft].q
            if part is not None:
                q[row, node, : part.shape[-1]] = part[row, source]
    return DraftTree(merged.token_lists(), merged.parents, q)


def _merge_row(
    drafts: Sequence[DraftTree], tokens: Sequence[list[int]], row: int
) -> tuple[list[int], Parents, list[tuple[int, int]]]:
    """Tokens and parents of the merged row, and the (draft, node) that each of its nodes comes from."""
    merged: list[int] = []
    parents: list[int] = []
    sources: list[tuple[int, int]] = []
    node_of: dict[tuple[int, int], int] = {}
    for draft, tree in enumerate(drafts):
        new_index = {-1: -1}
        for node, parent in enumerate(tree.parents[row]):
            key = new_index[parent], tokens[draft][node]
            if key not in node_of:
                node_of[key] = len(merged)
                merged.append(key[1])
                parents.append(key[0])
                sources.append((draft, node))
            new_index[node] = node_of[key]
    return merged, tuple(parents), sources


@cache
def default_candidates() -> Candidates:
    """A strategy that needs no files and no training: n-grams and Token Recycling, with what it has learnt so far."""
    return CombinedCandidates()
