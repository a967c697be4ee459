"""Packed weights in compiled graphs: the multiplication as an operator, and a backend that puts it into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from hf_specgen.targets.packed_weights import packed_layers

_library = torch.library.Library("hf_specgen", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl(_library, "packed_linear", "CPU")
def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    layer = packed_layers.get(weight.data_ptr())
    return layer.linear(x, weight, bias) if layer is not None and layer.has(weight) else linear(x, weight, bias)


@torch.library.register_fake("hf_specgen::packed_linear")  # type: ignore[untyped-decorator]
def _shape_of_packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def with_packed_linears(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that multiplies with packed weights, where a weight was packed.

    Args:
        compile_graph: the backend that compiles the changed graph.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is linear and not node.kwargs:
                node.target = torch.ops.hf_specgen.packed_linear
                node.args = (*node.args, None)[:3]
        graph.recompile()
        return compile_graph(graph, inputs, **options)

    return backend
