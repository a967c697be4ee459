"""Runs the passes of an EAGLE head as CUDA graphs, see `hf_specgen.targets.graphs`.

A pass of a head has many small kernels, and launching them takes most of its time: on an H100 drafting a level of a
tree takes 4.4 ms, and with captured passes 2.1 ms. A pass over n positions is padded to the next of the widths 1, 4, 8,
16, …, and captured once for each width and capacity of the cache; graphs are shared by all calls.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_specgen.heads.base import DraftHead, HeadOutput
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.graphs import (
    Buffers,
    CapturedPass,
    GraphBuffers,
    GraphMemory,
    StepLayer,
    fingerprint,
    graph_memory,
    padded_width,
)

logger = logging.getLogger("hf_specgen")

MAX_POSITIONS = 64
"""Longer passes read the prompt, once, and run as they are."""


class HeadInputs(NamedTuple):
    """The inputs of a pass, as for `Eagle3Head.forward`; positions and mask are on the CPU."""

    embeddings: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


class CapturedHead:
    """The captured passes of one head. May be used by several threads, one at a time."""

    def __init__(self) -> None:
        self._buffers, self._lock = GraphBuffers(), threading.Lock()
        self._passes: dict[tuple[Any, ...], CapturedPass] = {}
        self._fingerprint: int | None = None
        self._memory: GraphMemory | None = None

    def begin_call(self, head: DraftHead) -> None:
        """Forget the graphs of a head that has changed."""
        if (current := fingerprint(head)) != self._fingerprint:
            with self._lock:
                self._memory = graph_memory(next(head.parameters()).device)
                self._passes, self._fingerprint = {}, current

    def run(self, head: DraftHead, inputs: HeadInputs, cache: RaggedCache) -> HeadOutput:
        """One pass of the head, which appends to the cache. Runs eagerly if it is long or cannot be captured."""
        memory = self._memory
        if inputs.positions.shape[1] <= MAX_POSITIONS and cache.lengths and memory is not None and not memory.is_broken:
            try:
                return self._replay(memory, head, inputs, cache)
            except Exception:
                if not memory.is_broken:
                    raise
                logger.warning("the passes of a %s cannot be captured; they run eagerly", type(head).__name__)
        return run_eagerly(head, inputs, cache)

    def _replay(self, memory: GraphMemory, head: DraftHead, inputs: HeadInputs, cache: RaggedCache) -> HeadOutput:
        batch, length = inputs.positions.shape
        lengths, width = cache.lengths, padded_width(length)
        with self._lock:
            cache.reserve(max(lengths) + width)
            capacity = self._buffers.adopt(cache)
            mask = inputs.mask.new_zeros(batch, 1, width, capacity)
            mask[:, :, :length, : inputs.mask.shape[3]] = inputs.mask
            mask[:, :, length:, 0] = True  # a query that sees nothing would write NaN into the cache
            slots = torch.tensor(lengths)[:, None] + torch.arange(width)
            more = (0, width - length)
            embeddings, hidden = (pad(part, (0, 0, *more)) for part in (inputs.embeddings, inputs.hidden))
            padded = HeadInputs(embeddings, hidden, pad(inputs.positions, more), mask)
            key = batch, width, capacity, torch.is_inference_mode_enabled()
            if key not in self._passes:
                self._passes[key] = CapturedPass(_pass, memory)
            output: HeadOutput = self._passes[key](head, (padded, slots), cache.buffers())
        cache.set_lengths([before + length for before in lengths])
        return HeadOutput(*(part[:, :length] for part in output))


def run_eagerly(head: DraftHead, inputs: HeadInputs, cache: RaggedCache) -> HeadOutput:
    """One pass of the head as it is."""
    embeddings, hidden, positions, mask = inputs
    output: HeadOutput = head(embeddings, hidden, positions.to(hidden.device), mask.to(hidden.device), cache)
    return output


def _pass(head: DraftHead, inputs: tuple[HeadInputs, torch.Tensor], buffers: Buffers) -> HeadOutput:
    """The function that is captured; `inputs` has the slots `[batch, width]` that it writes to beside its inputs."""
    given, slots = inputs
    layers: Any = [StepLayer(keys, values, slots, given.mask.shape[-1]) for keys, values in buffers]
    output: HeadOutput = head(*given, Cache(layers=layers))
    return output


_lock = threading.Lock()
_heads: WeakKeyDictionary[DraftHead, CapturedHead] = WeakKeyDictionary()


def captured_head(head: DraftHead) -> CapturedHead:
    """The captured passes of a head for one call; they are shared by all calls."""
    with _lock:
        captured = _heads.setdefault(head, CapturedHead())
    captured.begin_call(head)
    return captured
