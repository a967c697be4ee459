"""Coupled verification: a guess stands where plain `generate` would have written it itself.

The picks are those of plain `generate`: the argmax, or when sampling the winner of the exponential race on the noise
tape (see `hf_specgen.verification.noise`). The guesses have no influence on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.state import GenerationState
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import Verifier
from hf_specgen.verification.noise import NoiseBuffer
from hf_specgen.verification.processors import LogitsPipeline
from hf_specgen.verification.sampling import exponential_race


class CoupledVerifier(Verifier):
    """The picks of plain `generate`: the argmax, or the sample that the same seed gives. The default; lossless."""

    def begin(self, scorer: LogitsPipeline, sequences: GenerationState, do_sample: bool, keep_scores: bool) -> None:
        super().begin(scorer, sequences, do_sample, keep_scores)
        self._tape: NoiseBuffer | None = None
        self._confirmed = 0

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        if not self.do_sample:
            return scores.argmax(dim=-1)
        if self._tape is not None and self._tape.vocab != scores.shape[2]:
            self._tape.rewind(0)  # it was made for the first draft, by a draft with another vocabulary
            self._tape = None
        if self._tape is None:
            self._tape = NoiseBuffer(scores.shape[0], scores.shape[2], scores.device)
        return exponential_race(scores.softmax(dim=-1), self._tape.at(steps))

    def draft_weights(self, scores: torch.Tensor, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """What decides the same race, on the target's own noise: where q is near p, the winners mostly agree."""
        if not self.do_sample:
            return super().draft_weights(scores, steps)
        if self._tape is None:
            self._tape = NoiseBuffer(scores.shape[0], scores.shape[2], self.sequences.device)
        steps_on_tape = [[max(step, self._confirmed) for step in row] for row in steps]
        noise = self._tape.at(steps_on_tape).to(scores.device)  # [batch, places, vocab]
        vocab = min(scores.shape[-1], noise.shape[-1])
        return scores[..., :vocab].float().softmax(dim=-1) / noise[..., :vocab]

    def max_lead(self) -> float:
        return self._tape.capacity if self._tape else super().max_lead()

    def confirmed(self, step: int) -> None:
        self._confirmed = step
        if self._tape:
            self._tape.release(step)

    def end(self, step: int) -> None:
        if self._tape:
            self._tape.rewind(step)
        self._tape = None
