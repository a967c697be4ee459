"""PyTorch's global random generators, shared by all threads: no random number is handed out twice.

Whoever draws ahead of use, or leaves a generator as it was, takes its state away with `take` and sets it at the end.
Meanwhile the global generator continues from another state, so that what other threads draw is not drawn again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.Lock()


def global_generator(device: torch.device) -> torch.Generator:
    """The generator that functions without `generator=` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = [module._get_default_mps_generator()] if device.type == "mps" else module.default_generators
    return cast(torch.Generator, generators[device.index or 0])


def take(device: torch.device) -> torch.Generator:
    """A generator in the state of the global one, which gets another state that is derived from it."""
    shared = global_generator(device)
    other = torch.Generator(device)
    with _lock:
        state = None
        while state is None or not torch.equal(state, shared.get_state()):  # another thread has drawn meanwhile
            state = shared.get_state()
            other.manual_seed(int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest()))
            torch.empty(1, device=device).uniform_(generator=other)  # no state that `torch.manual_seed` sets
            following = other.get_state()
        shared.set_state(following)
    return torch.Generator(device).set_state(state)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Restore the global generators of the device and of the CPU at the end."""
    taken = [take(one) for one in {device, torch.device("cpu")}]
    try:
        yield
    finally:
        for generator in taken:
            global_generator(generator.device).set_state(generator.get_state())


class RandomOperations(TorchDispatchMode):
    """Watches whether operations of this thread draw from the global generator of a device, as `found`.

    The generator's state does not show it where other threads draw too.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self.found = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if _may_draw(function) and getattr(output, "device", self._device) == self._device:
            defaults = {argument.name: argument.default_value for argument in function._schema.arguments}
            given = {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}
            # Attention and recurrent layers are tagged because of their dropout, which is usually 0.
            dropout = given.get("dropout_p", given.get("dropout"))
            if "train" in given:  # dropout itself, which in inference mode is one operation
                dropout = given.get("p") if given["train"] else 0.0
            self.found |= given.get("generator") is None and dropout != 0.0
        return output


@lru_cache(maxsize=4096)
def _may_draw(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
