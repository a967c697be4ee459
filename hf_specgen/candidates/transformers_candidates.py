"""Transformers' own candidate generators (and subclasses of them) inside our decoding loop, for one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth import FixedDepth
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class TransformersCandidates(Candidates):
    """Wraps a `transformers` `CandidateGenerator`.

    Args:
        generator: any generator whose `get_candidates(input_ids)` needs nothing but the text. The statistics of the
            last call are set on it as `generator.speculation`.

    Raises:
        ValueError: if the generator requires the target's outputs.
    """

    latency_kind = "transformers"
    arguments = {}

    def __init__(self, generator: CandidateGenerator):
        super().__init__(64, FixedDepth())
        if generator.requires_model_outputs:
            raise ValueError(
                f"{type(generator).__name__} reads the target's outputs, which only Transformers' own loop provides; "
                "pass it to Transformers' assisted generation, or use a strategy of hf_specgen"
            )
        self.generator = generator
        self.drafter = type(generator).__qualname__

    @property
    def speculation(self) -> Statistics | None:
        return getattr(self.generator, "speculation", None)

    @speculation.setter
    def speculation(self, statistics: Statistics | None) -> None:
        self.generator.speculation = statistics  # type: ignore[attr-defined]

    def start(self, batch: DraftBatch) -> DraftSession:
        if batch.state.batch != 1:
            raise ValueError(
                f"{type(self.generator).__name__} works on one row, got {batch.state.batch}; "
                "use a generator of hf_specgen for batches"
            )
        return _TransformersSession(batch, self.generator)


class _TransformersSession(DraftSession):
    def __init__(self, batch: DraftBatch, generator: CandidateGenerator):
        super().__init__(batch)
        self._generator = generator
        self._drafted = False

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._drafted = max_depths[0] > 0
        if not self._drafted:
            return DraftTree.empty(1)
        text = self._text()
        candidates: Any = self._generator.get_candidates(text)[0]  # type: ignore[arg-type]
        if getattr(candidates, "ndim", 0) != 2 or len(candidates) != 1:
            name = self.batch.call.drafting.name
            raise ValueError(f"get_candidates of {name} must return ids [1, length] and scores, got {candidates!r:.80}")
        return DraftTree.chains([candidates[0, text.shape[1] :].tolist()[: max_depths[0]]])

    def observe(self, result: VerificationResult) -> None:
        if self._drafted:
            accepted = len(result.paths[0] or ())
            self._generator.update_candidate_strategy(self._text(), None, accepted)  # type: ignore[arg-type]

    def _text(self) -> torch.Tensor:
        state = self.batch.state
        return torch.tensor([state.prompts[0] + state.generated[0]], device=self.batch.device)
