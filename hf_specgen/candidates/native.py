"""Transformers' own candidate generators (and anybody's subclass of them) inside our loop, for one row."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.candidates.base import Candidates, DraftContext, Drafter
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class NativeCandidates(Candidates):
    """Wraps a `transformers` `CandidateGenerator`.

    Args:
        generator: any generator whose `get_candidates(input_ids)` needs nothing but the text.

    Raises:
        ValueError: if the generator asks for the target's outputs.
    """

    def __init__(self, generator: CandidateGenerator):
        if generator.requires_model_outputs:
            raise ValueError(
                f"{type(generator).__name__} reads the target's outputs, which only Transformers' own loop gives it"
            )
        self.generator = generator

    def bind(self, context: DraftContext, model: PreTrainedModel | None) -> Drafter:
        if len(context.prompts) != 1:
            raise ValueError(
                f"{type(self.generator).__name__} works on one row, got {len(context.prompts)}; "
                "use a generator of hf_specgen for batches"
            )
        return _ForeignDrafter(self.generator, model.device if model is not None else torch.device("cpu"))


class _ForeignDrafter(Drafter):
    def __init__(self, generator: CandidateGenerator, device: torch.device):
        self._generator, self._device = generator, device
        self._drafted = False

    def draft(self, context: DraftContext) -> DraftTree:
        self._context = context
        self._drafted = context.budget[0] > 0
        if not self._drafted:
            return DraftTree.empty(1)
        text = self._text()
        candidates, _ = self._generator.get_candidates(text)  # type: ignore[arg-type]
        guesses = candidates[0, text.shape[1] :].tolist()[: context.budget[0]]
        return DraftTree.chains([guesses])

    open = draft

    def observe(self, verdict: VerificationResult) -> None:
        if not self._drafted:
            return
        accepted = len(verdict.paths[0] or ())
        self._generator.update_candidate_strategy(self._text(), None, accepted)  # type: ignore[arg-type]

    def _text(self) -> torch.Tensor:
        return torch.tensor([self._context.prompts[0] + self._context.generated[0]], device=self._device)
