"""A target that captures hidden states in its forward passes, for draft heads that take them as input."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Compile
from hf_specgen.targets.model_parts import decoder, decoder_layers, output_matrix
from hf_specgen.targets.passes import ModelPass, PassOutput
from hf_specgen.targets.replay_target import ReplayTarget
from hf_specgen.targets.row_target import RowTarget
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree


class HiddenStateTarget(Target):
    """A `Target` that captures auxiliary hidden states, those of `aux_layers` (as in `TargetRequirements`).

    `states` `[batch, aux_layers * hidden]` are those at the position that chose each row's last token, `pass_states`
    `[batch, positions, aux_layers * hidden]` those of the last forward pass.
    """

    states: torch.Tensor
    pass_states: torch.Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        aux_layers: Sequence[int],
        graphs: Compile = False,
    ):
        self._indices = tuple(aux_layers)
        for index in aux_layers:
            _hook_point(model, index)  # raises if there is none
        self._kept: list[list[int]] = []
        super().__init__(model, input_ids, generation_config, model_kwargs, graphs)
        self._pass = HookedPass(self._indices)

    def prefill(self) -> torch.Tensor:
        with captured_states(self.model, self._indices) as captured:
            logits = super().prefill()
        # A prefill in chunks has several passes.
        states = [torch.cat(passes, dim=1) if len(passes) > 1 else passes[0] for passes in captured]
        positions = min(state.shape[1] for state in states)
        self.pass_states = torch.cat([state[:, -positions:] for state in states], dim=-1)
        self._step_states = self.pass_states[:, -1:]
        self.states = self._step_states[:, 0].clone()
        return logits

    def forward(self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        logits = super().forward(tree, pending, active)
        returned = self._returned_states
        states = returned[0] if len(returned) == 1 else torch.cat(returned, dim=-1)
        self.pass_states = self._results(states, tree.batch, 1 + tree.nodes)
        self._step_states = self.pass_states
        return logits

    def _run(self, *args: Any, **kwargs: Any) -> PassOutput:
        outputs = super()._run(*args, **kwargs)
        self._returned_states = outputs.states
        return outputs

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        super().commit(paths)
        if not self._indices:  # of a request of continuous batching whose drafter reads none
            return
        self._kept = [[] if path is None else [0, *(1 + node for node in path)] for path in paths]
        if len(paths) == 1 and self._kept[0]:  # without a tensor of indices
            self.states = self._step_states[:, self._kept[0][-1]]
        elif rows := [row for row, kept in enumerate(self._kept) if kept]:
            self.states[rows] = self._step_states[rows, [self._kept[row][-1] for row in rows]]

    def states_of(self, aux_layers: Sequence[int]) -> torch.Tensor:
        """`[batch, aux_layers * hidden]` the `states` of some layers: several strategies may read different ones."""
        return _of_layers(self.states, self._indices, aux_layers)

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        """The states `[kept, aux_layers * hidden]` of each row's tokens that the last `commit` kept, for draft heads.

        After the prefill they belong to the prompt (padding included) and the accepted nodes, after a step to the
        pending token and the accepted nodes.
        """
        prompt = self.pass_states[:, : self.pass_states.shape[1] - self._step_states.shape[1]]
        states = []
        for row, kept in enumerate(self._kept):
            new = self._step_states[row, : len(kept)]
            if kept and kept[-1] != len(kept) - 1:
                # Not by a list, for which the host would wait for all kernels that were launched.
                positions = torch.tensor(kept).to(new.device, non_blocking=new.is_cuda)
                new = self._step_states[row].index_select(0, positions)
            states.append(torch.cat([prompt[row], new]) if prompt.shape[1] else new)
        return [_of_layers(rows, self._indices, aux_layers) for rows in states]


class HiddenStateReplayTarget(HiddenStateTarget, ReplayTarget):
    """A `ReplayTarget` that captures hidden states."""


class HiddenStateRowTarget(HiddenStateTarget, RowTarget):
    """A `RowTarget` that captures hidden states, or receives those that the common target has captured."""

    def take_states(self, common: Target, row: int, tokens: int) -> None:
        assert isinstance(common, HiddenStateTarget)
        self.pass_states = common.pass_states[row : row + 1, :tokens]
        self._step_states = self.pass_states


@dataclass(frozen=True)
class HookedPass(ModelPass):
    """A `ModelPass` that also returns the hidden states of some layers; equal for equal layers, as graphs need."""

    layers: tuple[int, ...]

    def __call__(self, module: Any, inputs: dict[str, Any], cache: Any) -> PassOutput:
        with captured_states(module, self.layers) as captured:
            output = super().__call__(module, inputs, cache)
        return PassOutput(output.logits, tuple(passes[-1] for passes in captured))


@contextmanager
def captured_states(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[list[torch.Tensor]]]:
    """Capture, by layer, the states of each forward pass that this thread (and no other) runs inside."""
    captured: list[list[torch.Tensor]] = [[] for _ in layers]
    thread = threading.get_ident()
    device = compat.input_device(model)

    def keep(index: int, value: Any) -> None:
        if threading.get_ident() != thread:
            return
        state = value if isinstance(value, torch.Tensor) else value[0]
        if state.dim() != 3:
            raise ValueError(
                f"hidden state {layers[index]} of {type(model).__name__} has the shape {list(state.shape)}, not "
                "[batch, positions, hidden], so that a draft head cannot read it; use a strategy without a head"
            )
        captured[index].append(state.to(device))

    handles = []
    try:
        for index, (module, reads_input) in enumerate(_hook_point(model, layer) for layer in layers):
            if reads_input:
                hook = module.register_forward_pre_hook(lambda _, args, index=index: keep(index, args))
            else:
                hook = module.register_forward_hook(lambda _, __, output, index=index: keep(index, output))
            handles.append(hook)
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _hook_point(model: PreTrainedModel, index: int) -> tuple[nn.Module, bool]:
    """The module to hook for a layer, and whether to capture its input rather than its output."""
    if index == -1:
        return output_matrix(model), True
    if index == 0:
        return model.get_input_embeddings(), False
    layers = decoder_layers(model)
    if index == len(layers):
        return decoder(model), False
    if not 0 < index <= len(layers):
        raise ValueError(f"{type(model).__name__} has hidden states 0 to {len(layers)}, not {index}")
    return layers[index - 1], False


def _of_layers(states: torch.Tensor, captured: Sequence[int], aux_layers: Sequence[int]) -> torch.Tensor:
    """`[length, captured * hidden]` states, reduced to those of some layers."""
    if tuple(captured) == tuple(aux_layers):
        return states
    by_layer = states.chunk(len(captured), dim=-1)
    return torch.cat([by_layer[captured.index(layer)] for layer in aux_layers], dim=-1)
