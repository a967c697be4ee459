"""Functions captured as CUDA graphs and replayed in one launch: passes of targets, draft models and heads.

Launching the kernels of a pass of 32 layers one by one takes 24 ms on an H100, which computes for 11 ms of them. A
graph repeats the same kernels on the same addresses: inputs are copied to where they were in the capture, and keys and
values stay in static buffers that later calls use again. There is one graph for each function and shape of its inputs;
a pass over n tokens is padded to the next of the widths 1, 4, 8, 16, 32, … All are captured anew when the module has
changed.

A function runs as a graph if there is one, or if it is due to be captured; else its fallback runs::

    graph = module_graphs.find(run) or module_graphs.capture_if_due(run, call_graphs)
    outputs = graph.replay(run.graph_inputs) if graph else run.fallback()
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_specgen.call import Compile
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.cuda_graphs import Graph, GraphMemory, graph_memory, signature
from hf_specgen.targets.fingerprint import graph_fingerprint
from hf_specgen.targets.static_buffers import BufferSet, GraphBuffers, GraphCache, GraphLayer

logger = logging.getLogger("hf_specgen")
EAGER_PASSES = 4
"""How many eager runs of a shape precede its capture with compile="auto", so that short calls capture nothing. A
capture costs as much time as four or five replays save."""
MAX_GRAPHS = 64
"""Graphs that are kept for a set of buffers: each setting of a sampled call has some of its own."""


Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")
Fallback = TypeVar("Fallback")


class Capturable(Generic[Inputs, Outputs]):
    """A function that can be captured. Functions that are equal compute the same, and share their graphs.

    It receives a module, inputs (nested tensors and plain values, of fixed shapes: a mask has every slot of the
    buffers) and a cache: the cache of the call if it runs eagerly, one of static buffers in a graph.
    """

    failure_is_local: ClassVar[bool] = False
    """Whether a failed capture stops captures of this function alone; otherwise of all functions of the module."""

    def __call__(self, module: nn.Module, inputs: Inputs, cache: Cache) -> Outputs:
        raise NotImplementedError

    def warm_up_inputs(self, inputs: Inputs) -> Inputs | None:
        """Inputs of the same shapes with which the function changes nothing: the warm-up before a capture runs them.

        None for a function that can be repeated, such as a pass, which only writes the same slots again. It is captured
        with its real inputs.
        """
        return None

    def matches(self, expected: Outputs, outputs: Outputs) -> bool:
        """Whether the outputs of a new graph differ from those of an eager run (`fallback`) by rounding alone.

        Called once per graph; not for functions with `warm_up_inputs`, or where `fallback` returns None.
        """
        return True


class _Run:
    """A run of a function that appends `slots` slots to each row of a cache; `fallback` as in `CallGraphs.run`."""

    def __init__(
        self, function: Capturable[Any, Any], inputs: Any, cache: RaggedCache, slots: int, fallback: Callable[[], Any]
    ) -> None:
        self.function = function
        self.cache = cache
        self.slots = slots
        self.fallback = fallback
        self.lengths = cache.lengths  # before the run
        # The inputs of the function, and `[batch]` the first slot that it writes in each row.
        self.graph_inputs = (inputs, torch.tensor(self.lengths))
        # A graph is repeated with other values of its tensors only.
        self.key = (function, signature(self.graph_inputs), torch.is_inference_mode_enabled())
        """Runs with equal keys share a graph."""


class ModuleGraphs:
    """The captured functions of one module, shared by all calls; used by one thread at a time, which holds `lock`.

    Attributes:
        failure: why nothing is captured any more, unless the module changes; None if nothing has failed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a hook may call `generate` of the same module in a pass
        self.running_thread: int | None = None
        """The thread that runs a function, which holds `lock`."""
        self.buffers = GraphBuffers()
        self.failure: str | None = None
        self._fingerprint: int | None = None
        self._memory: GraphMemory | None = None
        self._runs_without_graph: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        """How many runs found no graph, by their key; of the last `MAX_GRAPHS` keys."""
        self._refused: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        """The keys of functions with `failure_is_local` that could not be captured, the last `MAX_GRAPHS`."""

    @property
    def is_running_in_this_thread(self) -> bool:
        """Whether this thread runs a function of the module, so that the present call is made by a hook of it.

        Such a call runs eagerly: inside a function, no graph is captured, replayed or dropped.
        """
        return self.running_thread == threading.get_ident()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which this thread, and no other, runs a function of the module."""
        with self.lock:
            self.running_thread = threading.get_ident()
            try:
                yield
            finally:
                self.running_thread = None

    def drop_stale_graphs(self, module: nn.Module) -> None:
        """Forget the graphs of a module that has changed."""
        current = graph_fingerprint(module)
        if current == self._fingerprint:
            return
        with self.lock:
            self._fingerprint = current
            self._memory = None
            self.failure = None
            self._refused.clear()
            self._runs_without_graph.clear()
            for buffers in self.buffers.sets:
                buffers.graphs.clear()

    def find(self, run: _Run) -> Graph | None:
        """The graph of a run; None if it has not been captured for the buffers of its cache."""
        buffers = self.buffers.of_cache(run.cache)
        graph: Graph | None = None if buffers is None else buffers.graphs.pop(run.key, None)
        if buffers is not None and graph is not None:
            buffers.graphs[run.key] = graph  # at the end: the first one is the least recently used, see `_keep`
        return graph

    def capture_if_due(self, run: _Run, call_graphs: CallGraphs) -> Graph | None:
        """A new graph for a run; None if it is not due, or the function cannot be captured.

        With the mode "graphs" it raises as `disable_captures` does if a function cannot be captured, or its graph
        computes something else; not for functions with `failure_is_local`.
        """
        buffers = self.buffers.of_cache(run.cache)
        runs = self._runs_without_graph.pop(run.key, 0) + 1
        _add_bounded(self._runs_without_graph, run.key, runs)
        is_due = call_graphs.capture_now or call_graphs.mode == "graphs" or runs > EAGER_PASSES
        if buffers is None or self.failure is not None or not is_due or run.key in self._refused:
            return None
        # An eager run to compare the graph with, unless the function changes something: then it is captured with inputs
        # that change nothing. The run is outside of `try`: only errors of the capture are handled here.
        function_inputs, starts = run.graph_inputs
        warm_up_inputs = run.function.warm_up_inputs(function_inputs)
        expected = run.fallback() if warm_up_inputs is None else None
        run.cache.set_lengths(run.lengths)  # the eager run has appended slots
        inputs = (function_inputs if warm_up_inputs is None else warm_up_inputs, starts)
        # Capture, compare and keep.
        try:
            graph = self._capture(run.function, call_graphs.module, inputs, run.slots, buffers)
            if expected is not None and not run.function.matches(expected, graph.replay(run.graph_inputs)):
                raise ValueError("its results differ from those of an ordinary pass")
            self._keep(graph, run, call_graphs.module, buffers)
        except Exception as error:
            if run.function.failure_is_local:
                _add_bounded(self._refused, run.key, None)
                logger.info("%s runs eagerly, as it cannot be captured: %s", type(run.function).__name__, error)
            else:
                self.disable_captures(call_graphs, error)
            return None
        return graph

    def _capture(
        self, function: Capturable[Any, Any], module: nn.Module, inputs: Any, slots: int, buffers: BufferSet
    ) -> Graph:
        """Capture a function that appends `slots` slots to each row of the buffers.

        `inputs` are those of the function and `[batch]` the first slot that it writes in each row. The graph outlives
        the call, so it refers to the buffers, and not to the `_Run`, which holds the cache of the call.
        """
        if self._memory is None or self._memory.is_broken:
            self._memory = graph_memory(buffers.tensors[0][0].device)
        logger.info("capturing %s for %d slots", type(module).__name__, slots)

        def function_on_buffers(static: tuple[Any, torch.Tensor]) -> Any:
            static_inputs, starts = static
            new_slots = starts[:, None] + torch.arange(slots, device=starts.device)
            layers: Any = [GraphLayer(keys, values, new_slots) for keys, values in buffers.tensors]
            return function(module, static_inputs, GraphCache(layers, buffers.joined))

        return Graph(function_on_buffers, inputs, self._memory, function)

    def _keep(self, graph: Graph, run: _Run, module: nn.Module, buffers: BufferSet) -> None:
        """Keep a graph for later runs; if there are too many, drop the least recently used one."""
        # Passes before the first graph may have installed hooks, which are part of it: take the fingerprint again.
        if not is_captured(module):
            self._fingerprint = graph_fingerprint(module)
        _add_bounded(buffers.graphs, run.key, graph)
        self._runs_without_graph.pop(run.key, None)

    def disable_captures(self, call_graphs: CallGraphs, error: Exception) -> None:
        """Capture nothing of this module until it changes; with the mode "auto" a warning names the reason.

        Raises:
            ValueError: with the mode "graphs".
            torch.OutOfMemoryError: with the mode "graphs": `error`, if it is one.
        """
        if call_graphs.mode == "graphs" and isinstance(error, torch.OutOfMemoryError):
            raise error
        name = type(call_graphs.module).__name__
        text = " ".join(str(error).split())[:400]
        self.failure = f"{name} cannot be captured as a CUDA graph ({type(error).__name__}: {text})"
        if call_graphs.mode == "graphs":
            raise ValueError(f'{self.failure}; leave compile="graphs" out') from error
        logger.warning("%s; it runs eagerly", self.failure)


def _add_bounded(values: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Add a value for the key of a run; if there are more than `MAX_GRAPHS`, drop the one that was added first."""
    values[key] = value
    if len(values) > MAX_GRAPHS:
        del values[next(iter(values))]


