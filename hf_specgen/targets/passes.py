"""Forward passes of models as functions that can be captured: over draft trees, and over levels of a growing tree.

Passes that compute the same are equal, and share a graph; tensors that differ between calls are inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_specgen import compat
from hf_specgen.targets.attention import grouped_attention
from hf_specgen.targets.cache import RaggedCache, padded_tokens
from hf_specgen.targets.graphs import CallGraphs, Capturable, Inputs
from hf_specgen.targets.hooks import thread_hooks
from hf_specgen.targets.masks import StepLayout, StepMasks
from hf_specgen.targets.model_parts import TAKES_ONE_MASK, decoder
from hf_specgen.targets.support import is_rounding, largest_differences
from hf_specgen.tree import TreeStructure

TEXT_WIDTH = 32
"""The minimum width that new text is padded to where it is captured together with levels of a draft, so that there are
few graphs."""
MAX_CAPTURED = 64
"""Tokens of each row in the longest captured pass of a drafter; longer ones, such as over a prompt, run eagerly."""
ROWS, SOURCES, DESTINATIONS = range(3)
"""Indices into the first dimension of `path_moves`."""


class PassOutput(NamedTuple):
    """Logits `[batch, tokens, vocab]`, and auxiliary hidden states `[batch, tokens, hidden]`, of a pass.

    The pass of a decoder alone, without the output layer, has no logits: `logits` is None.
    """

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()


class CapturablePass(Capturable[Inputs, PassOutput]):
    """A forward pass of a model that can be captured."""

    def matches(self, expected: PassOutput, outputs: PassOutput) -> bool:
        """Whether the logits differ by rounding alone; True if eager logits are not finite: nothing to compare with."""
        if not bool(expected.logits.amax(dim=-1).isfinite().all()):
            return True
        differences = largest_differences(expected.logits.flatten(0, 1), outputs.logits.flatten(0, 1))
        return is_rounding(differences, expected.logits.dtype)


@dataclass(frozen=True)
class ModelPass(CapturablePass[dict[str, Any]]):
    """One forward pass of a model, or of its decoder alone; its inputs are the model's arguments."""

    def __call__(self, module: nn.Module, inputs: dict[str, Any], cache: Cache) -> PassOutput:
        with grouped_attention(), _mask_of_each_layer_type(module, inputs) as inputs:
            outputs = module(**{**inputs, compat.CACHE: cache, "use_cache": True, "return_dict": True})
        return PassOutput(cast(torch.Tensor, getattr(outputs, "logits", None)))


