"""The target's own first layers guess: no second model, one cache, nothing computed twice.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (2024), section 4.3.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import Candidates, Depth, DraftSession
from hf_specgen.depth import Policy
from hf_specgen.heads.exit_head import load_exit_head
from hf_specgen.state import Call
from hf_specgen.target.early_exit import EarlyExitTarget
from hf_specgen.target.model_parts import output_matrix
from hf_specgen.target.requirements import TargetRequirements


class LayerSkipCandidates(Candidates):
    """Guesses with the first `exit_layer` layers of the target.

    Without an adapter the target's own final norm and head read the state after those layers. That pays only for
    models that were trained to be read early; for any other model train an adapter (`recipes/train_layer_skip.py`).

    Args:
        exit_layer: how many layers draft.
        k: greatest length of a draft, in tokens; "auto" for as many as pay.
        adapter: folder or Hub id of a trained exit adapter, or a module that turns states into logits.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        ValueError: if k is out of range; at the first call, if the target cannot be divided there or the adapter was
            made for another model.

    Example:
        >>> LayerSkipCandidates(exit_layer=4, k=2)
        LayerSkipCandidates(exit_layer=4, k=2, adapter=None)
    """

    def __init__(
        self,
        exit_layer: int,
        k: Depth = "auto",
        adapter: str | nn.Module | None = None,
        *,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=8)
        self.exit_layer, self.adapter = exit_layer, adapter
        self._loaded: tuple[Any, nn.Module] | None = None

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        return TargetRequirements(exit_layer=self.exit_layer)

    def start(self, call: Call) -> DraftSession:
        if call.model is None or not isinstance(call.target, EarlyExitTarget):
            raise ValueError("LayerSkipCandidates works with generate(candidate_generator=…) only")
        return _LayerSkipSession(call, call.target, self.k, vocabulary_size(call.model), self._head_for(call.model))

    def _head_for(self, model: PreTrainedModel) -> nn.Module | None:
        """The adapter on this model, in its dtype on its device; loaded again when the model changes."""
        if not isinstance(self.adapter, str):
            return self.adapter
        weight = output_matrix(model).weight
        key = (weakref.ref(model), weight.dtype, weight.device)
        loaded = self._loaded
        if loaded is None or loaded[0] != key:
            with torch.random.fork_rng():  # a new module draws its first weights: not from the noise of the call
                head = load_exit_head(model, self.adapter)
            if head.exit_layer != self.exit_layer:
                raise ValueError(
                    f"the adapter {self.adapter!r} was trained for exit_layer={head.exit_layer}, got {self.exit_layer}"
                )
            loaded = self._loaded = key, head
        return loaded[1]

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        adapter = self.adapter if isinstance(self.adapter, str) else type(self.adapter).__qualname__
        return (type(self).__qualname__, self.exit_layer, adapter, self.k)

    def __repr__(self) -> str:
        settings = f"exit_layer={self.exit_layer}, k={self.k}, adapter={self.adapter!r}{self._show_policy()}"
        return f"LayerSkipCandidates({settings})"


class _LayerSkipSession(AutoregressiveSession):
    def __init__(self, call: Call, target: EarlyExitTarget, k: int, vocab: int, head: nn.Module | None):
        super().__init__(call, k, 0.0, vocab)
        self._target, self._head = target, head

    def first_scores(self) -> torch.Tensor:
        """Run the first layers on each row's last token, or on the prompt if that has not been read."""
        texts = self.call.state.generated
        if not any(texts):
            return self._scores(*self._target.prefill_early())
        return self.next_scores(torch.tensor([text[-1] for text in texts]))

    def next_scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the first layers on the last draft tokens."""
        return self._scores(*self._target.run_early(tokens, with_logits=self._head is None))

    def _scores(self, state: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        if self._head is not None:
            return self._head(state)[:, -1]
        assert logits is not None
        return logits
