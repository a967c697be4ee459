"""Compiled forward passes: functions for a few fixed numbers of tokens, shared by all calls on a model.

A draft has another number of tokens in every step, and a compiled function wants the same shapes every time. So a pass
over n tokens is padded to the next of the widths 1, 4, 8, 16, 32, …, and there is one compiled function for each width
and number of rows. It reads and writes the buffers of the call's `RaggedCache` in place, see
`hf_specgen.targets.step_cache`: rollback and accepted paths work as without compilation.

A function is compiled by `torch.compile`, or on a GPU captured as a CUDA graph without being compiled. Before it is
used its logits are compared with those of an ordinary pass over the same tokens.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.agreement import difference, is_rounding
from hf_specgen.targets.attention import grouped_attention
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.captured import GraphMemory, fingerprint, graph_memory
from hf_specgen.targets.compilable import GRAPH_DEVICES, Compile, check_compilable, named
from hf_specgen.targets.compile_time import add_compile_seconds, compile_seconds
from hf_specgen.targets.fixed_shapes import fixed_mask
from hf_specgen.targets.graph_buffers import GraphBuffers
from hf_specgen.targets.packable import is_packable
from hf_specgen.targets.packed_weights import packed_model
from hf_specgen.targets.pass_functions import PassFunction, captured_function, compiled_function

logger = logging.getLogger("hf_specgen")
COLUMN_BLOCK = 64
"""On a CPU attention reads a multiple of so many slots, which keeps masks aligned."""
COMPILING, CAPTURING = ("compiling", "compiled", named(True)), ("capturing", "captured", named("graphs"))
"""Words of messages."""
BACKEND = "inductor"
"""Backend of `torch.compile`; tests use one that needs no compiler."""


@dataclass(frozen=True)
class PassOutput:
    """The result of a compiled pass.

    Args:
        logits: `[batch, tokens, vocab]`.
        states: the requested hidden states, `[batch, tokens, hidden]` each.
    """

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


class CompiledPasses:
    """The compiled functions of one model. May be used by several threads, one at a time.

    Args:
        backend: of `torch.compile`; None to capture graphs of passes that are not compiled.
        captures_graphs: whether passes are captured as CUDA graphs. Then attention reads the whole buffer in every
            pass, and buffers keep their addresses from call to call.
    """

    def __init__(self, backend: str | None, captures_graphs: bool):
        self._backend = backend
        self._fingerprint: int | None = None
        self._memory: GraphMemory | None = None
        self._graph_buffers = GraphBuffers() if captures_graphs else None
        self._functions: dict[tuple[Any, ...], PassFunction] = {}
        self._lock = threading.Lock()

    def run(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        cache: RaggedCache,
        tokens: int,
        taps: tuple[int, ...] = (),
    ) -> PassOutput:
        """One forward pass; appends its tokens to the cache.

        Args:
            model: the model.
            arguments: what an ordinary pass takes: token ids, positions and masks, padded to `padded_width(tokens)`.
            cache: of the call. All of its layers keep all slots.
            tokens: how many of the columns are tokens; the others are padding.
            taps: which hidden states to return, as indices into Transformers' `hidden_states`.

        Raises:
            ValueError: if the model cannot be compiled, or its compiled pass computes something else.
        """
        batch, width = arguments["input_ids"].shape
        with self._lock:
            columns = self._reserve(cache, max(cache.lengths) + width)
            capacity = columns if self._graph_buffers is not None else None
            attention = compat.attention_implementation(model.config.get_text_config())
            key = batch, width, capacity, taps, model.dtype, attention, torch.is_inference_mode_enabled()
            if key not in self._functions:
                self._functions[key] = self._compile(model, arguments, cache, columns, taps)
            function = self._functions[key]
            output = self._call(function, model, arguments, cache, columns, taps)
        cache.set_lengths([length + tokens for length in cache.lengths])
        return PassOutput(output.logits[:, :tokens], tuple(state[:, :tokens] for state in output.states))

    def begin_call(self, model: PreTrainedModel) -> None:
        """Forget captured graphs of a model that has changed; `torch.compile` notices that itself."""
        if self._backend is None and (current := fingerprint(model)) != self._fingerprint:
            with self._lock:
                self._functions, self._fingerprint = {}, current

    def release(self, cache: RaggedCache) -> None:
        """Give the cache buffers of its own, before a caller of `generate` receives it."""
        if self._graph_buffers is not None:
            with self._lock:
                self._graph_buffers.release(cache)

    def _reserve(self, cache: RaggedCache, slots: int) -> int:
        """Make room for so many slots, or for the whole call if that is known; returns how many attention reads."""
        columns = -(-slots // COLUMN_BLOCK) * COLUMN_BLOCK
        cache.reserve(columns)
        return columns if self._graph_buffers is None else self._graph_buffers.adopt(cache)

    def _call(
        self,
        function: PassFunction,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        cache: RaggedCache,
        columns: int,
        taps: tuple[int, ...],
        mark_dynamic: bool = False,
    ) -> PassOutput:
        """Run a compiled function; `mark_dynamic` declares the sizes that may change without a new compilation."""
        batch, width = arguments["input_ids"].shape
        masks = arguments["attention_mask"]

        def fixed(mask: torch.Tensor | None) -> torch.Tensor | None:
            return None if mask is None else fixed_mask(mask, batch, columns, function.groups, model.dtype)

        ready = {kind: fixed(mask) for kind, mask in masks.items()} if isinstance(masks, dict) else fixed(masks)
        starts = torch.tensor(cache.lengths, device=arguments["input_ids"].device)
        slots = starts[:, None] + torch.arange(width, device=starts.device)
        buffers = cache.buffers()
        if mark_dynamic and self._backend is not None and self._graph_buffers is None:
            for mask in ready.values() if isinstance(ready, dict) else [ready]:
                if mask is not None:
                    torch._dynamo.mark_dynamic(mask, 3)
            for pair in buffers:
                for buffer in pair:
                    torch._dynamo.mark_dynamic(buffer, 2)
        arguments = {**arguments, "attention_mask": ready}
        if self._backend is None:
            logits, states = function.run(model, arguments, buffers, slots, taps)
        else:
            with torch.compiler.set_stance("default"):  # a compiled target runs eagerly, its draft does not
                if self._graph_buffers is not None:
                    torch.compiler.cudagraph_mark_step_begin()
                logits, states = function.run(model, arguments, buffers, slots, taps)
            if self._graph_buffers is not None:  # the next replay overwrites the outputs of this one
                logits, states = logits.clone(), tuple(state.clone() for state in states)
        return PassOutput(logits, states)

    def _compile(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        cache: RaggedCache,
        columns: int,
        taps: tuple[int, ...],
    ) -> PassFunction:
        """Compile a function for passes of this shape, and compare it with an ordinary pass."""
        name = type(model).__name__
        doing, done, setting = CAPTURING if self._backend is None else COMPILING
        batch, width = arguments["input_ids"].shape
        rows = f"{batch} row{'s' if batch > 1 else ''} of {width} token{'s' if width > 1 else ''}"
        logger.log(logging.INFO if self._backend is None else logging.WARNING, f"{doing} %s for %s", name, rows)
        began, lengths, counted = perf_counter(), cache.lengths, compile_seconds()
        more = {"output_hidden_states": True} if taps else {}
        with grouped_attention() as folded:
            ordinary = cast(Any, model)(**arguments, past_key_values=cache, use_cache=True, return_dict=True, **more)
        cache.set_lengths(lengths)
        function = self._function(model, taps, {groups for _, groups, _ in folded})
        try:
            output = self._call(function, model, arguments, cache, columns, taps, mark_dynamic=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{name} cannot be {done} ({_summary(error)}); leave {setting} out") from error
        finally:
            seconds = perf_counter() - began
            add_compile_seconds(seconds - (compile_seconds() - counted))  # captures count themselves
        if not _agree(ordinary.logits.float(), output.logits.float(), model.dtype):
            raise ValueError(f"the {done} pass of {name} differs from an ordinary one; leave {setting} out")
        if self._backend is None:
            self._fingerprint = fingerprint(model)  # the first pass that returns hidden states installs hooks
        logger.info(f"{done} %s for %s in %.1f s", name, rows, seconds)
        return function

    def _function(self, model: PreTrainedModel, taps: tuple[int, ...], groups: set[int]) -> PassFunction:
        """A function that has not run yet; `groups` as for `compiled_function`."""
        if self._backend is not None:
            return compiled_function(model, self._backend, self._graph_buffers is not None, groups)
        if self._memory is None or self._memory.is_broken:
            self._memory = graph_memory(compat.input_device(model))
        return captured_function(taps, self._memory)


def _summary(error: Exception) -> str:
    """The first two lines of an error, and the line in which the tracer names its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = [line for line in lines[2:] if line.startswith("Developer debug context:")]
    return f"{type(error).__name__}: {' '.join([*lines[:2], *context[:1]])}"


