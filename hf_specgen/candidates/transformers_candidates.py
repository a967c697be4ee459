"""Transformers' own candidate generators (and subclasses of them) inside our decoding loop, for one row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
)

from hf_specgen import compat
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth import FixedDepth
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class TransformersCandidates(Candidates):
    """Wraps a `transformers` `CandidateGenerator`.

    Args:
        generator: any generator whose `get_candidates(input_ids)` needs nothing but the text, such as those
            that Transformers builds. Its calls are those of Transformers' loop. The statistics of the last call are set
            on it as `generator.speculation`.

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
    """Calls a generator as Transformers' loop does: first with the prompt alone, unless there are embeddings instead.

    Here the first token comes from the prefill. If the first candidates begin with it, the others are the draft.
    """

    def __init__(self, batch: DraftBatch, generator: CandidateGenerator):
        super().__init__(batch)
        self._generator = generator
        self._is_first = bool(batch.state.prompts[0])  # generators may fail for a text without tokens
        self._proposed = 0  # by the last call of the generator
        self._matched = 0  # of these the ones that had been generated before
        self._drafted = False
        self._drafted_text: list[int] = []  # prompt, generated tokens and candidates of the last call of the generator

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._drafted = max_depths[0] > 0
        if not self._drafted:
            return DraftTree.empty(1)
        generated = self.batch.state.generated[0]
        candidates = self._candidates([] if self._is_first else generated)
        self._matched = 0
        if self._is_first:
            self._is_first = False
            self._matched = _common_length(candidates, generated)
            if self._matched < len(generated):
                self._report(self._matched)
                self._matched = 0
                candidates = self._candidates(generated)
        return DraftTree.chains([candidates[self._matched :][: max_depths[0]]])

    def _candidates(self, generated: list[int]) -> list[int]:
        """What the generator proposes after the prompt and these tokens."""
        text = self._text(generated)
        self._drop_stale_states(text[0].tolist())
        candidates: Any = self._generator.get_candidates(text)[0]  # type: ignore[arg-type]
        if getattr(candidates, "ndim", 0) != 2 or len(candidates) != 1:
            name = self.batch.call.drafting.name
            raise ValueError(f"get_candidates of {name} must return ids [1, length] and scores, got {candidates!r:.80}")
        tokens: list[int] = candidates[0, text.shape[1] :].tolist()
        self._proposed = len(tokens)
        self._drafted_text = candidates[0].tolist()
        return tokens

    def _drop_stale_states(self, text: list[int]) -> None:
        """Drop the keys and values of rejected draft tokens from the cache of an assistant.

        The generator keeps as many states as the text has tokens before the last two, which is right if a draft and one
        token follow the last draft, as in Transformers' loop. After plain steps, those of rejected draft tokens are
        among them.
        """
        generator = self._generator
        if not isinstance(generator, AssistedCandidateGenerator):
            return
        if isinstance(generator, AssistedCandidateGeneratorDifferentTokenizers):  # its cache has other tokens
            return
        cache: Any = generator.assistant_kwargs.get(compat.CACHE)
        valid = _common_length(self._drafted_text, text)
        if cache is None or valid >= len(text) - 2:
            return
        if (stale := cache.get_seq_length() - valid) > 0:
            cache.crop(-stale)

    def observe(self, result: VerificationResult) -> None:
        if self._drafted:
            self._report(self._matched + len(result.paths[0] or ()))

    def _report(self, accepted: int) -> None:
        """Report how many of the last candidates were accepted; of the scores generators read the length alone."""
        text = self._text(self.batch.state.generated[0])
        scores = text.new_zeros(1, 1 + self._proposed, 0, dtype=torch.float32)
        self._generator.update_candidate_strategy(text, scores, accepted)  # type: ignore[arg-type]

    def _text(self, generated: list[int]) -> torch.Tensor:
        """`[1, tokens]` the prompt and these tokens."""
        return torch.tensor([self.batch.state.prompts[0] + generated], device=self.batch.device)


def _common_length(tokens: list[int], others: list[int]) -> int:
    """How many tokens two lists have in common from their beginning on."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
