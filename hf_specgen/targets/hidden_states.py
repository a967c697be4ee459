"""A target that captures hidden states in its forward passes, for draft heads that take them as input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.targets.hooks import thread_hooks
from hf_specgen.targets.inputs import PreparedCall
from hf_specgen.targets.model_parts import decoder, decoder_layers, output_matrix, text_config, text_embeddings
from hf_specgen.targets.passes import ModelPass, PassOutput
from hf_specgen.targets.replay_target import ReplayTarget
from hf_specgen.targets.row_target import RowTarget
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree


@dataclass(frozen=True)
class StepStates:
    """The hidden states of a call's last pass, and which of them were kept, as draft heads read them.

    A step processes the pending token of each row and its draft. With an accepted path of nodes 0 and 2:

        queries of the step      pending   node 0   node 1   node 2
        kept                        x         x                 x
        the last one                                            x       chose the row's last token

    A pass and a commit make a new value, so that a copy of a target, or one whose attributes are restored, has the
    states of before.
    """

    layers: tuple[int, ...]  # the recorded ones, as in `TargetRequirements`
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """`[batch, positions, layers * hidden]` of the pass, those of a prompt first."""
    queries: int = 0  # how many positions at the end of the pass are those of the step
    kept: tuple[tuple[int, ...], ...] = ()  # the queries that were kept, by row: 0 is the pending token, i + 1 node i
    last: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """`[batch, layers * hidden]` those that chose each row's last token."""

    def after_prefill(self, states: torch.Tensor) -> StepStates:
        """Those of the prompt, whose last position counts as the step."""
        return replace(self, states=states, queries=1, last=states[:, -1].clone())

    def after_pass(self, states: torch.Tensor) -> StepStates:
        """Those of a step."""
        return replace(self, states=states, queries=states.shape[1])

    def after_commit(self, paths: Sequence[Sequence[int] | None]) -> StepStates:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        begin = self.states.shape[1] - self.queries
        kept = tuple(() if path is None else (0, *(1 + node for node in path)) for path in paths)
        last = self.last
        if len(paths) == 1 and kept[0]:  # without a tensor of indices
            last = self.states[:, begin + kept[0][-1]]
        elif rows := [row for row, queries in enumerate(kept) if queries]:
            last = last.clone()
            last[rows] = self.states[rows, [begin + kept[row][-1] for row in rows]]
        return replace(self, kept=kept, last=last)

    def of_row(self, row: int, queries: int) -> torch.Tensor:
        """`[1, queries, layers * hidden]` of the first queries of one row."""
        return self.states[row : row + 1, :queries]

    def last_of(self, aux_layers: Sequence[int]) -> torch.Tensor:
        """`last` of some layers: several strategies of a call may read different ones."""
        return _of_layers(self.last, self.layers, aux_layers)

    def committed(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        """The states `[kept, aux_layers * hidden]` of each row's tokens that the last commit kept.

        After the prefill these are those of the prompt (padding included), after a step those of the pending token and
        the accepted nodes.
        """
        begin = self.states.shape[1] - self.queries
        states = []
        for row, kept in enumerate(self.kept):
            new = self.states[row, begin : begin + len(kept)]
            if kept and kept[-1] != len(kept) - 1:
                # Not by a list, for which the host would wait until the GPU has done all that it was given.
                queries = torch.tensor(kept).to(new.device, non_blocking=new.is_cuda)
                new = self.states[row, begin:].index_select(0, queries)
            states.append(torch.cat([self.states[row, :begin], new]) if begin else new)
        return [_of_layers(rows, self.layers, aux_layers) for rows in states]


class HiddenStateTarget(Target):
    """A `Target` that captures auxiliary hidden states, those of `aux_layers` (as in `TargetRequirements`)."""

    def __init__(self, prepared: PreparedCall, aux_layers: Sequence[int], graphs: Compile = False):
        points = hook_points(prepared.model, aux_layers)
        super().__init__(prepared, graphs)
        self.step_states = StepStates(tuple(aux_layers))
        self._pass = HookedPass(self.step_states.layers, points, self.device)
        self._given_embeddings: Any = prepared.model_kwargs.get("inputs_embeds")

    def prefill(self) -> torch.Tensor:
        assert isinstance(self._pass, HookedPass)
        with recorded_states(self._pass.points, self.device) as recorded:
            logits = super().prefill()
        # A prefill in chunks has several passes; one over given embeddings makes none of its own.
        by_pass = [passes or [self._given_embeddings] for passes in recorded]
        states = [torch.cat(passes, dim=1) if len(passes) > 1 else passes[0] for passes in by_pass]
        layers = zip(self.step_states.layers, states, strict=True)
        sizes = {state.shape[-1] for layer, state in layers if layer >= 0}  # the output matrix may read another size
        size = text_config(self.model).hidden_size
        if not sizes <= {size}:
            raise ValueError(
                f"draft heads read hidden states of size {size}, and layers of {type(self.model).__name__} return "
                f"{sorted(sizes)}; use a strategy without a head"
            )
        positions = min(state.shape[1] for state in states)
        states_of_prompt = torch.cat([state[:, -positions:] for state in states], dim=-1)
        self.step_states = self.step_states.after_prefill(self._inputs.by_row(states_of_prompt))
        return logits

    def forward(self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        logits = super().forward(tree, pending, active)
        returned = self._returned_states
        states = returned[0] if len(returned) == 1 else torch.cat(returned, dim=-1)
        self.step_states = self.step_states.after_pass(self._results(states, tree.batch, 1 + tree.nodes))
        return logits

    def _run(self, *args: Any, **kwargs: Any) -> PassOutput:
        outputs = super()._run(*args, **kwargs)
        self._returned_states = outputs.states
        return outputs

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        super().commit(paths)
        self.step_states = self.step_states.after_commit(paths)

    def last_states(self, aux_layers: Sequence[int]) -> torch.Tensor:
        return self.step_states.last_of(aux_layers)

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        return self.step_states.committed(aux_layers)


class HiddenStateReplayTarget(HiddenStateTarget, ReplayTarget):
    """A `ReplayTarget` that captures hidden states."""


class HiddenStateRowTarget(HiddenStateTarget, RowTarget):
    """A `RowTarget` that captures hidden states, or receives those that the common target has recorded."""

    def take_states(self, common: Target, row: int, tokens: int) -> None:
        assert isinstance(common, HiddenStateTarget)
        self.step_states = self.step_states.after_pass(common.step_states.of_row(row, tokens))


class HookPoint(NamedTuple):
    """A hidden state, numbered as in `TargetRequirements`, and the module whose output it is, or whose input.

    Of several residual `streams` (hyper-connections of GLM-5.3-Flash, DeepSeek-V4) it is the mean, as heads for such
    targets read it.
    """

    layer: int
    module: nn.Module
    is_input: bool
    streams: int | None


def hook_points(model: PreTrainedModel, layers: Sequence[int]) -> tuple[HookPoint, ...]:
    """Where the hidden states of some layers are computed; raises a `ValueError` for a layer that does not exist."""
    streams = getattr(text_config(model), "hc_mult", None)
    return tuple(HookPoint(index, *_module_of(model, index), streams) for index in layers)


def _module_of(model: PreTrainedModel, index: int) -> tuple[nn.Module, bool]:
    """The module to hook for a layer, and whether to capture its input rather than its output."""
    if index == -1:
        return output_matrix(model), True
    if index == 0:
        return text_embeddings(model), False
    layers = decoder_layers(model)
    if index == len(layers):
        return decoder(model), False
    if not 0 < index <= len(layers):
        raise ValueError(f"{type(model).__name__} has hidden states 0 to {len(layers)}, not {index}")
    return layers[index - 1], False


@dataclass(frozen=True)
class HookedPass(ModelPass):
    """A `ModelPass` that also returns the hidden states of some layers; equal for equal layers, as graphs need."""

    layers: tuple[int, ...]
    points: tuple[HookPoint, ...] = field(compare=False)  # where their states are computed in the target
    device: torch.device = field(compare=False)  # where the states go

    def __call__(self, module: Any, inputs: dict[str, Any], cache: Any) -> PassOutput:
        with recorded_states(self.points, self.device) as recorded:
            output = super().__call__(module, inputs, cache)
        return PassOutput(output.logits, tuple(passes[-1] for passes in recorded))


@contextmanager
def recorded_states(points: Sequence[HookPoint], device: torch.device) -> Iterator[list[list[torch.Tensor]]]:
    """Capture, by point, the states of each forward pass that this thread (and no other) runs inside."""
    recorded: list[list[torch.Tensor]] = [[] for _ in points]

    def keep(index: int, value: Any) -> None:
        state = value if isinstance(value, torch.Tensor) else value[0]
        if state.dim() == 4 and state.shape[2] == points[index].streams:
            state = state.mean(dim=2)
        if state.dim() != 3:
            raise ValueError(
                f"hidden state {points[index].layer}, of {type(points[index].module).__name__}, has the shape "
                f"{list(state.shape)}, not [batch, positions, hidden], so that a draft head cannot read it; use a "
                "strategy without a head"
            )
        recorded[index].append(state.to(device))

    with ExitStack() as stack:
        for index, (_, module, is_input, _) in enumerate(points):
            before = lambda _, args, kwargs, index=index: keep(index, args)  # noqa: E731
            after = lambda _, args, kwargs, output, index=index: keep(index, output)  # noqa: E731
            stack.enter_context(thread_hooks([module], before) if is_input else thread_hooks([module], after=after))
        yield recorded


def _of_layers(states: torch.Tensor, recorded: Sequence[int], aux_layers: Sequence[int]) -> torch.Tensor:
    """`[length, recorded * hidden]` states, reduced to those of some layers."""
    if tuple(recorded) == tuple(aux_layers):
        return states
    by_layer = states.chunk(len(recorded), dim=-1)
    return torch.cat([by_layer[recorded.index(layer)] for layer in aux_layers], dim=-1)
