"""PyTorch's global random generators, shared by all threads: no random number is handed out twice; noise that is used
again for a prompt after the weights have changed.

Whoever draws ahead of use, or leaves a generator as it was, takes its state away with `take` and sets it at the end.
Meanwhile the global generator continues from another state, so that what other threads draw is not drawn again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    taken: list[torch.Generator] = []
    try:
        taken.extend(take(one) for one in {device, torch.device("cpu")})
        yield
    finally:
        for generator in taken:
            global_generator(generator.device).set_state(generator.get_state())


@dataclass(frozen=True)
class NoiseSeed:
    """The seed of the noise that a row is sampled with."""

    seed: int
    answer: Sequence[int] = ()  # what was sampled with it last, or a longer answer that begins so; empty if nothing was
    weights: tuple[int, ...] = ()  # hashes of the weights that have sampled with it, the last ones last


class NoiseSeeds:
    """The seeds of earlier answers, by prompt. May be shared by threads.

    No seed is given to two rows at a time, and none twice to the same weights: answers that one model samples for a
    prompt are independent.

    Args:
        max_seeds: how many are kept; those of the prompts that were used longest ago are dropped. The number does not
            depend on the answers, so that the noise does not depend on what was kept.

    Example:
        >>> seeds = NoiseSeeds()
        >>> first = seeds.take([5, 6], weights=1)
        >>> seeds.keep([5, 6], first, [7, 8])
        >>> seeds.take([5, 6], weights=1).answer, seeds.take([5, 6], weights=2).answer
        ((), [7, 8])
    """

    def __init__(self, max_seeds: int = 10_000):
        self._max_seeds = max_seeds
        self._count = 0
        self._lock = threading.Lock()
        self._seeds: OrderedDict[tuple[int, ...], list[NoiseSeed]] = OrderedDict()

    def take(self, prompt: Sequence[int], weights: int) -> NoiseSeed:
        """The first seed of the last weights that are not these, or a new one; removed until `keep` or `put_back`."""
        with self._lock:
            seeds = self._seeds.get(tuple(prompt), [])
            usable = [one for one in seeds if weights not in one.weights]
            if not usable:
                return NoiseSeed(int(torch.randint(2**62, ())), (), (weights,))
            taken = next(one for one in usable if one.weights[-1] == usable[-1].weights[-1])
            seeds.remove(taken)
            self._count -= 1
            return NoiseSeed(taken.seed, taken.answer, (*taken.weights, weights))

    def keep(self, prompt: Sequence[int], seed: NoiseSeed, answer: Sequence[int]) -> None:
        """Keep a seed with the answer that was sampled with it; of an answer that was cut short, the earlier one."""
        earlier = list(seed.answer)
        if earlier[: len(answer)] == list(answer):
            answer = earlier
        self._add(prompt, NoiseSeed(seed.seed, answer, seed.weights))

    def put_back(self, prompt: Sequence[int], seed: NoiseSeed) -> None:
        """Return a seed that nothing was sampled with: as it was before `take`, which made it if no weights had it."""
        if seed.weights[:-1]:
            self._add(prompt, NoiseSeed(seed.seed, seed.answer, seed.weights[:-1]))

    def _add(self, prompt: Sequence[int], seed: NoiseSeed) -> None:
        """Add a seed of a prompt; if there are too many, drop those of the prompt that was used longest ago."""
        with self._lock:
            self._seeds.setdefault(tuple(prompt), []).append(seed)
            self._seeds.move_to_end(tuple(prompt))
            self._count += 1
            while self._count > self._max_seeds:
                self._count -= len(self._seeds.popitem(last=False)[1])

    def forget(self, prompt: Sequence[int]) -> None:
        """Remove the seeds and answers of a prompt."""
        with self._lock:
            self._count -= len(self._seeds.pop(tuple(prompt), []))


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
