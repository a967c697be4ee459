"""Medusa and Hydra: extra heads predict the tokens after the next one from the target's last hidden state.

Drafting takes no forward pass of a model: all heads read the state that chose a row's last token. Each head proposes
tokens for one depth, independent of the path before it; the best combinations form a tree. Heads that read the path
before their token (Hydra) propose the children of given nodes instead, level by level.

Sources: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024); Ankner
et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import Depth, DraftCall, DraftSession, PretrainedCandidates, Tree
from hf_specgen.candidates.draft_heads import BoundModules, check_head, number_of
from hf_specgen.candidates.growth import Floats
from hf_specgen.candidates.head_sessions import DEFAULT_NODES, IndependentHeadsSession, with_q
from hf_specgen.depth import Policy
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.lora import load_lora
from hf_specgen.heads.medusa import (
    RANKS,
    Acceptance,
    MedusaConfig,
    MedusaHeads,
    MedusaRunner,
    check_heads,
    confidence_bin,
)
from hf_specgen.heads.medusa_formats import load_medusa
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.model_parts import output_matrix
from hf_specgen.targets.requirements import OUTPUT_STATE, TargetRequirements, check_decoder_only
from hf_specgen.tree import DraftTree, Parents, children, merge_paths

Paths = Sequence[Sequence[int]]


class MedusaCandidates(PretrainedCandidates):
    """Drafts with Medusa heads.

    Args:
        heads: loaded heads, or a folder or Hub id of heads in any known format (our own, Medusa v1 and v2, TGI, vLLM).
        k: maximum depth of a draft, in tokens, up to the number of heads; "auto" adapts it to acceptance and latency.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the size of every tree. Left out, it is "auto" with k="auto", and with a number for
            k the draft is a chain of k tokens. A list of paths such as `[[0], [0, 0], [1]]` is a fixed tree: each path
            names the rank of a token of head 0, of head 1, …
        lora: the `PeftModel` of deltas on the output matrix, for heads that are given loaded and were trained so.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        TypeError: if `heads` are neither loaded heads nor a path.
        ValueError: for an invalid tree; at the first call, if the heads do not fit the target.

    Example:
        >>> MedusaCandidates("org/medusa-heads", k=3, tree=[[0], [1], [0, 0]])
        MedusaCandidates('org/medusa-heads', k=3, tree=[[0], [1], [0, 0]])
    """

    def __init__(
        self,
        heads: MedusaHeads | str | Path,
        k: Depth = "auto",
        *,
        tree: Tree | Paths = None,
        lora: Any = None,
        policy: Policy | None = None,
    ):
        check_head("MedusaCandidates", heads, MedusaHeads)
        self._heads = heads if isinstance(heads, MedusaHeads) else None
        self._name = str(heads if self._heads is None else self._heads.name_or_path)
        depth = 8 if self._heads is None else self._heads.config.num_heads  # published sets have at most 5 heads
        super().__init__(k, policy, max_k=depth)
        if tree is None or isinstance(tree, str | int):
            self._set_tree(tree, k)
        else:
            RankTree.from_paths(tree)
            self.tree = tree
        self.adaptive_tree = True  # one pass drafts all depths
        self._lora = lora
        self._bound: BoundModules[MedusaRunner] = BoundModules()

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        check_decoder_only(model, "MedusaCandidates")
        self._on(model)
        return TargetRequirements((OUTPUT_STATE,))

    def start(self, call: DraftCall) -> DraftSession:
        if call.model is None or not isinstance(call.target, HiddenStateTarget):
            raise ValueError("MedusaCandidates works with generate(candidate_generator=…) only")
        runner = self._on(call.model)
        config, tree = runner.heads.config, self.tree
        if config.reads_path and (tree is None or isinstance(tree, str | int)):
            return HydraSession(call, call.target, runner, cast(Tree, tree))
        chain = [[0] * depth for depth in range(1, 1 + min(self.k, config.num_heads))]
        return MedusaSession(call, call.target, runner, chain if tree is None else tree)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """By name; heads that were given loaded may be any, and are identified by the object."""
        name = self._name if self._heads is None else f"{self._name} {number_of(self._heads)}"
        return ("medusa", name, repr(self.tree), self.k)

    def _on(self, model: PreTrainedModel) -> MedusaRunner:
        """The heads on their target, in its dtype on its device."""
        return self._bound.on(model, lambda: self._bind(model, output_matrix(model).weight))

    def _bind(self, model: PreTrainedModel, weight: torch.Tensor) -> MedusaRunner:
        heads: Any = load_medusa(self._name, model) if self._heads is None else copy.deepcopy(self._heads)
        heads.config.vocab_size = heads.config.vocab_size or weight.shape[0]
        check_heads(heads.config, model, f"the set of heads {self._name!r}")
        _check_fits(self.tree, heads.config)
        lora = self._lora
        if lora is None and heads.config.lora_rank:
            lora = load_lora(output_matrix(model), heads.config.num_heads, self._name)
        return MedusaRunner(heads.to(device=weight.device, dtype=weight.dtype).eval(), model, lora)

    def __repr__(self) -> str:
        return f"MedusaCandidates({self._name!r}, k={self.k}{self._show(tree=self.tree)})"


class MedusaSession(IndependentHeadsSession):
    """The state of one call."""

    passes = ()  # heads run once per draft: the overhead of a draft

    def __init__(self, call: DraftCall, target: HiddenStateTarget, runner: MedusaRunner, tree: str | int | Paths):
        config = runner.heads.config
        ranks = min(RANKS, config.vocab_size)
        super().__init__(call, config.num_heads, tree if isinstance(tree, str | int) else 0, ranks)
        self._target, self._runner = target, runner
        self._paths = None if isinstance(tree, str | int) else RankTree.from_paths(tree)
        measured = config.acceptance
        self._prior = None if measured is None else Acceptance.from_lists(measured).cut(config.vocab_size)
        if self._paths is not None:
            self.ranks = max(self.ranks, self._paths.width)

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if self._paths is None:
            return super().draft(max_depths)
        if max(max_depths) == 0:
            return self.not_drafted(len(max_depths))
        scores, tokens, _ = self.ranked_tokens(self.depth_logits(max(max_depths)))
        return self._fixed(self._paths, max_depths, tokens, scores)

    def depth_logits(self, depth: int) -> torch.Tensor:
        """All heads read the state that chose each row's last token."""
        pending = torch.tensor([[text[-1]] for text in self.call.state.generated])
        return self._runner.logits(self._target.states_of((OUTPUT_STATE,)), pending).float()

    def acceptance(self, confidence: Floats) -> Floats:
        """By calibration; the prior is the acceptance measured with the heads, where their config contains it."""
        if self._prior is None:
            return super().acceptance(confidence)
        heads = []
        for head, calibration in enumerate(self.calibrations):
            tables = [self._prior.table[head][confidence_bin(row[0])] for row in confidence[:, head]]
            prior = np.zeros_like(confidence[:, head])
            prior[:, : len(tables[0])] = [table[: self.ranks] for table in tables]
            heads.append(calibration.acceptance(confidence[:, head], prior))
        return np.stack(heads, axis=1)

    def _fixed(self, paths: RankTree, max_depths: Sequence[int], tokens: Any, scores: torch.Tensor) -> DraftTree:
        """The draft with a fixed tree of ranks, cut to each row's depth."""
        trees = [paths.cut(depth) for depth in max_depths]
        if self.wants_q:
            trees = [tree.drawn_in_order for tree in trees]
        chosen = tokens.tolist()
        draft = DraftTree.from_nodes(
            [
                ([chosen[row][head][rank] for head, rank in zip(tree.heads, tree.ranks, strict=True)], tree.parents)
                for row, tree in enumerate(trees)
            ]
        )
        self._features = []
        return with_q(draft, [list(tree.heads) for tree in trees], scores) if self.wants_q and draft.nodes else draft


