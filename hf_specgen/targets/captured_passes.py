"""Captured forward passes of a model (`compile="graphs"`): CUDA graphs for a few numbers of tokens, for all calls.

A pass over n tokens is padded to the next of the widths 1, 4, 8, 16, 32, …, with one graph for each width, number of
rows and capacity of the cache, whose buffers it reads and writes. Before a graph is used its logits are
compared with those of an ordinary pass over the same tokens.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specgen import compat
from hf_specgen.targets.attention import grouped_attention
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.graphs import (
    GRAPH_DEVICES,
    Buffers,
    CapturedModule,
    CapturedPass,
    StepLayer,
    fingerprint,
    graph_memory,
    padded_width,
)
from hf_specgen.targets.model_parts import has_special_layers
from hf_specgen.tree import DraftTree

logger = logging.getLogger("hf_specgen")


@dataclass(frozen=True)
class PassOutput:
    """Logits `[batch, tokens, vocab]` of a captured pass, and the requested hidden states `[batch, tokens, hidden]`."""

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


def captured_passes(model: PreTrainedModel) -> CapturedPasses:
    """The captured passes of a model for one call, with graphs shared by all calls; raises if it has none."""
    _check_capturable(model)
    with _lock:
        by_device = _passes.setdefault(model, {})
        passes = by_device.setdefault(str(compat.input_device(model)), CapturedPasses())
    passes.begin_call(model)
    return passes


def _check_capturable(model: PreTrainedModel) -> None:
    """Raise unless passes of the model can be captured, as far as is known before."""
    name, device = type(model).__name__, compat.input_device(model).type
    implementation = compat.attention_implementation(model.config.get_text_config())
    reason = None
    if device not in GRAPH_DEVICES:
        reason = f'is on {device!r}, and compile="graphs" captures CUDA graphs'
    elif compat.has_compiled_parts(model):
        reason = "is compiled already, and a pass is captured of a model that is not"
    elif compat.has_device_hooks(model):
        reason = "has weights that are offloaded or on several devices, which are moved in every pass"
    elif implementation not in ("sdpa", "eager"):
        reason = f"uses {implementation!r} attention, and passes are captured with 'sdpa' or 'eager'"
    elif has_special_layers(model.config.get_text_config()):
        reason = "keeps convolutions, recurrent states or indices in its cache, which captured passes do not write"
    if reason is not None:
        raise ValueError(f'{name} {reason}; leave compile="graphs" out')
    if torch.is_autocast_enabled(device):
        raise ValueError('compile="graphs" does not work under torch.autocast; load the model in that dtype')


class CapturedPasses(CapturedModule):
    """The captured passes of one model on one device."""

    def run(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        cache: RaggedCache,
        tokens: int,
        aux_layers: tuple[int, ...] = (),
    ) -> PassOutput:
        """One forward pass, padded by `padded_pass`, over `tokens` columns that are appended to the cache of the call.

        `aux_layers` are the hidden states to return. Raises if the pass cannot be captured, or differs from the
        ordinary one.
        """
        batch, width = arguments["input_ids"].shape
        with self._lock:
            cache.reserve(max(cache.lengths) + width)
            capacity = self._buffers.adopt(cache)
            attention = compat.attention_implementation(model.config.get_text_config())
            key = batch, width, capacity, aux_layers, model.dtype, attention, torch.is_inference_mode_enabled()
            if key not in self._passes:
                self._passes[key] = self._capture(model, arguments, cache, capacity, aux_layers)
            output = _run_captured(self._passes[key], model, arguments, cache, capacity)
        cache.set_lengths([length + tokens for length in cache.lengths])
        return PassOutput(output.logits[:, :tokens], tuple(state[:, :tokens] for state in output.states))

    def release(self, cache: RaggedCache) -> None:
        """Give the cache buffers of its own, before a caller of `generate` receives it."""
        with self._lock:
            self._buffers.release(cache)

    def _capture(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        cache: RaggedCache,
        capacity: int,
        aux_layers: tuple[int, ...],
    ) -> CapturedPass:
        """Capture passes of this shape, and compare one with an ordinary pass."""
        name, lengths = type(model).__name__, cache.lengths
        logger.info("capturing %s for %d rows of %d tokens", name, *arguments["input_ids"].shape)
        more = {"output_hidden_states": True} if aux_layers else {}
        with grouped_attention():
            ordinary = cast(Any, model)(**arguments, past_key_values=cache, use_cache=True, return_dict=True, **more)
        cache.set_lengths(lengths)
        function = self._function(model, aux_layers)
        try:
            output = _run_captured(function, model, arguments, cache, capacity)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            raise ValueError(f'{name} cannot be captured ({reason}); leave compile="graphs" out') from error
        if not _agree(ordinary.logits.float(), output.logits.float(), model.dtype):
            raise ValueError(f'the captured pass of {name} differs from an ordinary one; leave compile="graphs" out')
        self._fingerprint = fingerprint(model)  # the first pass that returns hidden states installs hooks
        return function

    def _function(self, model: PreTrainedModel, aux_layers: tuple[int, ...]) -> CapturedPass:
        """A pass that is captured when it first runs."""
        if self._memory is None or self._memory.is_broken:
            self._memory = graph_memory(compat.input_device(model))

        def run(model: Any, inputs: tuple[dict[str, Any], torch.Tensor], buffers: Buffers) -> Any:
            with grouped_attention():
                return _forward(model, *inputs, buffers, aux_layers)

        return CapturedPass(run, self._memory)


_lock = threading.Lock()
_passes: WeakKeyDictionary[PreTrainedModel, dict[str, CapturedPasses]] = WeakKeyDictionary()


def padded_pass(
    tree: DraftTree, inputs: dict[str, torch.Tensor], tokens: int
) -> tuple[DraftTree, dict[str, torch.Tensor]]:
    """The draft and the inputs `[batch, tokens]` of a pass, padded to the width of a captured pass."""
    more = (0, padded_width(tokens) - tokens)
    return tree.padded(tree.nodes + more[1]), {name: pad(values, more) for name, values in inputs.items()}


def fixed_mask(mask: torch.Tensor, batch: int, columns: int) -> torch.Tensor:
    """A mask, bool or additive, for all rows of a batch and with columns for all slots that attention reads."""
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    fixed = mask.new_full((batch, 1, mask.shape[2], columns), hidden)
    fixed[..., : mask.shape[3]] = mask
    return fixed


def _run_captured(
    function: CapturedPass, model: PreTrainedModel, arguments: dict[str, Any], cache: RaggedCache, capacity: int
) -> PassOutput:
    """Run a captured pass after the tokens of a cache."""
    (batch, width), masks = arguments["input_ids"].shape, arguments["attention_mask"]
    if isinstance(masks, dict):
        masks = {kind: None if mask is None else fixed_mask(mask, batch, capacity) for kind, mask in masks.items()}
    else:
        masks = fixed_mask(masks, batch, capacity)
    starts = torch.tensor(cache.lengths, device=arguments["input_ids"].device)
    slots = starts[:, None] + torch.arange(width, device=starts.device)
    return PassOutput(*function(model, ({**arguments, "attention_mask": masks}, slots), cache.buffers()))


def _forward(
    model: Any, arguments: dict[str, Any], slots: torch.Tensor, buffers: Buffers, aux_layers: Sequence[int]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The function that is captured: logits `[batch, new, vocab]` and hidden states `[batch, new, hidden]`."""
    masks = arguments["attention_mask"]
    by_type = masks if isinstance(masks, dict) else {"": masks}
    width = next(mask.shape[-1] for mask in by_type.values() if mask is not None)
    cache = Cache(layers=[StepLayer(keys, values, slots, width) for keys, values in buffers])
    more = {"output_hidden_states": True} if aux_layers else {}
    outputs = model(**arguments, past_key_values=cache, use_cache=True, return_dict=True, **more)
    return outputs.logits, tuple(outputs.hidden_states[layer] for layer in aux_layers)


def _agree(ordinary: torch.Tensor, captured: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits `[batch, tokens, vocab]` differ by rounding alone, if there is something to compare with."""
    if not bool(ordinary.amax(dim=-1).isfinite().all()):
        return True
    pairs = zip(ordinary.flatten(0, 1), captured.flatten(0, 1), strict=True)
    return is_rounding([difference(*pair) for pair in pairs], dtype)


def difference(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """The largest difference, in standard deviations of the reference; entries that are not finite in both agree."""
    finite = reference.isfinite()
    if not torch.equal(reference.nan_to_num()[~finite], logits.nan_to_num()[~finite]):
        return math.inf
    if not bool(logits[finite].isfinite().all()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    deviation = reference[finite].std().clamp(min=1e-6)
    return float(((reference - logits)[finite].abs().amax() / deviation).item())


def is_rounding(differences: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether differences of logits at several positions, in standard deviations, are within rounding.

    Wrong positions or masks were off by 0.03 and more on random models of 189 types. In half precision the median
    counts: single positions may differ where a router of experts has a near-tie.
    """
    if dtype in (torch.float32, torch.float64):
        return max(differences) <= 1e-3
    return sorted(differences)[len(differences) // 2] <= 0.1
