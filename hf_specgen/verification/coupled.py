"""Exact verification: a draft token is accepted if it is the token that plain `generate` chooses.

The target's choice is the argmax, or when sampling the argmax of p divided by the pre-drawn noise of the step (the
Gumbel-max trick). It does not depend on the draft. A draft model that divides q by the same noise (common random
numbers) agrees with the target far more often than one that samples independently: the two samples are coupled.

`torch.multinomial(p, 1)` draws one tensor of exponential noise ``e`` per decoding step, shaped like ``p``, and returns
``argmax(p / e)``. So the randomness of step ``t`` does not depend on the probabilities. `NoiseBuffer` draws the tensors
that plain sampling would draw, in the same order, and keeps them by step: the target's token in step ``t`` of row ``b``
is ``argmax(p / noise[t][b])``, whenever it is verified.

Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from hf_specgen import random_state
from hf_specgen.call import Call
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import VerificationSession, Verifier, argmax, exponential_race

MAX_NOISE_BYTES = 256 * 2**20
"""Memory of buffered noise; limits how far rows may be apart: 64 steps for 8 rows and a vocabulary of 131,072."""
MIN_BUFFERED_STEPS = 16
"""Minimum number of buffered steps, for any batch and vocabulary: with few, fast rows would wait in most steps."""


class CoupledVerifier(Verifier):
    """The tokens of plain `generate`: the argmax, or the sample that the same seed gives. The default; lossless."""

    def start(self, call: Call) -> VerificationSession:
        return _CoupledSession(call)


class _CoupledSession(VerificationSession):
    def __init__(self, call: Call):
        super().__init__(call)
        self._noise: NoiseBuffer | None = None
        self._generator: torch.Generator | None = None
        self._confirmed = 0
        if call.do_sample:
            device = call.state.device
            check_multinomial(device, torch.float32)
            seeded = None if call.seed is None else torch.Generator(device).manual_seed(call.seed)
            self._generator = seeded or random_state.take(device)

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        if self._generator is None:
            return argmax(scores)
        if self._noise is None:
            batch, _, vocab = scores.shape
            self._noise = NoiseBuffer(batch, vocab, self._generator, scores.dtype)
        return exponential_race(scores.softmax(dim=-1), self._noise.at(steps))

    def draft_noise(self, steps: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None:
        """The noise that the target samples with: where q is close to p, the two argmaxes mostly agree."""
        if not self.call.do_sample:
            return None
        assert self._noise is not None, "the prefill chooses before anything is drafted"
        return self._noise.at([[max(step, self._confirmed) for step in row] for row in steps]).to(device)

    def max_row_skew(self) -> float:
        return self._noise.capacity if self._noise else super().max_row_skew()

    def confirm(self, columns: int) -> None:
        self._confirmed = columns
        if self._noise:
            self._noise.release(columns)

    def end(self, columns: int) -> None:
        if self._noise:
            self._noise.rewind(columns)
        if self._generator is not None and self.call.seed is None:
            random_state.global_generator(self._generator.device).set_state(self._generator.get_state())
        self._noise = self._generator = None


class NoiseBuffer:
    """Exponential noise for each decoding step, drawn ahead as needed; `rewind` undoes what was drawn too much.

    `dtype` is that of the probabilities, which is what `torch.multinomial` draws its noise in.
    """

    def __init__(self, batch: int, vocab: int, generator: torch.Generator, dtype: torch.dtype = torch.float32):
        check_multinomial(generator.device, dtype)
        self.capacity = max(MIN_BUFFERED_STEPS, MAX_NOISE_BYTES // (4 * batch * vocab))
        """How many steps the fastest row may be ahead of the slowest, within `MAX_NOISE_BYTES`."""
        self._shape = (batch, vocab)
        self._dtype = dtype
        self._generator = generator
        self._drawn = 0
        self._noise: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def at(self, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[batch, steps, vocab]` the noise of each row at its own steps; drawn as needed."""
        while self._drawn <= max(map(max, steps)):
            self._states[self._drawn] = self._generator.get_state()
            noise = torch.empty(self._shape, dtype=self._dtype, device=self._generator.device)
            self._noise[self._drawn] = noise.exponential_(generator=self._generator)
            self._drawn += 1
        slices = [self._noise[step][row] for row, row_steps in enumerate(steps) for step in row_steps]
        return torch.stack(slices).view(len(steps), -1, self._shape[1])

    def release(self, step: int) -> None:
        """Drop the noise before `step`, which no row needs any more."""
        for past in [known for known in self._noise if known < step]:
            del self._noise[past]
            if past > 0:  # a call that is refused in a later step is undone up to its beginning
                del self._states[past]

    def rewind(self, step: int) -> None:
        """Set the generator to the state in which plain `generate` leaves it after `step` tokens."""
        if step < self._drawn:
            self._generator.set_state(self._states[step])


@lru_cache(maxsize=8)
def check_multinomial(device: torch.device, dtype: torch.dtype) -> None:
    """Raise unless `torch.multinomial` on `device` is argmax(p / exponential noise)."""
    probabilities = torch.full((3, 64), 1 / 64, dtype=dtype, device=device)
    generators = [torch.Generator(device).manual_seed(0) for _ in range(2)]
    sampled = torch.multinomial(probabilities, 1, generator=generators[0])
    noise = torch.empty_like(probabilities).exponential_(generator=generators[1])
    states = [generator.get_state() for generator in generators]
    if not torch.equal(sampled, torch.argmax(probabilities / noise, dim=-1, keepdim=True)) or not torch.equal(*states):
        raise ValueError(
            f"torch.multinomial on {device.type} does not draw as it does on CPU and CUDA, so sampling cannot "
            "repeat the text of plain generate(); use do_sample=False, or keep the inputs on the CPU"
        )
