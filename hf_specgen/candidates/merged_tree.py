"""The merged tree of a combination: the children of each node, from the drafts of all members.

"Drafters" are the members that propose by forward passes; the others copy text, or read a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_specgen.candidates.acceptance import MAX_PROBABILITY
from hf_specgen.candidates.recycling import RecyclingSession
from hf_specgen.tree import DraftTree

UNPROPOSED_FACTOR = 0.03
"""Factor of the acceptance of a copied token that no drafter proposes after the same path, at the beginning of a call:
most drafters predict better than a copy. One that has not learnt to copy does not; see `UnproposedTokens`."""
ASSUMED_ACCEPTANCE = 0.6  # of draft tokens of a strategy that estimates no probabilities


class MergedNode(NamedTuple):
    """A node of the merged tree: its token and, by member index, the same node in each draft that has its path."""

    token: int
    nodes: dict[int, int]


class _MergedCandidate(NamedTuple):
    """A token that members propose after the same path."""

    node: MergedNode
    acceptance: float
    is_from_drafter: bool  # whether a drafter proposes it


class MemberDrafts:
    """The drafts of all members for one row. Members from index `num_without_pass` on are drafters."""

    def __init__(self, drafts: Sequence[DraftTree], num_without_pass: int, row: int):
        self._num_without_pass = num_without_pass
        self._children = [node_children(draft, row) for draft in drafts]

    def root(self, token: int) -> MergedNode:
        """The last token of the text, after which all drafts begin."""
        return MergedNode(token, dict.fromkeys(range(len(self._children)), -1))

    def after(self, node: MergedNode) -> dict[int, _MergedCandidate]:
        """The tokens that members propose after a node.

        Estimates of several members for a token are combined as if they were independent.
        """
        proposed: dict[int, _MergedCandidate] = {}
        for member, parent in node.nodes.items():
            for child, token, acceptance in self._children[member].get(parent, ()):
                # What the members before this one propose, if any of them proposes the token.
                earlier = proposed.get(token) or _MergedCandidate(MergedNode(token, {}), 0.0, False)
                merged = MergedNode(token, {**earlier.node.nodes, member: child})
                combined = 1 - (1 - earlier.acceptance) * (1 - acceptance)
                is_from_drafter = earlier.is_from_drafter or member >= self._num_without_pass
                proposed[token] = _MergedCandidate(merged, combined, is_from_drafter)
        return proposed


class UnproposedTokens:
    """Acceptance, in this call, of copied tokens that no drafter proposes although one drafts at their node.

    A drafter has processed the text that other members copy from. If it proposes other tokens, a copied one is
    improbable, unless the drafter has not learnt to copy, or its draft vocabulary does not have the token.
    """

    def __init__(self) -> None:
        self._expected = 1.0
        self._accepted = UNPROPOSED_FACTOR

    @property
    def factor(self) -> float:
        """Factor of the acceptance that the members without a forward pass estimate."""
        return min(1.0, self._accepted / self._expected)

    def observe(self, drafts: MemberDrafts, emitted: Sequence[int]) -> None:
        """Walk along the emitted tokens of a row; count the copied tokens that no drafter proposes, verified or not."""
        node = drafts.root(-1)
        for token in emitted:
            proposed = drafts.after(node)
            if any(candidate.is_from_drafter for candidate in proposed.values()):
                copied = {
                    copied_token: candidate.acceptance
                    for copied_token, candidate in proposed.items()
                    if not candidate.is_from_drafter
                }
                self._expected += sum(copied.values())
                self._accepted += 1.0 if token in copied else 0.0
            if token not in proposed:
                break
            node = proposed[token].node


def merged_children(
    drafts: MemberDrafts, unproposed_factor: float, recycling: RecyclingSession | None
) -> Callable[[MergedNode, int], list[tuple[int, float, MergedNode]]]:
    """A function that returns the children of a node of the merged tree of a row, most likely first.

    Where a drafter proposes tokens, the acceptance of others is multiplied by `unproposed_factor`. Elsewhere Token
    Recycling adds its tokens, see `_with_recycled`. Siblings are scaled to a sum of at most 1.
    """

    def children(node: MergedNode, depth: int) -> list[tuple[int, float, MergedNode]]:
        if not node.nodes:  # beyond all drafts
            recycled_tokens = [] if recycling is None else recycling.candidate_tokens(node.token, is_recycled=True)
            return [(token, acceptance, MergedNode(token, {})) for token, acceptance in recycled_tokens]
        proposed = drafts.after(node)
        acceptance_by_token = {token: candidate.acceptance for token, candidate in proposed.items()}
        nodes = {token: candidate.node for token, candidate in proposed.items()}
        if any(candidate.is_from_drafter for candidate in proposed.values()):
            for token, candidate in proposed.items():
                acceptance_by_token[token] *= 1.0 if candidate.is_from_drafter else unproposed_factor
        elif recycling is not None:
            recycled = recycling.candidate_tokens(node.token, is_recycled=False)
            acceptance_by_token = _with_recycled(acceptance_by_token, recycled)
            nodes = {token: nodes.get(token) or MergedNode(token, {}) for token in acceptance_by_token}
        scale = 1 / max(1.0, sum(acceptance_by_token.values()))
        ranked = sorted(acceptance_by_token.items(), key=lambda token_and_acceptance: -token_and_acceptance[1])
        return [(token, scale * acceptance, nodes[token]) for token, acceptance in ranked]

    return children


def _with_recycled(copied: dict[int, float], recycled: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Acceptance of copied and recycled tokens after one node, from the separate estimates of each.

    That a copied token is accepted and that a recycled one is accepted count as independent events, given that not both
    occur. So the acceptance of a nearly certain copy hardly changes: a long copy would be cut if each of its tokens
    lost a little to the recycled ones.
    """
    copied_accepted = min(1.0, sum(copied.values()))
    recycled_accepted = sum(probability for _, probability in recycled)
    not_both = 1 - copied_accepted * recycled_accepted
    acceptance = {token: probability * (1 - recycled_accepted) / not_both for token, probability in copied.items()}
    for token, probability in recycled:
        acceptance[token] = acceptance.get(token, 0.0) + probability * (1 - copied_accepted) / not_both
    return acceptance


def node_children(draft: DraftTree, row: int) -> dict[int, list[tuple[int, int, float]]]:
    """For each node of a row's draft (-1 for the last token), its children: node, token, acceptance."""
    tokens = draft.token_lists()[row]
    parents = draft.parents[row]
    path = None if draft.probability is None else draft.probability[row]
    below: dict[int, list[tuple[int, int, float]]] = {}
    for node, parent in enumerate(parents):
        acceptance = ASSUMED_ACCEPTANCE
        if path is not None:
            above = path[parent] if parent >= 0 else 1.0
            is_possible = path[node] > 0 and above > 0  # neither is NaN
            acceptance = min(MAX_PROBABILITY, path[node] / above) if is_possible else 0.0
        below.setdefault(parent, []).append((node, tokens[node], acceptance))
    return below
