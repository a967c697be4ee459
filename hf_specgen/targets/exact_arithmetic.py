"""Modes in which the self-check runs a model: in float32 whatever its dtype, and watched for random numbers.

Rounding to half precision is larger than what a wrong position or mask changes in some models, so that the self-check
could not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)


class ExactArithmetic(TorchFunctionMode):
    """PyTorch's functions, called in this thread, compute in float32 where they would in half precision.

    Tensors are converted as a function receives them, so that weights stay as they are. `torch.autocast` is off.

    Example:
        >>> with ExactArithmetic(torch.device("cpu")):
        ...     print((torch.ones(2, dtype=torch.bfloat16) / 3).dtype)
        torch.float32
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device.type

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if function == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return _wide(function(*args))
        if name in ("__get__", "__set__"):
            return function(*args, **(kwargs or {}))
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
        changed = args[:1] if is_in_place else ()
        others = [_wide(argument) for argument in args[len(changed) :]]
        named = {key: _wide(value) for key, value in (kwargs or {}).items()}
        with torch.autocast(self._device, enabled=False):
            return function(*changed, *others, **named)


def _wide(value: Any) -> Any:
    """A tensor or dtype of half precision as one of float32, also inside lists and tuples; any other value as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALF else value
    if type(value) in (list, tuple):
        return type(value)(map(_wide, value))
    return value
