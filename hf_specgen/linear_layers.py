"""Linear layers on a CPU, by the fastest product for each number of tokens.

On some processors PyTorch's `linear` multiplies few tokens slowly: a single token with one thread, a few in a slow path
of the BLAS library. Other products take down to a quarter of the time. Which one is the fastest depends on the machine,
the matrix and the number of tokens, so all are timed in turns in the first passes; oneDNN's are timed later, as it
compiles a kernel for each number of tokens. Layers for which PyTorch's own product is the fastest are left as they are.

Source: the operator of oneDNN's product is that of PyTorch's inductor.
"""

from __future__ import annotations

import copy
import math
import operator
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import has_torch_function_unary
from transformers.pytorch_utils import Conv1D

from hf_specgen import compat
from hf_specgen.product_choice import Product, ShapeChoices, size_class

MAX_TOKENS = 512  # for which a product is chosen; all take equally long for many more
BLOCKS_PER_THREAD = 8  # of the weights, for a single token: more than one, so that all threads end together
PASSES_PER_TIME = 17  # passes of which one has all layers, to time them; a prime, as passes of modules alternate


def _functions() -> tuple[Any, ...]:
    """The functions that compute linear layers, which other libraries may replace in the whole process."""
    return nn.Linear.forward, Conv1D.forward, functional.linear, torch.addmm


_FUNCTIONS = _functions()


