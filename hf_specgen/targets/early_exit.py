"""A target for self-speculative decoding: its first layers draft, the others verify, and both share one cache.

    draft:   embed ─► layer 0 … E-1 ─┬─► norm ─► head ─► draft token
                                     └─ kept
    verify:                             kept ─► layer E … L-1 ─► norm ─► head ─► logits

Source: Elhoushi et al., "LayerSkip" (2024), section 4.3 (self-speculative decoding with a shared cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.device_tree import PassTree
from hf_specgen.targets.hooks import thread_hooks
from hf_specgen.targets.inputs import PreparedCall
from hf_specgen.targets.model_parts import decoder, decoder_layers, keeps_state, sharing_copy, with_part
from hf_specgen.targets.row_layout import scatter_rows
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree


class EarlyExitTarget(Target):
    """A `Target` whose first `exit_layer` layers can run separately."""

    def __init__(self, prepared: PreparedCall, exit_layer: int):
        self._layers = divisible_layers(prepared.model, exit_layer)
        super().__init__(prepared)
        self._exit_layer = exit_layer
        self._states: list[torch.Tensor] = []
        self._active: Sequence[bool] | None = None  # in this step

    def prefill(self) -> torch.Tensor:
        return_tuples: list[bool] = []  # by pass: what layers return, and those that are left out

        def note(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            return_tuples.append(isinstance(output, tuple))

        with thread_hooks([self._layers[0]], after=note):
            logits = super().prefill()
        # Not before: the pass over the prompt may set attributes of the modules that contain the layers.
        self._early, self._late = (
            _ModelPart(self.model, self._layers, left_out, return_tuples[-1])
            for left_out in (range(self._exit_layer, len(self._layers)), range(self._exit_layer))
        )
        return logits

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
        module = self._early.model if with_logits else decoder(self._early.model)
        outputs = self._run(module, tree, {"input_ids": tokens.to(self.device)}, self._active, cached)
        state = self._early.left_out[0].read
        # Checked, as an index out of bounds would cause a device-side assert, which ends the CUDA context.
        if state is None or state.dim() != 3:
            shape = None if state is None else tuple(state.shape)
            raise ValueError(
                f"the layers of {type(self.model).__name__} pass on a state of shape {shape} instead of one vector for "
                "each token"
            )
        self._states.append(scatter_rows(state, self.rows, tree.batch))
        return self._states[-1], scatter_rows(outputs.logits, self.rows, tree.batch) if with_logits else None

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
        present = self._layout.gather_inputs(tree, {"states": states})[1]["states"]
        # Models may add positions to their input or scale it, so that what the first layer reads is not these states.
        self._late.left_out[-1].returned = present
        # The ids again, though the layers left out ignore them: later ones may read inputs of their own from them.
        inputs = {"input_ids": tree.step_tokens(pending, self.device)}
        logits = self._run(self._late.model, tree, inputs, active).logits
        self._late.left_out[-1].returned = None
        return scatter_rows(logits, self.rows, tree.batch)


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


class _ModelPart:
    """A copy of a model without some of its layers; it shares all else with the model, which stays as it is."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, left_out: range, return_tuples: bool):
        self.left_out = [_PassThrough(layers[index], return_tuples) for index in left_out]
        others = sharing_copy(layers)
        others._modules.update(zip(map(str, left_out), self.left_out, strict=True))
        self.model: PreTrainedModel = with_part(model, layers, others)


class _PassThrough(nn.Module):
    """In the place of a layer: returns its input or given states, as a tensor or tuple; has its other attributes."""

    def __init__(self, layer: nn.Module, returns_tuple: bool):
        super().__init__()
        object.__setattr__(self, "layer", layer)
        self.returns_tuple = returns_tuple
        self.read: torch.Tensor | None = None  # in the last pass
        self.returned: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.read = hidden_states
        output = hidden_states if self.returned is None else self.returned
        return (output,) if self.returns_tuple else output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)
