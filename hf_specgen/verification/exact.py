"""Exact verification: a draft token is accepted if it is the token that plain `generate` chooses.

The target's choice is the argmax, or when sampling the argmax of p divided by the pre-drawn noise of the step (the
Gumbel-max trick). It does not depend on the draft. A draft model that divides q by the same noise (common random
numbers) agrees with the target far more often than one that samples independently: the two samples are coupled.

`torch.multinomial(p, 1)` draws one tensor of exponential noise ``e`` per decoding step, shaped like ``p``, and returns
``argmax(p / e)``. So the randomness of token ``t`` does not depend on the probabilities. `NoiseBuffer` draws the
tensors that plain sampling would draw, in the same order, and keeps them by token index: the target's token ``t`` of
row ``b`` is ``argmax(p / noise[t][b])``, whenever it is verified.

With a history, rejection sampling becomes this rule too, with noise of its own: that of an earlier answer to the same
prompt (`ReusedNoiseSession`). Given the weights, ``argmax(p / e)`` has distribution p for exponential noise that does
not depend on them, so the text has the target's distribution, whichever tokens are drafted. And where the earlier model
chose ``argmax(q / e)``, both choices are the same token with probability
``sum_v 1 / sum_w max(p_w / p_v, q_w / q_v) >= (1 - d) / (1 + d)``, d the total variation distance of p and q: an old
answer is mostly kept where the weights have changed little.

Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from hf_specgen import random_state
from hf_specgen.call import Call
from hf_specgen.random_state import NoiseSeed, NoiseSeeds
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import VerificationSession, Verifier, argmax, sample_with_noise

MAX_NOISE_BYTES = 256 * 2**20
"""Memory of buffered noise; limits how far rows may be apart: 64 tokens for 8 rows and a vocabulary of 131,072."""
MIN_BUFFERED_TOKENS = 16
"""Minimum number of tokens with buffered noise, for any batch and vocabulary: with few, fast rows often wait."""


class ExactVerifier(Verifier):
    """The tokens of plain `generate`: the argmax, or the sample that the same seed gives. The default; lossless."""

    def start(self, call: Call) -> VerificationSession:
        return _ExactSession(call)


class _ExactSession(VerificationSession):
    def __init__(self, call: Call):
        super().__init__(call)
        self._noise: NoiseBuffer | None = None
        self._generator: torch.Generator | None = None  # the global one, taken for this call
        self._emitted = 0  # positions
        if call.do_sample:
            check_multinomial(call.state.device, torch.float32)
            if call.seed is None:
                self._generator = self._take_generator()

    def _take_generator(self) -> torch.Generator | None:
        """The global generator, which the call draws from; None if rows have seeds."""
        return random_state.take(self.call.state.device)

    def _seeds(self) -> list[int]:
        """The seed of each row, in a call without a generator."""
        assert self.call.seed is not None
        return [self.call.seed]

    def choose(
        self,
        scores: torch.Tensor,
        token_indices: Sequence[Sequence[int]],
        tree: DraftTree,
        nodes: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        if not self.call.do_sample:
            return argmax(scores)
        if self._noise is None:
            batch, _, vocab = scores.shape
            if self._generator is not None:
                generators = [self._generator]
            else:
                device = self.call.state.device
                generators = [torch.Generator(device).manual_seed(seed) for seed in self._seeds()]
            self._noise = NoiseBuffer(batch, vocab, generators, scores.dtype)
        return sample_with_noise(scores.softmax(dim=-1), self._noise.at(token_indices))

    def draft_noise(self, token_indices: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None:
        """The noise that the target samples with: where q is close to p, the two argmaxes mostly agree."""
        if not self.call.do_sample:
            return None
        assert self._noise is not None, "the prefill chooses before anything is drafted"
        # The noise of emitted positions was dropped; ended rows, for which it is ignored, are still at these.
        return self._noise.at([[max(index, self._emitted) for index in row] for row in token_indices]).to(device)

    def max_row_skew(self) -> float:
        return self._noise.max_row_skew if self._noise else super().max_row_skew()

    def confirm(self, positions: int) -> None:
        self._emitted = positions
        if self._noise:
            self._noise.release(positions)

    def end(self, positions: int) -> None:
        if self._noise:
            self._noise.rewind(positions)
        if self._generator is not None:
            random_state.global_generator(self._generator.device).set_state(self._generator.get_state())
        self._noise = self._generator = None


class ReusedNoiseSession(_ExactSession):
    """Rejection sampling with a history: samples with the noise of earlier answers to the same prompts, or new noise.

    These answers are the predicted tokens. A row takes the seed of an answer that other weights have sampled; no two
    rows take the same one. So rows are independent of each other, and of everything that these weights have sampled;
    they depend on the earlier answers.
    """

    def __init__(self, call: Call, seeds: NoiseSeeds):
        super().__init__(call)
        weights = weights_hash(call.model)
        self._store = seeds
        self._noise_seeds: list[NoiseSeed] = []
        try:
            for prompt in call.state.prompts:
                self._noise_seeds.append(seeds.take(prompt, weights))
        except BaseException:  # Ctrl-C too
            self._put_seeds_back()
            raise
        self.predicted_tokens = [seed.answer for seed in self._noise_seeds]

    def _take_generator(self) -> torch.Generator | None:
        return None

    def _seeds(self) -> list[int]:
        return [seed.seed for seed in self._noise_seeds]

    def _put_seeds_back(self) -> None:
        """Return the seeds as they were, where nothing was sampled with them."""
        for prompt, seed in zip(self.call.state.prompts, self._noise_seeds, strict=False):
            self._store.put_back(prompt, seed)

    def end(self, positions: int) -> None:
        has_sampled = self._noise is not None
        super().end(positions)
        if not has_sampled:
            self._put_seeds_back()
            return
        state = self.call.state
        for prompt, seed, answer in zip(state.prompts, self._noise_seeds, state.generated, strict=True):
            self._store.keep(prompt, seed, list(answer))


def weights_hash(model: torch.nn.Module | None) -> int:
    """A hash of some values of every weight, from all over it."""
    values = list[bytes]()
    for weight in () if model is None else model.parameters():
        local: torch.Tensor = getattr(weight, "_local_tensor", weight).detach()
        if not local.is_meta:
            flat = local.reshape(-1)
            values.append(flat[:: 1 + len(flat) // 64].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hash(tuple(values))


class NoiseBuffer:
    """Exponential noise for each generated token, drawn ahead as needed; `rewind` undoes what was drawn too much.

    Args:
        batch, vocab: rows, and values of each for a token.
        generators: one, which draws for all rows at once as `torch.multinomial` does; or one for each row.
        dtype: of the probabilities, which is what `torch.multinomial` draws its noise in.
    """

    def __init__(
        self, batch: int, vocab: int, generators: Sequence[torch.Generator], dtype: torch.dtype = torch.float32
    ):
        check_multinomial(generators[0].device, dtype)
        # How many tokens the fastest row may be ahead of the slowest.
        self.max_row_skew = max(MIN_BUFFERED_TOKENS, MAX_NOISE_BYTES // (4 * batch * vocab))
        self._shape = (batch // len(generators), vocab)  # of what each generator draws for a token of every row
        self._dtype = dtype
        self._generators = generators
        self._drawn = 0
        self._noise: dict[int, torch.Tensor] = {}  # `[batch, vocab]` by token index
        self._states: dict[int, list[torch.Tensor]] = {}  # of the generators, before each token

    def at(self, token_indices: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[batch, indices, vocab]` the noise of each row for the tokens with its indices; drawn as needed."""
        while self._drawn <= max(map(max, token_indices)):
            self._states[self._drawn] = [generator.get_state() for generator in self._generators]
            noise = [self._drawn_from(generator) for generator in self._generators]
            self._noise[self._drawn] = noise[0] if len(noise) == 1 else torch.cat(noise)
            self._drawn += 1
        slices = [self._noise[index][row] for row, indices in enumerate(token_indices) for index in indices]
        return torch.stack(slices).view(len(token_indices), -1, self._shape[1])

    def _drawn_from(self, generator: torch.Generator) -> torch.Tensor:
        """The next noise of a generator."""
        return torch.empty(self._shape, dtype=self._dtype, device=generator.device).exponential_(generator=generator)

    def release(self, index: int) -> None:
        """Drop the noise of tokens before this index, which no row needs any more."""
        for past in [drawn for drawn in self._noise if drawn < index]:
            del self._noise[past]
            if past > 0:  # a call that is refused in a later step is undone up to its beginning
                del self._states[past]

    def rewind(self, count: int) -> None:
        """Set the generators to the state in which plain `generate` leaves them after `count` tokens."""
        if count < self._drawn:
            for generator, state in zip(self._generators, self._states[count], strict=True):
                generator.set_state(state)


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
