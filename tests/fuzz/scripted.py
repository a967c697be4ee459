"""Drafters that know the answer or nothing, and a policy of any depths; written as an extension author would."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specgen import Call, Candidates, DraftBatch, DraftSession, DraftTree, Policy, PolicySession

Nodes = tuple[list[int], tuple[int, ...]]
"""Tokens and parents of a row's draft tree; parent -1 continues the row."""

Script = Callable[[int, list[int], int], Nodes]
"""Proposes tokens for one row, given its number, its generated tokens and the depth; one object a call."""


class Scripted(Candidates):
    """Proposes what a script says, which is made anew for each call."""

    def __init__(self, start_script: Callable[[], Script], k: int, policy: Policy | None, fault: str = ""):
        super().__init__(k, policy)
        self._start_script, self._fault = start_script, fault

    def start(self, batch: DraftBatch) -> DraftSession:
        return _ScriptedSession(batch, self._start_script(), self._fault)


class _ScriptedSession(DraftSession):
    def __init__(self, batch: DraftBatch, script: Script, fault: str):
        super().__init__(batch)
        self._script, self._fault = script, fault

    def draft(self, budget: Sequence[int]) -> DraftTree:
        rows = enumerate(zip(self.batch.state.generated, budget, strict=True))
        nodes = [self._script(row, generated, depth) if depth else ([], ()) for row, (generated, depth) in rows]
        return faulty_tree(self._fault, nodes) if self._fault and any(budget) else DraftTree.from_nodes(nodes)


NO_TOKEN = {"negative_id": -5, "large_id": 1000}
"""Ids outside of every vocabulary."""


def faulty_tree(fault: str, nodes: list[Nodes]) -> Any:
    """What a drafter returns that draws random numbers or whose tokens, rows or type are wrong."""
    if fault == "draws":
        torch.rand(3)
    if fault == "no_tree":
        return [tokens for tokens, _ in nodes]
    if fault in NO_TOKEN:
        nodes = [([NO_TOKEN[fault], *tokens[1:]] if tokens else tokens, parents) for tokens, parents in nodes]
    if fault == "extra_row":
        nodes = [*nodes, nodes[-1]]
    tree = DraftTree.from_nodes(nodes[:-1] if fault == "missing_row" else nodes)
    return DraftTree(tree.tokens.float(), tree.parents) if fault == "float_ids" else tree


class FaultyLookup(PromptLookupCandidateGenerator):
    """Transformers' prompt lookup, whose ids are wrong."""

    def __init__(self, fault: str, **settings: Any):
        super().__init__(**settings)
        self._fault = fault

    def get_candidates(self, input_ids: torch.Tensor) -> tuple[Any, None]:
        fault, width = self._fault, input_ids.shape[1]
        ids = torch.cat([super().get_candidates(input_ids)[0], input_ids[:, -1:]], dim=1)
        if fault == "draws":
            torch.rand(3)
        if fault in NO_TOKEN:
            ids[:, width] = NO_TOKEN[fault]
        rows: dict[str, Any] = {"extra_row": torch.cat([ids, ids]), "missing_row": ids[:0], "no_tree": None}
        return rows.get(fault, ids.float() if fault == "float_ids" else ids), None


def spoil_scores(fault: str, scores: torch.Tensor) -> None:
    """Make scores `[…, candidates]` of a drafter NaN or infinite, in place; "one_nan": that of one token in one row."""
    last = scores.shape[-1] - 1  # a head may have few candidates
    if fault == "inf":
        scores[..., min(7, last)] = float("inf")
    elif fault == "one_nan":
        scores[(0,) * (scores.dim() - 1)][min(5, last)] = float("nan")
    elif fault:
        scores.fill_(float("nan") if fault == "nan" else float("-inf"))


class RandomDepths(Policy):
    """Any depth in any row at any step, plain steps included."""

    def __init__(self, seed: int = 0):
        self._seed = seed

    def start(self, call: Call) -> PolicySession:
        return _RandomDepthsSession(Random(self._seed), call.drafting.k)


class _RandomDepthsSession(PolicySession):
    def __init__(self, random: Random, k: int):
        self._random, self._k = random, k

    def depths(self, limits: Sequence[int]) -> list[int]:
        if self._random.random() < 0.2:
            return [0] * len(limits)
        return [self._random.choice((0, 1, 2, self._k, self._k)) for _ in limits]