def _agree(ordinary: torch.Tensor, compiled: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits `[batch, tokens, vocab]` differ by rounding alone, if there is something to compare with."""
    if not bool(ordinary.amax(dim=-1).isfinite().all()):
        return True
    pairs = zip(ordinary.flatten(0, 1), compiled.flatten(0, 1), strict=True)
    return is_rounding([difference(*pair) for pair in pairs], dtype)


_lock = threading.Lock()
_passes: WeakKeyDictionary[PreTrainedModel, dict[tuple[Compile, str], CompiledPasses]] = WeakKeyDictionary()


def compiled_passes(model: PreTrainedModel, compile: Compile) -> CompiledPasses:
    """The compiled functions of a model for one call; functions are shared by all calls.

    Args:
        model: the model.
        compile: True to compile passes, "graphs" to capture them alone.

    Raises:
        ValueError: if the passes of the model cannot be compiled or captured.
    """
    check_compilable(model, compile)
    if compile is True and any(map(is_packable, model.modules())):
        packed_model(model)
    device = compat.input_device(model)
    with _lock:
        made, key = _passes.setdefault(model, {}), (compile, str(device))
        if key not in made:
            made[key] = CompiledPasses(None if compile == "graphs" else BACKEND, device.type in GRAPH_DEVICES)
        passes = made[key]
    passes.begin_call(model)
    return passes
