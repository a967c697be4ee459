"""Exact verification: a draft token is accepted if it is the token that plain `generate` chooses.

The target's choice is the argmax, or when sampling the argmax of p divided by the pre-drawn noise of the step (the
Gumbel-max trick; see `hf_specgen.verification.noise`). It does not depend on the draft. A draft model that divides q by
the same noise (common random numbers) agrees with the target far more often than one that samples independently: the
two samples are coupled.

Source: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import VerificationSession, Verifier
from hf_specgen.verification.noise import NoiseBuffer
from hf_specgen.verification.sampling import argmax, exponential_race


class CoupledVerifier(Verifier):
    """The tokens of plain `generate`: the argmax, or the sample that the same seed gives. The default; lossless."""

    def start(self, call: Call) -> VerificationSession:
        return _CoupledSession(call)


class _CoupledSession(VerificationSession):
    def __init__(self, call: Call):
        super().__init__(call)
        self._noise: NoiseBuffer | None = None
        self._confirmed = 0

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        if not self.call.do_sample:
            return argmax(scores)
        if self._noise is not None and self._noise.vocab != scores.shape[2]:
            self._noise.rewind(0)  # drawn by drafting at the prefill, for a draft vocabulary of another size
            self._noise = None
        if self._noise is None:
            self._noise = NoiseBuffer(scores.shape[0], scores.shape[2], scores.device, self.call.seed)
        return exponential_race(scores.softmax(dim=-1), self._noise.at(steps))

    def draft_weights(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q divided by the noise that the target samples with: where q is close to p, the two argmaxes mostly agree."""
        if not self.call.do_sample:
            return super().draft_weights(scores, steps, tokens)
        if self._noise is None:
            self._noise = NoiseBuffer(scores.shape[0], scores.shape[-1], self.call.state.device, self.call.seed)
        buffered = [[max(step, self._confirmed) for step in row] for row in steps]
        noise = self._noise.at(buffered).to(scores.device)  # [batch, positions, vocab]
        noise = noise if tokens is None else noise.gather(2, tokens)
        vocab = min(scores.shape[-1], noise.shape[-1])
        noise = noise.view(*noise.shape[:2], *[1] * (scores.dim() - 3), -1)[..., :vocab]
        return scores[..., :vocab].float().softmax(dim=-1) / noise

    def max_row_skew(self) -> float:
        return self._noise.capacity if self._noise else super().max_row_skew()

    def confirm(self, columns: int) -> None:
        self._confirmed = columns
        if self._noise:
            self._noise.release(columns)

    def end(self, columns: int) -> None:
        if self._noise:
            self._noise.rewind(columns)
        self._noise = None
