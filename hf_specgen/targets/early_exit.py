"""A target for self-speculative decoding: its first layers draft, the others verify, and both share one cache.

    draft:   embed ─► layer 0 … E-1 ─┬─► norm ─► head ─► draft token
                                     └─ kept
    verify:                             kept ─► layer E … L-1 ─► norm ─► head ─► logits

Source: Elhoushi et al., "LayerSkip" (2024), section 4.3 (self-speculative decoding with a shared cache).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.device_tree import PassTree
from hf_specgen.targets.inputs import PreparedCall
from hf_specgen.targets.model_parts import decoder, decoder_layers, keeps_state
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

IN_USE = (
    "another thread is running a part of this model's layers (LayerSkipCandidates); run calls with layer skip on one "
    "model one after the other, or use a candidate generator that may run in several threads"
)

_switching = threading.Lock()


class EarlyExitTarget(Target):
    """A `Target` whose first `exit_layer` layers can run separately."""

    reuses_drafter_states = True

    def __init__(self, prepared: PreparedCall, exit_layer: int):
        self._layers = divisible_layers(prepared.model, exit_layer)
        super().__init__(prepared)
        self._first = range(exit_layer)
        self._last = range(exit_layer, len(self._layers))
        self._replaceable = ReplaceableLayers(self._layers)
        self._states: list[torch.Tensor] = []
        self._active: Sequence[bool] | None = None  # in this step

    def run_early(
        self, tree: PassTree, tokens: torch.Tensor, active: Sequence[bool] | None = None, with_logits: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the first layers on the last tokens of a draft, `[batch, new]`; of an empty one on each row's last.

        `active` are the rows that take part in the step, which begins with the empty tree. Returns `[batch, new,
        hidden]` the input of layer E, and `[batch, new, vocab]` the model's own logits from it, if wanted.
        """
        cached = 1 + tree.nodes - tokens.shape[1]
        if not cached:
            self._starts = self.cache.lengths
            self._active = active
        with self._replaceable.replaced(self._last):
            module = self.model if with_logits else decoder(self.model)
            outputs = self._run(module, tree, {"input_ids": tokens.to(self.device)}, self._active, cached)
        state = self._replaceable.read_by(self._last[0])
        if state.dim() != 3:  # an index out of bounds would cause a device-side assert, which ends the CUDA context
            raise ValueError(
                f"the layers of {type(self.model).__name__} pass on a state of shape {tuple(state.shape)} instead of "
                "one vector for each token"
            )
        self._states.append(self._layout.scatter(state, tree.batch))
        return self._states[-1], self._layout.scatter(outputs.logits, tree.batch) if with_logits else None

    def forward(self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        """`Target.forward` from the states that drafting has kept, of the first nodes of the tree in their order."""
        if not self._states:
            return super().forward(tree, pending, active)
        drafted = sum(states.shape[1] for states in self._states[1:])
        if drafted < tree.nodes:
            self.run_early(tree, tree.tokens[:, drafted:].to(self.device), with_logits=False)
        states = torch.cat(self._states, dim=1)  # [batch, 1 + nodes, hidden]
        self._states.clear()
        self.cache.set_lengths(self._starts)
        present = self._layout.select(tree, {"states": states})[1]["states"]
        with self._replaceable.replaced(self._first, present):
            # The ids again, though the replaced layers ignore them: later ones may read inputs of their own from them.
            logits = self._run(self.model, tree, {"input_ids": tree.step_tokens(pending, self.device)}, active).logits
        return self._layout.scatter(logits, tree.batch)


def divisible_layers(model: PreTrainedModel, exit_layer: int) -> nn.ModuleList:
    """The decoder layers of a model that has a layer `exit_layer` and no recurrent state; else raises."""
    layers = decoder_layers(model)
    if keeps_state(model.config.get_text_config()):
        raise ValueError(
            f"{type(model).__name__} has layers with convolutions or recurrent states, which would read rejected draft "
            "tokens before verification; use another candidate generator than LayerSkipCandidates"
        )
    if not 1 <= exit_layer < len(layers):
        last = len(layers) - 1
        raise ValueError(
            f"exit_layer must be from 1 to {last} for {type(model).__name__}, got {exit_layer}; give one in this range"
        )
    source = _first_shared_layer(model.config.get_text_config())
    if exit_layer > source:
        remedy = f"set exit_layer to at most {source}, or " if source else ""
        raise ValueError(
            f"the last layers of {type(model).__name__} reuse keys and values that layer {source} computes in the same "
            f"pass, so that it cannot run apart from them; {remedy}use another candidate generator"
        )
    return layers


def _first_shared_layer(config: Any) -> int:
    """The first layer whose keys and values later layers reuse, as in Gemma 3n and 4; the number of layers if none."""
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    types = config.layer_types if own < config.num_hidden_layers else []
    sources = [max(layer for layer in range(own) if types[layer] == kind) for kind in {*types[own:]} & {*types[:own]}]
    return min(sources, default=config.num_hidden_layers)


class ReplaceableLayers:
    """The layers of a model, any of which can be left out of a pass; the list is the model's, of unchanged length."""

    def __init__(self, layers: nn.ModuleList):
        self._layers = layers
        self._pass_through = [_PassThrough(layer) for layer in layers]

    @contextmanager
    def replaced(self, indices: range, states: torch.Tensor | None = None) -> Iterator[None]:
        """Inside, these layers return their input, and the last one `states` if given.

        Models may add positions to their input or scale it, so that what the first layer reads is not `states`.

        Raises:
            RuntimeError: if another thread has replaced one of them.
        """
        with _switching:
            originals = [self._layers[index] for index in indices]
            if any(isinstance(layer, _PassThrough) for layer in originals):
                raise RuntimeError(IN_USE)
            for index in indices:
                self._pass_through[index].owner = threading.get_ident()
                self._layers[index] = self._pass_through[index]
        self._pass_through[indices[-1]].returned = states
        hook = self._layers[0].register_forward_hook(self._detect_output_type)
        try:
            yield
        finally:
            hook.remove()
            self._pass_through[indices[-1]].returned = None
            for index, layer in zip(indices, originals, strict=True):
                self._layers[index] = layer

    def read_by(self, index: int) -> torch.Tensor:
        """What a replaced layer read in the last pass."""
        state = self._pass_through[index].seen
        assert state is not None
        return state

    def _detect_output_type(self, first: nn.Module, args: Any, output: Any) -> None:
        """Let replacements return a tensor or a tuple, as the first layer does when others are replaced."""
        for replacement in self._pass_through:
            replacement.returns_tuple = isinstance(output, tuple)


class _PassThrough(nn.Module):
    """Replaces a layer: returns its input or given states, as a tensor or tuple like it; has its other attributes."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        object.__setattr__(self, "layer", layer)
        self.returns_tuple = False
        self.seen: torch.Tensor | None = None
        self.returned: torch.Tensor | None = None
        self.owner = 0

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.owner:
            raise RuntimeError(IN_USE)
        self.seen = hidden_states
        output = hidden_states if self.returned is None else self.returned
        return (output,) if self.returns_tuple else output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)