class LinearLayer:
    """A linear layer on a CPU, whose `forward` is used in place of that of its class.

    It is a method, since `torch.compile` compiles anew what calls another function or callable object, and goes on with
    what calls the method of another object.

    Args:
        module: an `nn.Linear` or `Conv1D`.
        packed_weight: its weights in oneDNN's layout; None if there is no such copy.
    """

    def __init__(self, module: nn.Module, packed_weight: torch.Tensor | None = None):
        self.module = module
        self._packed_weight = packed_weight
        self._weight = cast(nn.Parameter, module._parameters["weight"])
        self._bias = module._parameters.get("bias")
        self._dtype = self._weight.dtype
        others: list[Product] = [] if packed_weight is None else [LinearLayer.prepacked]
        compiled: list[Product] = []
        if self._dtype == torch.float32:
            others.append(LinearLayer.transposed)
            # A kernel is compiled for each shape and number of tokens, which takes about a millisecond.
            compiled = [LinearLayer.onednn, LinearLayer.onednn_transposed]
        self.products = [LinearLayer.ordinary, *others, *compiled]
        threads = torch.get_num_threads()
        outputs, self._inputs = matrix(module).shape
        self._blocks = math.gcd(outputs, BLOCKS_PER_THREAD * threads)
        key = (type(module), self._weight.shape, self._dtype, self._bias is not None, threads, *self.products)
        self.choices = _choices.setdefault(key, ShapeChoices(LinearLayer.ordinary, others, compiled))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of the layer, by the fastest product unless there are many tokens."""
        # First of all, so that compiled code depends on nothing else. The input may be given by its name.
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return self.ordinary(*args, **kwargs)
        began = time.perf_counter()
        x = args[0]
        tokens = x.numel() // max(1, x.shape[-1])
        if not 0 < tokens <= MAX_TOKENS or not self._may_choose(x):
            return self.ordinary(x)
        choice = self.choices.choice(tokens)
        product = choice.product()
        return choice.timed(self, x, began) if product is None else product(self, x)

    def _may_choose(self, x: torch.Tensor) -> bool:
        """Whether other products than the ordinary one give the same result."""
        parameters = self.module._parameters
        is_same_layer = parameters.get("weight") is self._weight and parameters.get("bias", self) is self._bias
        if not is_same_layer or x.shape[-1] != self._inputs:
            return False
        if not (x.dtype == self._weight.dtype == self._dtype and x.is_cpu):
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.are_deterministic_algorithms_enabled():
            return False
        # Functions that somebody else has replaced, by assignment or by a mode; or input of a class of somebody else.
        return _functions() == _FUNCTIONS and not has_torch_function_unary(x)

    def ordinary(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's class computes it."""
        return cast(torch.Tensor, type(self.module).forward(self.module, *args, **kwargs))

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        """The weights times the transposed input, transposed: BLAS libraries then stream the weights in all threads.

        The product of a matrix and a vector may take one thread, so for a single token the matrix is divided into
        blocks of outputs, which the threads multiply side by side.
        """
        weight = matrix(self.module)
        outputs, inputs = weight.shape
        if x.numel() > inputs:
            return self._output(torch.mm(weight, x.reshape(-1, inputs).t()).t().contiguous(), x)
        blocks = self._blocks
        # A transposed row: a column with other strides is multiplied in a slower path.
        vector = x.reshape(1, inputs).t().expand(blocks, inputs, 1)
        return self._output(torch.bmm(weight.view(blocks, outputs // blocks, inputs), vector), x)

    def onednn(self, x: torch.Tensor) -> torch.Tensor:
        """By oneDNN, from the weights as they are."""
        return _onednn_product(x, matrix(self.module), self.module._parameters.get("bias"))

    def onednn_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """By oneDNN, which takes the weights for the input and the input for the weights."""
        rows = x.reshape(-1, x.shape[-1])
        return self._output(_onednn_product(matrix(self.module), rows, None).t().contiguous(), x)

    def prepacked(self, x: torch.Tensor) -> torch.Tensor:
        """By oneDNN, from the copy of the weights in its layout."""
        return _onednn_product(x, cast(torch.Tensor, self._packed_weight), self.module._parameters.get("bias"))

    def _output(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The output for `x` from the product without the bias, one token after the other."""
        output = product.view(*x.shape[:-1], -1)
        bias = self.module._parameters.get("bias")
        return output if bias is None else output.add_(bias)

    @property
    def is_copy(self) -> bool:
        """Whether it belongs to a model that was copied in a pass: it computes as its class does, and is not needed."""
        return self._weight is None

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearLayer:
        """Without a weight it computes as its class does."""
        copied = LinearLayer.__new__(LinearLayer)
        copied.module = copy.deepcopy(self.module, memo)
        copied._weight = copied._bias = copied._packed_weight = None  # type: ignore[assignment]
        return copied

    def __reduce__(self) -> Any:
        """In a model that is pickled in a pass, the module itself, whose `forward` is the ordinary one."""
        return operator.getitem, ((self.module,), 0)


def layer_of(forward: Any) -> LinearLayer | None:
    """The layer of this package that an instance attribute `forward` is the method of; None for any other."""
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, LinearLayer) else None


def _onednn_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], ""))


_choices: dict[tuple[Any, ...], ShapeChoices] = {}
"""By the shape of layers, their dtype, and all else that their products depend on."""


class FastLinearLayers:
    """The linear layers of modules, which in the context `in_use` are computed by the fastest product.

    It works in float32 on a CPU; elsewhere the context does nothing. Results differ by rounding only, as they do
    between numbers of tokens. With `torch.use_deterministic_algorithms(True)` all products are the ordinary ones.

    Args:
        modules: whose parts are layers to replace.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> with torch.no_grad(), FastLinearLayers(model).in_use():
        ...     outputs = model(torch.ones(1, 4))
    """

    def __init__(self, *modules: nn.Module):
        parts = {part for module in modules for part in module.modules()}
        for part in parts:
            leftover = layer_of(part.__dict__.get("forward"))
            if leftover is not None and leftover.is_copy:
                part.__dict__.pop("forward", None)
        self._layers = [LinearLayer(part) for part in parts if is_replaceable(part, torch.float32)]
        by_shape: dict[int, list[LinearLayer]] = {}
        for layer in self._layers:
            by_shape.setdefault(id(layer.choices), []).append(layer)
        self._by_shape = list(by_shape.values())
        self._is_compiled = any(compat.has_compiled_parts(module) for module in modules)

    @contextmanager
    def in_use(self, tokens: int | None = None) -> Iterator[None]:
        """A context for forward passes of the modules. Other threads that run them meanwhile use the products too.

        Args:
            tokens: of all rows of a pass; None for passes of several sizes, small ones mostly.
        """
        layers = self._useful_layers(tokens)
        try:
            for layer in layers:
                # An instance attribute, which hooks and `Module.__call__` use as they use the method of the class.
                layer.module.__dict__.setdefault("forward", layer.forward)
            yield
        finally:
            restore(layers)

    def _useful_layers(self, tokens: int | None) -> Sequence[LinearLayer]:
        """The layers that may be faster than PyTorch's own for a number of tokens, or for any; now and then all."""
        if torch.are_deterministic_algorithms_enabled():
            return ()
        size = size_class(tokens) if tokens and tokens <= MAX_TOKENS else None
        _passes[size] += 1
        # What is compiled would be compiled anew for each set of replaced layers.
        if self._is_compiled or _passes[size] % PASSES_PER_TIME == 0:
            return self._layers
        useful: list[LinearLayer] = []
        for layers in self._by_shape:
            choices = layers[0].choices
            if choices.is_ordinary(size):
                choices.count_ordinary_calls(size, len(layers))
            else:
                useful += layers
        return useful


_passes = Counter[int | None]()  # by the class of the number of tokens


def restore(layers: Sequence[LinearLayer]) -> None:
    """Let layers compute as their class does; after Ctrl-C in between, all the same."""
    try:
        _remove(layers)
    except BaseException:
        _remove(layers)
        raise


def _remove(layers: Sequence[LinearLayer]) -> None:
    """Remove the `forward` of modules, unless it is another one by now."""
    for layer in layers:
        if layer_of(layer.module.__dict__.get("forward")) is layer:
            layer.module.__dict__.pop("forward", None)


def is_replaceable(module: nn.Module, *dtypes: torch.dtype) -> bool:
    """Whether a module is a plain linear layer on a CPU in one of these dtypes, whose `forward` nobody has replaced.

    Nobody: no user, no library and no `prepacked`; one that a pass in another thread has replaced does not count.
    """
    if type(module) not in (nn.Linear, Conv1D) or not torch.backends.mkldnn.is_available():
        return False
    if _functions() != _FUNCTIONS or not module.__dict__.keys().isdisjoint(("weight", "bias")):
        return False
    weight: Any = module._parameters.get("weight")  # not there where pruning computes it anew in every pass
    if not _is_plain(weight) or weight.dtype not in dtypes or not weight.numel():
        return False
    # The bias too may be computed in every pass. oneDNN reads it as contiguous values, one for each output.
    bias: Any = module._parameters.get("bias", weight)
    if bias is not None and (not _is_plain(bias) or bias.dtype != weight.dtype or not bias.is_contiguous()):
        return False
    if bias is not None and bias.shape != matrix(module).shape[:1]:
        return False
    # An instance `forward` belongs to somebody else, as of accelerate; in a copied model it is the class's own. One
    # without prepacked weights is of a pass in another thread.
    forward = module.forward
    layer = layer_of(forward)
    is_of_pass = layer is not None and layer._packed_weight is None
    return is_of_pass or forward == type(module).forward.__get__(module)


def _is_plain(tensor: Any) -> bool:
    """Whether a weight or bias is a parameter on the CPU, with its values in memory, and of no class of its own."""
    return type(tensor) is nn.Parameter and tensor.device.type == "cpu" and tensor.layout is torch.strided


def matrix(module: nn.Module) -> torch.Tensor:
    """The weights of a layer, `[outputs, inputs]`."""
    weight = cast(torch.Tensor, module._parameters["weight"])
    return weight.t() if type(module) is Conv1D else weight
