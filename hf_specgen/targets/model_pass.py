"""One forward pass of a target over a draft tree: its rows, positions and masks, and whether it runs compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.attention import grouped_attention
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.compiled import CompiledPasses
from hf_specgen.targets.fixed_shapes import padded_pass
from hf_specgen.targets.row_layout import RowLayout
from hf_specgen.targets.step_inputs import StepInputs, on_device
from hf_specgen.targets.step_masks import StepMasks
from hf_specgen.tree import DraftTree


class ModelPass:
    """Runs the forward passes of one call.

    Args:
        model: the target.
        inputs, masks, layout: what passes read beside tokens, their masks, and the rows that are present.
        cache: of the call.
        past_key_values: what the model receives as its cache: `cache`, or what contains it.
        compiled: the compiled passes of the model; None to run eagerly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: StepInputs,
        masks: StepMasks,
        layout: RowLayout,
        cache: RaggedCache,
        past_key_values: Any,
        compiled: CompiledPasses | None,
    ):
        self._model, self._compiled, self._device = model, compiled, compat.input_device(model)
        self._inputs, self._masks, self._layout = inputs, masks, layout
        self._cache, self._past_key_values = cache, past_key_values

    def run(
        self,
        module: Any,
        tree: DraftTree,
        inputs: dict[str, torch.Tensor],
        active: Sequence[bool] | None,
        cached: int,
        taps: tuple[int, ...],
    ) -> Any:
        """One pass over the pending token and the nodes of a tree.

        Args:
            module: the model, or the part of it to run.
            tree, inputs, active: of all rows; dropped rows take no part.
            cached: how many of the pending token and the first nodes are in the cache already; `inputs` has the others.
            taps: hidden states that a compiled pass returns.

        Returns:
            the module's output for the rows that are present.
        """
        tree, inputs = self._layout.select(tree, inputs)
        new = 1 + tree.nodes - cached
        if self._compiled is not None:
            tree, inputs = padded_pass(tree, inputs, new)
        lengths = self._cache.lengths
        if cached:
            lengths = tuple(length - cached for length in lengths)
        positions = on_device(np.array(self._layout.positions(tree, lengths, active, cached)), self._device)
        mask = self._masks.of_step(tree, lengths, cached, self._cache.first_visible)
        arguments = self._inputs.arguments(inputs, mask, positions, self._past_key_values)
        if self._compiled is not None:
            del arguments["past_key_values"]
            return self._compiled.run(self._model, arguments, self._cache, new, taps)
        with grouped_attention():
            return module(**{**arguments, "use_cache": True, "return_dict": True})
