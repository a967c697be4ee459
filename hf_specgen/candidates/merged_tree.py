"""The merged tree of a combination: the children of each node, from the drafts of all members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_specgen.candidates.acceptance import MAX_PROBABILITY
from hf_specgen.candidates.recycling import RecyclingSession
from hf_specgen.tree import DraftTree

UNPROPOSED = 0.03
"""Factor of the acceptance of a copied token that a network does not propose after the same path, at the beginning of a
call: most networks know better than a copy. One that has not learnt to copy does not; see `UnproposedTokens`."""


class Origin(NamedTuple):
    """Where a token comes from: its node in the draft of each member, by number, that has it."""

    token: int
    nodes: dict[int, int]


class _Proposed(NamedTuple):
    """A token that members propose after the same path."""

    origin: Origin
    acceptance: float
    is_drawn: bool  # a network proposes it


class Proposals:
    """The tokens of the drafts of all members for one row. Members from `first_network` on have a forward pass."""

    def __init__(self, drafts: Sequence[DraftTree], first_network: int, row: int):
        self._first_network = first_network
        self._children = [node_children(draft, row) for draft in drafts]

    def root(self, token: int) -> Origin:
        """The last token of the text, after which all drafts begin."""
        return Origin(token, dict.fromkeys(range(len(self._children)), -1))

    def after(self, origin: Origin) -> dict[int, _Proposed]:
        """The proposed tokens after a node. Estimates of several members are combined as if they were independent."""
        found: dict[int, _Proposed] = {}
        for number, parent in origin.nodes.items():
            for child, token, acceptance in self._children[number].get(parent, ()):
                one = found.get(token) or _Proposed(Origin(token, {}), 0.0, False)
                one.origin.nodes[number] = child
                accepted = 1 - (1 - one.acceptance) * (1 - acceptance)
                found[token] = _Proposed(one.origin, accepted, one.is_drawn or number >= self._first_network)
        return found


class UnproposedTokens:
    """How often copied tokens are accepted in this call that a network does not propose after the same path.

    A network has processed the text that others copy from. If it proposes other tokens, a copied one is improbable,
    unless the network has not learnt to copy, or its draft vocabulary does not have the token.
    """

    def __init__(self) -> None:
        self._expected = 1.0
        self._accepted = UNPROPOSED

    @property
    def factor(self) -> float:
        """Factor of the acceptance that the members without a forward pass estimate."""
        return min(1.0, self._accepted / self._expected)

    def observe(self, proposals: Proposals, emitted: Sequence[int]) -> None:
        """Count the tokens of a row after its accepted path, whether they were verified or not."""
        origin = proposals.root(-1)
        for token in emitted:
            proposed = proposals.after(origin)
            if any(one.is_drawn for one in proposed.values()):
                unproposed = {token: one.acceptance for token, one in proposed.items() if not one.is_drawn}
                self._expected += sum(unproposed.values())
                self._accepted += token in unproposed
            if token not in proposed:
                break
            origin = proposed[token].origin


def merged_children(
    proposals: Proposals, unproposed: float, recycling: RecyclingSession | None
) -> Callable[[Origin, int], list[tuple[int, float, Origin]]]:
    """A function that returns the children of a node of the merged tree of a row, most likely first.

    Where a network drafted, the acceptance of other tokens is multiplied by `unproposed`; elsewhere Token Recycling
    gets the probability that the others leave.
    """

    def children(origin: Origin, depth: int) -> list[tuple[int, float, Origin]]:
        proposed = proposals.after(origin)
        values = {token: one.acceptance for token, one in proposed.items()}
        origins = {token: one.origin for token, one in proposed.items()}
        if any(one.is_drawn for one in proposed.values()):
            values = {token: one.acceptance * (1 if one.is_drawn else unproposed) for token, one in proposed.items()}
        elif recycling is not None:
            rest = max(0.0, 1 - sum(values.values()))
            for token, acceptance in recycling.candidate_tokens(origin.token):
                before = values.get(token, 0.0)
                values[token] = before + rest * acceptance if before else min(rest, acceptance)
                origins.setdefault(token, Origin(token, {}))
        scale = 1 / max(1.0, sum(values.values()))
        ranked = sorted(values.items(), key=lambda one: -one[1])
        return [(token, scale * value, origins[token]) for token, value in ranked]

    return children


def node_children(draft: DraftTree, row: int) -> dict[int, list[tuple[int, int, float]]]:
    """For each node of a row's draft (-1 for the last token), its children: node, token, acceptance."""
    tokens = draft.token_lists()[row]
    parents = draft.parents[row]
    path = None if draft.probability is None else draft.probability[row]
    below: dict[int, list[tuple[int, int, float]]] = {}
    for node, parent in enumerate(parents):
        acceptance = 0.6  # assumed where a strategy estimates nothing
        if path is not None:
            above = path[parent] if parent >= 0 else 1.0
            acceptance = min(MAX_PROBABILITY, path[node] / above) if above > 0 else 0.0
        below.setdefault(parent, []).append((node, tokens[node], acceptance))
    return below
