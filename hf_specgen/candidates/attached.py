"""Modules that belong to a target, such as draft heads: loaded once per target, dtype and device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.targets.model_parts import output_matrix

T = TypeVar("T")

_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_next_number = count()


def number_of(module: nn.Module) -> int:
    """A number unique to a loaded module in this process; freed modules keep theirs."""
    return _numbers.setdefault(module, next(_next_number))


class AttachedModules(Generic[T]):
    """Modules that a strategy has loaded, by target. May be shared by threads.

    A target that is freed takes its modules with it; one that is moved or cast gets new ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: WeakKeyDictionary[PreTrainedModel, tuple[tuple[torch.dtype, torch.device], T]] = (
            WeakKeyDictionary()
        )

    def on(self, model: PreTrainedModel, load: Callable[[], T]) -> T:
        """The modules for this target; `load` is called if there are none in its dtype on its device.

        The random state is left unchanged: a new module initialises weights, which must not change what is sampled.

        Raises:
            ValueError: if the weights of the output matrix are offloaded.
        """
        weight = output_matrix(model).weight
        if weight.device.type == "meta":
            raise ValueError(
                f"{type(model).__name__} has its output matrix offloaded, and draft heads use its weights; keep "
                "lm_head and the embeddings on a device (device_map), or use another candidate generator"
            )
        key = weight.dtype, weight.device
        with self._lock:
            known = self._loaded.get(model)
            if known is None or known[0] != key:
                with torch.random.fork_rng():
                    known = key, load()
                self._loaded[model] = known
            return known[1]

    def __deepcopy__(self, memo: object) -> AttachedModules[T]:
        return AttachedModules()

    def __reduce__(self) -> tuple[type[AttachedModules[T]], tuple[()]]:
        return AttachedModules, ()
