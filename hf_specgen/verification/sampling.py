"""Drawing tokens as `torch.multinomial(probabilities, 1)` does, but without its round trip to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def exponential_race(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The winner of the exponential race: a token drawn with probability proportional to its weight.

    Args:
        weights: `[…, vocab]`, not negative, not all zero.
        noise: exponential, of a shape that broadcasts to that of the weights.

    Returns:
        `[…]` tokens; never one whose weight is zero.
    """
    return (weights / noise).argmax(dim=-1)


def exponential(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Noise for `race`."""
    return torch.empty(tuple(shape), device=device).exponential_(generator=generator)


class DraftSampler:
    """Draws drafts from random numbers of their own.

    Acceptance tests and bonus tokens come from torch's global generator. A draft that shared numbers with them would
    not be independent of them, which is all that rejection sampling asks for. The seed is taken from the global
    generator, so a seeded run repeats.
    """

    def __init__(self) -> None:
        self._seed = int(torch.randint(2**62, ()))
        self._generators: dict[torch.device, torch.Generator] = {}

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """`[…, vocab]` a race on `softmax(scores)`: the largest is drawn first, the next largest then, and so on."""
        device = scores.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return scores.float().softmax(dim=-1) / exponential(scores.shape, device, self._generators[device])