@dataclass(frozen=True)
class CallGraphs:
    """The captured functions of a module as one call uses them.

    The mode "graphs" captures a function when it first runs with inputs of a shape, and raises if that fails. "auto"
    captures it after `EAGER_PASSES` runs, or at once with `capture_now`; if that fails, functions run eagerly.
    """

    module: nn.Module
    module_graphs: ModuleGraphs
    mode: Compile
    capture_now: bool = False

    @property
    def is_active(self) -> bool:
        """Whether functions are captured: nothing has failed, and this thread runs no function of the module."""
        return self.module_graphs.failure is None and not self.module_graphs.is_running_in_this_thread

    def move_to_static_buffers(self, cache: RaggedCache, slots: int) -> int:
        """Move the cache into static buffers with at least `slots` free slots per row.

        Returns the number of slots per row; 0 if this thread runs a function of the module, or if there is no memory
        (mode "auto": nothing is captured afterwards).

        Raises:
            torch.OutOfMemoryError: with the mode "graphs", if there is no memory.
        """
        if self.module_graphs.is_running_in_this_thread:
            return 0
        with self.module_graphs.lock:
            try:
                cache.reserve(max(cache.lengths) + slots)
                return self.module_graphs.buffers.adopt(cache)
            except torch.OutOfMemoryError as error:
                self.module_graphs.disable_captures(self, error)
                return 0

    def run(
        self,
        function: Capturable[Inputs, Outputs],
        inputs: Inputs,
        cache: RaggedCache,
        slots: int,
        fallback: Callable[[], Fallback],
    ) -> Outputs | Fallback:
        """The outputs of a function that appends `slots` slots to each row of a cache.

        Args:
            function: what runs as a graph, if there is one or it is due, see `ModuleGraphs.capture_if_due`.
            inputs: of the function.
            cache: of the call, in static buffers since `move_to_static_buffers`.
            slots: how many slots the function writes after each row.
            fallback: runs the function eagerly on the cache of the call; or does nothing and returns None, for callers
                that then make the passes themselves. Where there is no graph, its value is returned. It is also called
                before the capture of a function without `warm_up_inputs`, for outputs to compare with. So it is called
                twice if the capture fails: the second run, from the same cache lengths, must give the same result.
        """
        if self.module_graphs.is_running_in_this_thread:
            return fallback()
        run = _Run(function, inputs, cache, slots, fallback)
        with self.module_graphs.running():
            graph = self.module_graphs.find(run) or self.module_graphs.capture_if_due(run, self)
            if graph is None:
                return fallback()
            outputs: Outputs = graph.replay(run.graph_inputs)
        cache.set_lengths([length + slots for length in run.lengths])
        return outputs

    def release(self, cache: RaggedCache) -> None:
        """Let other calls use the buffers of a cache, which needs them no longer."""
        with self.module_graphs.lock:
            self.module_graphs.buffers.release(cache)


_lock = threading.Lock()
_module_graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()


def graphs_of_call(module: nn.Module, mode: Compile) -> CallGraphs:
    """The captured functions of a module for one call; the graphs of a module that has changed are gone.

    Raises:
        ValueError: with the mode "graphs", for a call that a hook of the module makes in a pass of it.
    """
    with _lock:
        module_graphs = _module_graphs.setdefault(module, ModuleGraphs())
    if not module_graphs.is_running_in_this_thread:
        module_graphs.drop_stale_graphs(module)
    elif mode == "graphs":
        name = type(module).__name__
        raise ValueError(
            f'{name} is called by a hook in a pass of its own, and runs eagerly; leave compile="graphs" out'
        )
    return CallGraphs(module, module_graphs, mode)


def is_captured(module: nn.Module) -> bool:
    """Whether a function of a module has been captured."""
    module_graphs = _module_graphs.get(module)
    return module_graphs is not None and any(buffers.graphs for buffers in module_graphs.buffers.sets)