@contextmanager
def _mask_of_each_layer_type(model: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of a pass; where a model takes one mask, its decoder gets the masks of all layer types."""
    masks = inputs.get("attention_mask")
    if not isinstance(masks, dict) or model.config.model_type not in TAKES_ONE_MASK:
        yield inputs
        return

    def give_masks(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": masks}

    with thread_hooks([decoder(model)], before=give_masks):
        yield {**inputs, "attention_mask": masks["full_attention"]}


@dataclass(frozen=True)
class CompactAcceptedPath(Capturable[torch.Tensor, None]):
    """Copies the slots of accepted nodes to those after the pending token, in all layers; its inputs: `path_moves`."""

    def __call__(self, module: nn.Module, inputs: torch.Tensor, cache: Any) -> None:
        buffers = cache.joined
        rows, source, destination = inputs.unbind()
        if buffers is None:
            for layer in cache.layers:
                layer.move(rows, source, destination)
            return
        # One copy for all layers: `[2 * layers, batch, heads, slots, head_dim]`, and an index for each row.
        sizes = len(buffers), -1, buffers.shape[2], -1, buffers.shape[4]
        source, destination = (slots[None, :, None, :, None].expand(sizes) for slots in (source, destination))
        buffers.scatter_(3, destination, buffers.gather(3, source))

    def warm_up_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Copies of slots onto themselves."""
        return inputs[[ROWS, DESTINATIONS, DESTINATIONS]]


@dataclass(frozen=True)
class LayoutPass:
    """A pass whose positions and masks follow from a `StepLayout`; `model_pass` receives the arguments of the model."""

    model_pass: ModelPass
    masks: StepMasks = field(compare=False)

    def run_on(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        layout: StepLayout,
        offsets: torch.Tensor,
        cache: Cache,
        last: torch.Tensor | None = None,
        **others: Any,
    ) -> PassOutput:
        """Run on tokens `[batch, new]`, the last ones of a layout.

        The position of a token is its depth, plus the slot of its tree's root, plus `offsets` (position minus slot);
        positions above `last` are set to `last`. `axes` among the `others` as in `TreeInputs`.
        """
        positions = layout.depths[:, -tokens.shape[1] :] + layout.starts + offsets
        if last is not None:
            positions = positions.minimum(last)
        if (axes := others.pop("axes", None)) is not None:
            positions = positions + axes
        arguments = {"input_ids": tokens, "attention_mask": self.masks.of_layout(layout), "position_ids": positions}
        return self.model_pass(model, {**others, **arguments}, cache)


class TreeInputs(NamedTuple):
    """The tensors of a pass over draft trees, and the other arguments of the model."""

    tokens: torch.Tensor  # [batch, width] of each row's last token, then its nodes
    offsets: torch.Tensor  # [batch, 2] position minus slot, and the highest position
    structure: TreeStructure | None  # None: chains
    padding_mask: torch.Tensor | None  # [batch, capacity], False for padding
    axes: torch.Tensor | None  # [axes, batch, 1] see `CallInputs.axes`
    others: dict[str, Any]


class TreePass(LayoutPass, CapturablePass[TreeInputs]):
    """A pass of a target over draft trees that follow what is cached."""

    def __call__(self, module: nn.Module, inputs: TreeInputs, cache: Any) -> PassOutput:
        batch, width = inputs.tokens.shape
        layer = cache.layers[0]
        structure = inputs.structure
        if structure is None:
            structure = TreeStructure.of_captured_chains(batch, width - 1, inputs.tokens.device)
        layout = StepLayout(layer.next_slots, layer.get_mask_sizes(0)[0], *structure, inputs.padding_mask)
        offsets, last = inputs.offsets.split(1, dim=1)
        return self.run_on(module, inputs.tokens, layout, offsets, cache, last, axes=inputs.axes, **inputs.others)


class DrafterPassOutput(NamedTuple):
    """What a drafter's pass over nodes, or over new text, returns, each `[batch, new, …]`."""

    logits: torch.Tensor
    states: torch.Tensor | None = None  # which passes over the children of the nodes read
    outputs: torch.Tensor | None = None  # which the drafter receives after new text


class DrafterInputs(NamedTuple):
    """What a pass of a drafter reads: nodes with the states of their parents, or new text with its features."""

    tokens: torch.Tensor  # [batch, new], the last ones of the layout
    layout: StepLayout
    states: torch.Tensor | None
    offsets: torch.Tensor | None  # as in `CapturablePasses`
    is_text: bool = False


class DrafterPass(Protocol):
    """A forward pass of a drafter, in a captured function over several levels; equal ones compute the same."""

    def __call__(self, module: nn.Module, inputs: DrafterInputs, cache: Cache) -> DrafterPassOutput:
        """Run over nodes or new text."""


class DraftModelPass(LayoutPass):
    """The pass of a draft model over nodes or new text, without hidden states, for `CapturablePasses`."""

    def __call__(self, module: nn.Module, inputs: DrafterInputs, cache: Cache) -> DrafterPassOutput:
        assert inputs.offsets is not None
        return DrafterPassOutput(self.run_on(module, inputs.tokens, inputs.layout, inputs.offsets, cache).logits)


class NewText(NamedTuple):
    """Tokens that a drafter has not processed, `counts` of each row."""

    counts: torch.Tensor  # [batch]
    tokens: torch.Tensor  # [batch, width], padded on the right
    features: torch.Tensor | None = None  # [batch, width, size] what a head reads with them

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], features: torch.Tensor | None = None) -> NewText:
        """From the tokens of each row, and features `[batch, longest, size]`; padded to a width of captured passes."""
        counts = torch.tensor([len(text) for text in texts])
        width = max(TEXT_WIDTH, padded_tokens(max(map(len, texts))))
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        return cls(counts, tokens, None if features is None else pad(features, (0, 0, 0, width - features.shape[1])))


class CapturablePasses(NamedTuple):
    """What a drafter provides for passes over several levels of a draft tree in one captured function.

    After the captured function, `store_text` receives what `drafter_pass` returned for the last token of the new text
    of each row, except the logits. `store_levels` receives the states of the last level, `[batch, nodes, hidden]`, and
    how many nodes of each row have been expanded since the root of the tree.
    """

    graphs: CallGraphs
    cache: RaggedCache
    drafter_pass: DrafterPass
    store_levels: Callable[[torch.Tensor | None, int], None]
    states: torch.Tensor | None = None  # [batch, nodes, hidden] of the nodes of the last pass
    padding_mask: torch.Tensor | None = None  # [batch, slots] bool, False for padding
    offsets: torch.Tensor | None = None  # [batch, 1] position minus slot
    text: NewText | None = None  # what is processed before the levels
    store_text: Callable[[Sequence[torch.Tensor]], None] | None = None  # where there is such text

    @property
    def device(self) -> torch.device:
        """Where the keys and values are."""
        return self.cache.buffers()[0][0].device
