"""CUDA graphs of forward passes: a pass is replayed in one launch, without being compiled.

On a GPU a pass over few tokens takes as long as launching its kernels one after the other: 24 ms for a model of 32
layers on an H100, of which the GPU computes 11 with 8B parameters. A captured graph launches them all at once. It
repeats exactly what was captured: the same kernels on the same addresses. So inputs are copied to where they were in
the capture, and a graph is captured anew when anything else that the pass depends on has changed, see `fingerprint`.

Source: PyTorch's documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

WARM_UP_RUNS = 2
"""Runs before a capture, in which libraries allocate their workspaces and choose kernels."""

Buffers = Sequence[tuple[torch.Tensor, torch.Tensor]]
PLAIN_VALUES = (bool, int, float, str, type(None))


class CapturedPass:
    """A function on tensors that is captured in its first call, for each set of buffers, and replayed in later ones.

    Args:
        function: `function(model, inputs, buffers)`; returns tensors. The shapes of its inputs never change.
        pool: memory that graphs share, from `torch.cuda.graph_pool_handle()`; an output is valid until the next replay
            of any of them.
    """

    def __init__(self, function: Callable[[Any, Any, Buffers], Any], pool: Any = None):
        self._function, self._pool = function, pool
        self._graphs: dict[int, _Graph] = {}

    def __call__(self, model: Any, inputs: Any, buffers: Buffers) -> Any:
        """Run the function.

        Args:
            model: passed on; the same in all calls.
            inputs: nested tensors, copied to where they were in the capture.
            buffers: read and written where they are.
        """
        place = buffers[0][0].data_ptr()
        if place not in self._graphs:
            self._graphs[place] = _Graph(lambda given: self._function(model, given, buffers), inputs, self._pool)
        return self._graphs[place].replay(inputs)


class _Graph:
    """One captured graph: where its inputs lie, and its outputs."""

    def __init__(self, run: Callable[[Any], Any], inputs: Any, pool: Any):
        leaves, structure = pytree.tree_flatten(inputs)
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        given = pytree.tree_unflatten(self._inputs, structure)
        self._replay, self._outputs = capture(lambda: run(given), pool)

    def replay(self, inputs: Any) -> Any:
        for own, leaf in zip(self._inputs, pytree.tree_leaves(inputs), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(leaf)
        self._replay()
        return self._outputs


def capture(run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Capture what a function does on the current CUDA device.

    Returns:
        A function that does it again, and the outputs, which it writes.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs


def fingerprint(model: nn.Module) -> int:
    """A hash of what a captured pass depends on beside its inputs.

    These are the addresses of weights and buffers, and of each module the class, the hooks and the attributes that are
    numbers, texts or collections of them, such as which adapters are active. Weights that change in place need no new
    capture.
    """
    tensors = [*model.parameters(), *model.buffers()]
    places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
    return hash((tuple(places), tuple(map(_state, model.modules()))))


def _state(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    plain = [(name, repr(value)) for name, value in own.items() if name not in _OF_EVERY_MODULE and _is_plain(value)]
    hooks = tuple(own["_forward_hooks"]), tuple(own["_forward_pre_hooks"])
    return id(module), type(module), id(own.get("forward")), hooks, tuple(plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN_VALUES)


_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes of PyTorch's own: the collections of a module's parts and hooks."""