class HydraSession(AutoregressiveSession):
    """The state of one call with heads that read the path before their token: trees that grow by a head per level."""

    def __init__(self, call: DraftCall, target: HiddenStateTarget, runner: MedusaRunner, tree: Tree):
        config = runner.heads.config
        has_latency = call.depth is not None and call.depth.latency is not None
        size = DEFAULT_NODES if tree == "auto" and not has_latency else tree  # as that of other Medusa heads
        super().__init__(call, config.num_heads, size, 0.0, config.vocab_size)
        self._target, self._runner = target, runner

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        """An empty draft: the target has not computed any hidden states yet."""
        return self.not_drafted(len(max_depths))

    def first_scores(self) -> torch.Tensor:
        """The logits of head 0; it reads each row's last token. The overhead of a draft is the latency of this pass."""
        last = torch.tensor([[text[-1]] for text in self.call.state.generated])
        states = self._target.states_of((OUTPUT_STATE,))
        self._paths = last.to(states.device)[:, None]  # [batch, nodes, tokens] from each row's last token to the nodes
        return cast(torch.Tensor, self._runner(0, states, self._paths))[:, 0]

    def next_scores(self, tree: GrownTree, new: int) -> torch.Tensor:
        """The logits after each of the last nodes, by the head of their depth."""
        self._paths = torch.cat([tree.of_parents(self._paths), tree.tokens[:, -new:, None]], dim=2)
        states = self._target.states_of((OUTPUT_STATE,))
        return cast(torch.Tensor, self._runner(tree.level, states, self._paths))


