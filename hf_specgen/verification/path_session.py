"""Sessions that accept whole paths of a draft tree: the base of rejection sampling and typical acceptance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hf_specgen.call import Call
from hf_specgen.random_state import global_generator
from hf_specgen.tree import DraftTree, children
from hf_specgen.verification.base import VerificationSession, exponential_noise


class Nodes(NamedTuple):
    """The nodes of draft trees, `[batch, nodes]`: tokens, queries of their parents, and whether each is a real node.

    A step has `[batch, queries]` logits: query 0 is the row's last token, query ``i + 1`` its node ``i``.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    are_real: torch.Tensor

    @classmethod
    def of_tree(cls, tree: DraftTree, device: torch.device) -> Nodes:
        """The tensors on a device."""
        padded = [[*(parent + 1 for parent in row), *[-1] * (tree.nodes - len(row))] for row in tree.parents]
        parents = torch.tensor(padded, dtype=torch.long, device=device)
        tokens = torch.tensor(tree.token_lists(), dtype=torch.long) if tree.keeps_placeholders else tree.tokens
        tokens = tokens.to(device)
        return cls(tokens.clamp(min=0), parents.clamp(min=0), (parents >= 0) & (tokens >= 0))


class PathSession(VerificationSession):
    """A session that accepts whole paths of a draft tree, rather than choosing a token after each node.

    Acceptance tests and bonus tokens use torch's global generator, of which the draft tokens must be independent: they
    are sampled with a generator of their own. Its seed is drawn from the global one, so a seeded run is reproducible.
    """

    def __init__(self, call: Call):
        super().__init__(call)
        devices = {torch.device("cpu"), call.state.device} if call.do_sample else ()
        generators = [global_generator(device) for device in devices]
        self._states_before = [(generator, generator.get_state()) for generator in generators]
        self._seed = int(torch.randint(2**62, ())) if call.do_sample else 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def end(self, positions: int) -> None:
        """Leave the global generators as before a call that has emitted no token: plain decoding may take over."""
        if not positions:
            for generator, state in self._states_before:
                generator.set_state(state)

    def draft_scores(
        self, scores: torch.Tensor, token_indices: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores perturbed by Gumbel noise.

        Their k largest, in descending order, are k tokens sampled from `softmax(scores)` without replacement.
        """
        device = scores.device
        scores = super().draft_scores(scores, token_indices, tokens)
        if not self.call.do_sample:
            return scores
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return scores - exponential_noise(scores.shape, device, self._generators[device]).log()

    @property
    def uses_draft_noise_only(self) -> bool:
        return not self.call.do_sample and type(self).draft_scores is PathSession.draft_scores

    @abstractmethod
    def accept(self, scores: torch.Tensor, tree: DraftTree, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept a path of each row: returns the last query on it, `[batch]`, see `Nodes`, and the token that follows.

        That token is `[batch, 1]`; or `[batch, queries]`, one after every query, of which the last accepted one's is
        used. `scores` are `[batch, queries, vocab]`, after each row's last token and after each node.
        """

    def choose(
        self,
        scores: torch.Tensor,
        token_indices: Sequence[Sequence[int]],
        tree: DraftTree,
        nodes: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        # One node of each row, as processors read the text: verify its children alone, as a tree of depth 1.
        if len(nodes[0]) == 1 and tree.nodes:
            tree = _children_only(tree, [node for [node] in nodes])
            scores = scores.expand(-1, 1 + tree.nodes, -1)
        drafted = Nodes.of_tree(tree, scores.device)
        last, following = self.accept(scores.float(), tree, drafted)
        # The token after each query: on the path that of the next node, after its last node `following`. Nodes off the
        # path write theirs to an extra query at the end, which is cut off.
        rows = torch.arange(len(last), device=last.device)
        queries = scores.shape[1]
        on_path = tree.structure().ancestors.to(last.device)[rows, last][:, 1:]  # padding comes last: never an ancestor
        chosen = pad(following.expand(-1, queries), (0, 1))
        chosen.scatter_(1, torch.where(on_path, drafted.parents, queries), drafted.tokens)
        return chosen[:, : len(nodes[0])]


def _children_only(tree: DraftTree, nodes: Sequence[int]) -> DraftTree:
    """A tree of depth 1: the children of one node of each row, with their q."""
    children_of = [children(parents) for parents in tree.parents]
    kept = [lists[node + 1] if node + 1 < len(lists) else () for lists, node in zip(children_of, nodes, strict=True)]
    tokens = [[drafted[node] for node in row] for drafted, row in zip(tree.token_lists(), kept, strict=True)]
    q = tree.q
    width = max(map(len, kept))
    if q is not None:
        q = torch.stack([q[index, [*row, *[0] * (width - len(row))]] for index, row in enumerate(kept)])
    return DraftTree(tokens, tuple((-1,) * len(row) for row in kept), q)
