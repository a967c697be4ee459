"""Compiled forward passes: `torch.compile` for a few fixed numbers of tokens, shared by all calls on a model.

A draft has another number of tokens in every step, and a compiled function wants the same shapes every time. So a pass
over n tokens is padded to the next of the widths 1, 4, 8, 16, 32, …, and there is one compiled function for each width
and number of rows. It reads and writes the buffers of the call's `RaggedCache` in place, see
`hf_specgen.target.step_cache`: rollback and accepted paths work as without compilation.

Before a compiled function is used its logits are compared with those of an ordinary pass over the same tokens.
"""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.target.agreement import difference, is_rounding
from hf_specgen.target.attention import grouped_attention
from hf_specgen.target.cache import RaggedCache
from hf_specgen.target.compilable import check_compilable
from hf_specgen.target.compile_time import add_compile_seconds
from hf_specgen.target.fixed_shapes import fixed_mask
from hf_specgen.target.graph_buffers import GraphBuffers
from hf_specgen.target.packable import is_packable
from hf_specgen.target.packed_graphs import with_packed_linears
from hf_specgen.target.packed_weights import packed_model
from hf_specgen.target.step_cache import step

logger = logging.getLogger("hf_specgen")

COLUMN_BLOCK = 64
"""On a CPU attention reads a multiple of so many slots, which keeps masks aligned."""
BACKEND = "inductor"
"""Backend of `torch.compile`; tests use one that needs no compiler."""

GRAPH_DEVICES = ("cuda",)
"""Where passes are captured as graphs."""


@dataclass(frozen=True)
class PassOutput:
    """The result of a compiled pass.

    Args:
        logits: `[batch, tokens, vocab]`.
        states: the requested hidden states, `[batch, tokens, hidden]` each.
    """

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Function:
    """A compiled function, and how many query heads share a mask row in it (0 if masks are not folded)."""

    run: Callable[..., Any]
    groups: int


class CompiledPasses:
    """The compiled functions of one model. May be used by several threads, one at a time.

    Args:
        backend: of `torch.compile`.
        captures_graphs: whether passes are captured as CUDA graphs. Then attention reads the whole buffer in every
            pass, and buffers keep their addresses from call to call.
    """

    def __init__(self, backend: str, captures_graphs: bool):
        self._backend = backend
        self._graph_buffers = GraphBuffers() if captures_graphs else None
        self._functions: dict[tuple[Any, ...], _Function] = {}
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
        function: _Function,
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
        if mark_dynamic and self._graph_buffers is None:
            for mask in ready.values() if isinstance(ready, dict) else [ready]:
                if mask is not None:
                    torch._dynamo.mark_dynamic(mask, 3)
            for pair in buffers:
                for buffer in pair:
                    torch._dynamo.mark_dynamic(buffer, 2)
        with torch.compiler.set_stance("default"):  # a target that the user compiled runs eagerly, its draft does not
            if self._graph_buffers is not None:
                torch.compiler.cudagraph_mark_step_begin()
            logits, states = function.run(model, {**arguments, "attention_mask": ready}, buffers, slots, taps)
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
    ) -> _Function:
        """Compile a function for passes of this shape, and compare it with an ordinary pass."""
        name = type(model).__name__
        batch, width = arguments["input_ids"].shape
        rows = f"{batch} row{'s' if batch > 1 else ''} of {width} token{'s' if width > 1 else ''}"
        logger.warning("compiling %s for %s; later calls of this process reuse it", name, rows)
        began, lengths = perf_counter(), cache.lengths
        more = {"output_hidden_states": True} if taps else {}
        with grouped_attention() as folded:
            ordinary = cast(Any, model)(**arguments, past_key_values=cache, use_cache=True, return_dict=True, **more)
        cache.set_lengths(lengths)
        sizes = {groups for _, groups, _ in folded}
        options = {"dynamic": False, "mode": "reduce-overhead"} if self._graph_buffers is not None else {}
        run = torch.compile(_own_copy(step), fullgraph=True, backend=_packing(model, self._backend), **options)  # type: ignore[call-overload]
        function = _Function(run, sizes.pop() if len(sizes) == 1 else 0)
        try:
            output = self._call(function, model, arguments, cache, columns, taps, mark_dynamic=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{name} cannot be compiled ({_summary(error)}); leave compile=True out") from error
        finally:
            seconds = perf_counter() - began
            add_compile_seconds(seconds)
        _compare(name, ordinary.logits.float(), output.logits.float(), model.dtype)
        logger.info("compiled %s for %s in %.1f s", name, rows, seconds)
        return function


def _packing(model: PreTrainedModel, backend: Any) -> Any:
    """The backend; where weights can be packed, one that multiplies with packed weights."""
    if not any(map(is_packable, model.modules())):
        return backend
    return with_packed_linears(torch._dynamo.lookup_backend(backend))


def _summary(error: Exception) -> str:
    """The first two lines of an error, and the line in which the tracer names its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = [line for line in lines[2:] if line.startswith("Developer debug context:")]
    return f"{type(error).__name__}: {' '.join([*lines[:2], *context[:1]])}"


def _compare(name: str, ordinary: torch.Tensor, compiled: torch.Tensor, dtype: torch.dtype) -> None:
    if not bool(ordinary.amax(dim=-1).isfinite().all()):
        return  # nothing to compare with
    pairs = zip(ordinary.flatten(0, 1), compiled.flatten(0, 1), strict=True)
    differences = [difference(*pair) for pair in pairs]
    if not is_rounding(differences, dtype):
        raise ValueError(
            f"the compiled pass of {name} differs from an ordinary one by {max(differences):.2g} standard deviations "
            "of its logits; leave compile=True out"
        )


def _own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: `torch.compile` limits the number of compilations of one."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


_lock = threading.Lock()
_passes: WeakKeyDictionary[PreTrainedModel, CompiledPasses] = WeakKeyDictionary()


def compiled_passes(model: PreTrainedModel) -> CompiledPasses:
    """The compiled functions of a model, shared by all calls.

    Raises:
        ValueError: if the model cannot be compiled.
    """
    check_compilable(model)
    if any(map(is_packable, model.modules())):
        packed_model(model)
    with _lock:
        if model not in _passes:
            _passes[model] = CompiledPasses(BACKEND, compat.input_device(model).type in GRAPH_DEVICES)
        return _passes[model]