def _check_fits(tree: Tree | Paths, config: MedusaConfig) -> None:
    if tree is None or isinstance(tree, str | int):
        return
    if config.reads_path:
        raise ValueError(
            "a list of paths needs heads that draft all depths at once, but these read the path before their token "
            '(reads_path=True); use tree="auto" or a number of nodes'
        )
    ranks = RankTree.from_paths(tree)
    if ranks.depth > config.num_heads:
        raise ValueError(f"the tree is {ranks.depth} deep, but there are {config.num_heads} heads; shorten its paths")
    if ranks.width > config.vocab_size:
        raise ValueError(f"the tree has rank {ranks.width - 1}, but the vocabulary ends at {config.vocab_size - 1}")


@dataclass(frozen=True)
class RankTree:
    """A fixed tree of ranks: a node at depth d is a token of head d - 1.

    Example:
        >>> tree = RankTree.from_paths([[0, 1], [0], [1]])
        >>> tree.ranks, tree.parents, tree.heads
        ((0, 1, 1), (-1, -1, 0), (0, 0, 1))
    """

    ranks: tuple[int, ...]
    parents: Parents

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> RankTree:
        """From lists of ranks in any order; every path's beginning has to be a path too."""
        if not isinstance(paths, Sequence) or not all(isinstance(path, Sequence) for path in paths):
            raise ValueError(f"a tree is a list of paths such as [[0], [0, 0]], got {paths!r}")
        known = {tuple(path) for path in paths}
        if not known:
            raise ValueError("the tree has no paths; give at least [[0]]")
        for path in known:
            if not path or not all(isinstance(rank, int) and rank >= 0 for rank in path):
                raise ValueError(f"the path {list(path)} is not a list of ranks, which begin at 0")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"the tree has the path {list(path)} but not its beginning {list(path[:-1])}; add it")
        ranks, parents = merge_paths(sorted(known, key=lambda path: (len(path), path)))
        return cls(tuple(ranks), parents)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The head of each node."""
        heads: list[int] = []
        for parent in self.parents:
            heads.append(0 if parent < 0 else heads[parent] + 1)
        return tuple(heads)

    @property
    def depth(self) -> int:
        return max(self.heads) + 1 if self.ranks else 0

    @property
    def width(self) -> int:
        """How many ranks of a head it uses."""
        return max(self.ranks) + 1 if self.ranks else 0

    def cut(self, depth: int) -> RankTree:
        """The tree without what lies deeper than `depth`."""
        return self if depth >= self.depth else _cut(self, depth)

    @cached_property
    def drawn_in_order(self) -> RankTree:
        """The same shape, in which the children of a node are its head's first ranks, without gaps.

        Rejection sampling verifies siblings in the order in which they were drawn; none may be left out.
        """
        ranks = list(self.ranks)
        for siblings in children(self.parents):
            for rank, node in enumerate(siblings):
                ranks[node] = rank
        return RankTree(tuple(ranks), self.parents)


@lru_cache(maxsize=4096)
def _cut(tree: RankTree, depth: int) -> RankTree:
    kept = [node for node, head in enumerate(tree.heads) if head < depth]
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return RankTree(tuple(tree.ranks[node] for node in kept), tuple(place[tree.parents[node]] for node in kept))
