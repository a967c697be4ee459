"""Medusa: extra heads guess the tokens after the next one from the target's last state, as a tree.

Drafting takes no forward pass of any model: the state that chose a row's last token is still there, and all heads read
it at once. Each head gives a few guesses; the tree says which of their combinations are verified.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.candidates.rank_tree import RankTree
from hf_specgen.candidates.tree_plan import MAX_NODES, UNMEASURED, ConfidentTree, FixedTree, StepCost, TreePlan
from hf_specgen.depth import CostCurve, Policy
from hf_specgen.heads.acceptance import RANKS, Acceptance
from hf_specgen.heads.compatibility import check_heads
from hf_specgen.heads.formats import load_medusa
from hf_specgen.heads.lora import load_lora
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.heads.medusa_runner import MedusaRunner
from hf_specgen.state import Call
from hf_specgen.target.hidden_states import HiddenStateTarget
from hf_specgen.target.model_parts import output_matrix
from hf_specgen.target.requirements import OUTPUT_STATE, TargetRequirements
from hf_specgen.tree import DraftTree

Paths = Sequence[Sequence[int]]
MOST_HEADS = 8
"""How deep a draft is taken to be as long as the heads have not been loaded."""


class MedusaCandidates(Candidates):
    """Guesses with Medusa heads.

    Args:
        heads: loaded heads, or a folder or Hub id of heads in any known format (our own, Medusa v1 and v2, TGI, vLLM).
        tree: "auto" verifies at each step the tree that promises most tokens per second, by how sure the heads are
            (from what `hf-specgen tune` measured and saved with the heads; from rough assumptions without that). A
            number is how many guesses to verify at each step. A list of paths such as `[[0], [0, 0], [1]]` is a fixed
            tree: each path names the rank of a guess of head 0, then of head 1, and so on.
        lora: the `PeftModel` of deltas on the output matrix, for heads that are given loaded and were trained so.
        policy: how deep the tree may be, step by step; see `hf_specgen.depth`. With a `Controller`, as "auto" has
            one, trees are sized by what steps cost here and now, and none is made where none pays.

    Raises:
        ValueError: for something that is no tree; at the first call, if the heads were made for another target.

    Example:
        >>> MedusaCandidates("org/medusa-heads", tree=[[0], [1], [0, 0]])
        MedusaCandidates('org/medusa-heads', tree=[[0], [1], [0, 0]])
    """

    adaptive_tree = True

    def __init__(
        self,
        heads: MedusaHeads | str | Path,
        tree: str | int | Paths = "auto",
        *,
        lora: Any = None,
        policy: Policy | None = None,
    ):
        _check_tree(tree)
        self.tree = tree
        named = isinstance(heads, str | Path)
        self._heads = None if named else cast(MedusaHeads, heads)
        self._name = str(heads if self._heads is None else self._heads.name_or_path)
        most = MOST_HEADS if self._heads is None else self._heads.config.num_heads
        super().__init__("auto" if tree == "auto" else most, policy, max_k=most)
        self._lora = lora
        self._attached: tuple[Any, MedusaRunner, TreePlan] | None = None

    @classmethod
    def from_pretrained(cls, heads: str, tree: str | int | Paths = "auto") -> MedusaCandidates:
        """`MedusaCandidates(heads, tree)`, in the words of Transformers; the heads are loaded at the first call."""
        return cls(heads, tree)

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        self._on(model)
        return TargetRequirements(taps=(OUTPUT_STATE,))

    def start(self, call: Call) -> DraftSession:
        if call.model is None or not isinstance(call.target, HiddenStateTarget):
            raise ValueError("MedusaCandidates works with generate(candidate_generator=…) only")
        return MedusaSession(call, call.target, *self._on(call.model))

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        return (type(self).__qualname__, self._name, repr(self.tree), self.k)

    def _on(self, model: PreTrainedModel) -> tuple[MedusaRunner, TreePlan]:
        """The heads on their target, in its dtype on its device, and their trees; kept until the target changes."""
        weight = output_matrix(model).weight
        key = (id(model), weight.dtype, weight.device)
        if self._attached is None or self._attached[0] != key:
            with torch.random.fork_rng():  # new modules draw their first weights: not from the noise of the call
                reader = self._attach(model, weight)
            self._attached = key, reader, self._plan(reader.heads.config)
        return self._attached[1:]

    def _attach(self, model: PreTrainedModel, weight: torch.Tensor) -> MedusaRunner:
        heads: Any = load_medusa(self._name, model) if self._heads is None else copy.deepcopy(self._heads)
        heads.config.vocab_size = heads.config.vocab_size or weight.shape[0]
        check_heads(heads.config, model, f"the set of heads {self._name!r}")
        lora = self._lora
        if lora is None and heads.config.lora_rank:
            lora = load_lora(output_matrix(model), heads.config.num_heads, self._name)
        return MedusaRunner(heads.to(device=weight.device, dtype=weight.dtype).eval(), model, lora)

    def _plan(self, config: MedusaConfig) -> TreePlan:
        if not isinstance(self.tree, str | int):
            return FixedTree(self.tree, config.num_heads, config.vocab_size)
        measured = config.acceptance
        acceptance = Acceptance.from_lists(measured) if measured else Acceptance.untuned(config.num_heads)
        acceptance = acceptance.cut(config.vocab_size)
        if isinstance(self.tree, int):
            return ConfidentTree(acceptance, budget=self.tree)
        cost = CostCurve.from_json(json.dumps(config.cost)) if config.cost else UNMEASURED
        return ConfidentTree(acceptance, cost)

    def __repr__(self) -> str:
        return f"MedusaCandidates({self._name!r}, tree={self.tree!r}{self._show_policy()})"


def _check_tree(tree: Any) -> None:
    if isinstance(tree, str) and tree != "auto":
        raise ValueError(f'tree must be "auto", a number of nodes or a list of paths, got {tree!r}')
    if isinstance(tree, int) and (isinstance(tree, bool) or tree < 1):
        raise ValueError(f"tree must have at least 1 node, got {tree}")
    if not isinstance(tree, str | int):
        RankTree.from_paths(tree)


class MedusaSession(DraftSession):
    """The state of one call.

    Args:
        call: the call.
        target: keeps the states that the heads read.
        reader: the heads on their target.
        plan: chooses the tree.
    """

    def __init__(self, call: Call, target: HiddenStateTarget, reader: MedusaRunner, plan: TreePlan):
        super().__init__(call)
        self._target, self._reader, self._plan = target, reader, plan
        self.ranks = min(RANKS, reader.heads.config.vocab_size)
        if isinstance(plan, FixedTree):
            self.ranks = max(self.ranks, plan.tree((), 1).width)

    @torch.no_grad()
    def draft(self, budget: Sequence[int]) -> DraftTree:
        if max(budget) == 0:
            return DraftTree.empty(len(budget))
        scores, tokens, confidences = self.head_tokens()
        rows = sum(depth > 0 for depth in budget)
        cost = self._step_cost(rows)
        trees = [
            self._plan.tree(confidence, rows, cost).cut(depth)
            for confidence, depth in zip(confidences, budget, strict=True)
        ]
        wants_q = self._wants_q
        if wants_q:
            trees = [tree.drawn_in_order for tree in trees]
        nodes = max(len(tree.ranks) for tree in trees)
        places = torch.zeros(len(trees), nodes, dtype=torch.long)
        for row, tree in enumerate(trees):
            places[row, : len(tree.ranks)] = tree.places(self.ranks)
        places = places.to(tokens.device)
        q = None
        if wants_q:
            index = (places // self.ranks).unsqueeze(-1).expand(-1, -1, scores.shape[-1])
            q = scores.softmax(dim=-1).gather(1, index)  # [batch, nodes, vocab]
        return DraftTree(tokens.flatten(1).gather(1, places), tuple(tree.parents for tree in trees), q)

    def head_tokens(self) -> tuple[torch.Tensor, torch.Tensor, list[list[float]]]:
        """Run the heads.

        Returns:
            `[batch, heads, vocab]` scores after the score-only processors; `[batch, heads, ranks]` tokens, the best
            first; `[batch][heads]` the confidence of each head in its first token.
        """
        generated = self.call.state.generated
        pending = torch.tensor([text[-1] for text in generated])
        logits = self._reader.logits(self._target.states, pending).float()  # [batch, heads, vocab]
        verification, processors = self.call.verification, self.call.processors
        assert verification is not None and processors is not None
        scores = processors.warp(logits.flatten(0, 1)).view(logits.shape)
        steps = [range(len(text), len(text) + logits.shape[1]) for text in generated]
        weights = verification.draft_weights(scores, steps)
        best, tokens = weights.topk(self.ranks, dim=-1)
        # In rejection sampling the shape of the tree must not depend on the sampled tokens.
        confidence = scores.softmax(dim=-1).amax(dim=-1) if self._wants_q else best[..., 0] / weights.sum(dim=-1)
        return scores, tokens, confidence.tolist()

    def _step_cost(self, rows: int) -> StepCost | None:
        """The latency of a step by its number of draft nodes, if the policy has a latency model."""
        latency = None if self.call.depth is None else self.call.depth.latency
        if latency is None:
            return None
        state = self.call.state
        context = max(len(p) + len(g) for p, g in zip(state.prompts, state.generated, strict=True))
        tokens = rows * (1.0 + np.arange(MAX_NODES + 1))
        return StepCost.rounded(latency.at(rows, context).target.by_tokens(tokens))

    @property
    def _wants_q(self) -> bool:
        return self.call.verification is not None and self.call.verification.wants_q
