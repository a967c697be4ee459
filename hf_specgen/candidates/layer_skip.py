"""Layer skip: drafts with the target's own first layers, whose states and cache entries verification uses again.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (2024), section 4.3.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.call import checked_count
from hf_specgen.candidates.base import Depth, DraftSession, PretrainedCandidates, TreeSetting
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_heads import BoundModules
from hf_specgen.candidates.drafter_session import DrafterSession
from hf_specgen.depth import Policy
from hf_specgen.device_tree import Frontier, PassTree
from hf_specgen.drafter import Drafter
from hf_specgen.heads.exit_head import exit_layer_of, load_exit_head
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.requirements import TargetRequirements, check_decoder_only
from hf_specgen.tree import DraftTree


class LayerSkipCandidates(PretrainedCandidates):
    """Drafts with the first `exit_layer` layers of the target.

    Without an adapter the target's own final norm and head read the state after those layers. That is only faster for
    models that were trained for early exit; for any other model train an adapter (`recipes/train_layer_skip.py`).

    Args:
        exit_layer: how many layers draft.
        adapter: folder or Hub id of a trained exit adapter, or a module that turns states into logits.
        k, tree, policy: as for `Candidates`.

    Raises:
        ValueError: if k is out of range or exit_layer no integer; at the first call, if the target cannot be divided
            there or the adapter was made for another model.

    Example:
        >>> LayerSkipCandidates(exit_layer=4, k=2)
        LayerSkipCandidates(exit_layer=4, k=2)
    """

    latency_kind = "layer_skip"
    arguments = dict.fromkeys(("exit_layer", "k", "adapter", "tree"))

    def __init__(
        self,
        exit_layer: int,
        k: Depth = "auto",
        adapter: str | os.PathLike[str] | nn.Module | None = None,
        *,
        tree: TreeSetting = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, tree=tree, max_k=8)
        self.exit_layer = checked_count("exit_layer", exit_layer, 1, "layers")
        self.adapter = os.fspath(adapter) if isinstance(adapter, os.PathLike) else adapter
        self._bound: BoundModules[nn.Module] = BoundModules()

    @classmethod
    def of_checkpoint(cls, name: str, **settings: Any) -> Self:
        return cls(exit_layer_of(name), adapter=name, **settings)

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        check_decoder_only(model, "LayerSkipCandidates")
        return TargetRequirements(exit_layer=self.exit_layer)

    def start(self, batch: DraftBatch) -> DraftSession:
        drafter = EarlyExitDrafter(batch, self._head_on(batch.model))
        return DrafterSession(batch, drafter, self.k, self.tree)

    def _head_on(self, model: PreTrainedModel) -> nn.Module | None:
        """The adapter for this model, in its dtype on its device; None without an adapter."""
        if not isinstance(self.adapter, str):
            return self.adapter
        adapter = self.adapter

        def load() -> nn.Module:
            if (trained := exit_layer_of(adapter)) != self.exit_layer:
                raise ValueError(
                    f"the exit adapter {adapter!r} was trained for exit_layer={trained}, not {self.exit_layer}; "
                    f"give exit_layer={trained} or an adapter for layer {self.exit_layer}"
                )
            return load_exit_head(model, adapter)

        return self._bound.on(model, load)


class EarlyExitText(NamedTuple):
    """The last token of each row, `[batch, 1]`, for one draft; `active` are the rows that have not ended."""

    tokens: torch.Tensor
    active: list[bool]
    depths: Sequence[int]
    tokens_per_pass: list[int]


class EarlyExitDrafter(Drafter[EarlyExitText]):
    """Drafts with the first layers of an `EarlyExitTarget`, whose states verification uses again.

    The head turns states into logits; None for the target's own norm and output matrix.
    """

    expanded_nodes_first = True  # as `EarlyExitTarget.forward` expects

    def __init__(self, batch: DraftBatch, head: nn.Module | None):
        super().__init__()
        self._batch = batch
        self._target = cast(EarlyExitTarget, batch.target)
        self._head = head
        self.modules = () if head is None else (head,)

    def take_uncached(self, max_depths: Sequence[int]) -> EarlyExitText | None:
        """The last token of each row; None if no row drafts."""
        if not any(max_depths):
            return None
        pending = torch.tensor(self._batch.state.pending())[:, None]
        passes = [sum(depth > 0 for depth in max_depths)]
        return EarlyExitText(pending, self._batch.is_active(), max_depths, passes)

    def forward_text(self, text: EarlyExitText) -> torch.Tensor:
        """Run the first layers on each row's last token: `[batch, vocab]` logits."""
        return self._logits(DraftTree.empty(self._batch.state.batch), text.tokens, text.active)[:, -1]

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        """Run the first layers on the last nodes of a tree: `[batch, new, vocab]` logits."""
        return self._logits(frontier, frontier.tokens)

    def _logits(self, tree: PassTree, tokens: torch.Tensor, active: Sequence[bool] | None = None) -> torch.Tensor:
        state, logits = self._target.run_early(tree, tokens, active, with_logits=self._head is None)
        if self._head is not None:
            logits = self._head(state)
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != state.shape[:-1]:
            name = self._batch.call.drafting.name
            raise ValueError(f"the adapter of {name} must return logits {[*state.shape[:-1], '…']}")
        return logits
