"""Drafts of another tokenizer, by token-level intersection (TLI) or string-level exact match (SLEM).

TLI drafts trees of tokens that both vocabularies have; SLEM drafts chains of text, which are encoded again. The choice
depends on the prompt: if most of its tokens are in both vocabularies, so are most tokens of the answer, and trees of
shared tokens yield more tokens per target pass than chains of re-encoded text.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import DraftCall, DraftSession, Tree
from hf_specgen.candidates.draft_prompt import embedding_size
from hf_specgen.candidates.draft_text import DraftText
from hf_specgen.candidates.pair_speed import DraftTranslation, warn_if_slower
from hf_specgen.candidates.reencoding import Codec, Reencoder, load_tokenizer
from hf_specgen.candidates.shared_vocabulary import SharedVocabulary, shared_vocabulary
from hf_specgen.depth.schedules import context_length
from hf_specgen.tree import DraftTree

MIN_SHARED = 0.5
"""Minimum fraction of prompt tokens in both vocabularies for drafting with shared tokens. With 60% trees of shared
tokens yield more tokens per pass of the target than re-encoded chains do, with 47% as many at a higher cost; see
docs/strategies/draft_model.md."""


def translated_session(
    call: DraftCall,
    draft: PreTrainedModel,
    k: int,
    tree: Tree,
    confidence_threshold: float,
    *,
    compile: Compile = False,
    warns: bool = True,
) -> DraftSession:
    """The session of a draft model whose tokenizer differs from the target's.

    Args:
        call: the call; `call.model` is set.
        draft: the draft model.
        k, tree, confidence_threshold, compile: as in `DraftModelCandidates`.
        warns: whether to warn, once, if drafting is slower than plain decoding.
    """
    assert call.model is not None
    names = str(call.model.name_or_path), str(draft.name_or_path)
    of_target, of_draft = map(load_tokenizer, names)
    codecs = Codec(of_target, of_draft), Codec(of_draft, of_target)
    draft_size = min(draft.config.get_text_config().vocab_size, embedding_size(draft))
    shared = shared_vocabulary(*names, vocabulary_size(call.model), draft_size)
    fraction = shared.shared_fraction(list(chain.from_iterable(call.state.prompts)))
    uses_shared = fraction >= MIN_SHARED
    translate = shared.draft_token if uses_shared else None
    rows = [Reencoder(*codecs, prompt, translate) for prompt in call.state.prompts]
    text = DraftText(call, draft, rows, compile)
    method = "the tokens that both vocabularies have" if uses_shared else "encoding its text again"
    translation = DraftTranslation(names[1], method, fraction) if warns else None
    if uses_shared:
        return SharedVocabularySession(call, text, shared, k, tree, confidence_threshold, translation)
    return ReencodingSession(call, text, rows, k, tree, confidence_threshold, translation)


class SharedVocabularySession(AutoregressiveSession):
    """Drafts trees of tokens that both vocabularies have.

    Args:
        call: the call.
        text: the rows' texts in the draft's tokens.
        shared: the common tokens.
        k, tree, confidence_threshold: as in `DraftModelCandidates`.
        translation: for the warning that drafting is slower; None if there is to be none.
    """

    def __init__(
        self,
        call: DraftCall,
        text: DraftText,
        shared: SharedVocabulary,
        k: int,
        tree: Tree,
        confidence_threshold: float,
        translation: DraftTranslation | None = None,
    ):
        assert call.model is not None
        size = None if text.chains_only else tree
        super().__init__(call, k, size, confidence_threshold, vocabulary_size(call.model))
        self._text, self._shared, self._translation = text, shared, translation
        self._drafts = [True] * call.state.batch  # the rows that draft in this step
        self._read: list[list[int]] = []  # the draft's tokens of the nodes that it has read in this step

    def draft(self, budget: Sequence[int]) -> DraftTree:
        if any(budget):
            self._text.follow()
        return super().draft(budget)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        if any(budget):
            self._text.follow()
        return super().draft_at_prefill(budget)

    def room(self, row: int) -> int:
        return self._text.room(row)

    def first_scores(self) -> torch.Tensor:
        self._drafts = [budget > 0 and self.room(row) > 0 for row, budget in enumerate(self.budget)]
        return self._shared.target_logits(self._text.read(self._drafts, self.passes))

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        translated = DraftTree(self._shared.draft_tokens(tree.tokens), tree.parents)
        self._read = translated.tokens.tolist()
        return self._shared.target_logits(self._text.grow(translated, new, self._drafts))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._text.keep(paths, self._read)

    def end(self) -> None:
        super().end()
        if self._translation is not None:
            warn_if_slower(self.call, self._translation)


class ReencodingSession(DraftSession):
    """Drafts chains greedily as text, which the target's tokenizer encodes.

    Args:
        call: the call.
        text: the rows' texts in the draft's tokens.
        rows: of `text`.
        k, confidence_threshold: as in `DraftModelCandidates`.
        tree: "auto" to end a draft where a further token costs more than it is expected to gain.
        translation: for the warning that drafting is slower; None if there is to be none.
    """

    def __init__(
        self,
        call: DraftCall,
        text: DraftText,
        rows: Sequence[Reencoder],
        k: int,
        tree: Tree,
        confidence_threshold: float,
        translation: DraftTranslation | None = None,
    ):
        super().__init__(call)
        self._text, self._rows, self._k, self._threshold = text, rows, k, confidence_threshold
        self._is_adaptive, self._translation = tree == "auto", translation
        self.passes: list[int] = []

    @torch.no_grad()
    def draft(self, budget: Sequence[int]) -> DraftTree:
        self.passes = []
        if any(budget):
            self._text.follow()
        depths = [min(self._k, depth, self._text.room(row)) for row, depth in enumerate(budget)]
        if not any(depths):
            return DraftTree.empty(len(depths))
        drafts = zip(self._rows, self._write(depths), depths, strict=True)
        return DraftTree.chains([row.translate(tokens)[:depth] if tokens else [] for row, tokens, depth in drafts])

    def _write(self, depths: Sequence[int]) -> list[list[int]]:
        """Draft greedily: the tokens of the draft model that continue each row."""
        written: list[list[int]] = [[] for _ in depths]
        active = [depth > 0 for depth in depths]
        joint, min_joint = [1.0] * len(depths), self._min_joint(sum(active))
        logits = self._text.read(active, self.passes)
        while True:
            probabilities, tokens = (values.tolist() for values in logits.float().softmax(dim=-1).max(dim=-1))
            for row, probability in enumerate(probabilities):
                if active[row]:
                    written[row].append(tokens[row])
                    joint[row] *= probability
                    continues = probability >= self._threshold and joint[row] >= min_joint
                    active[row] = continues and len(written[row]) < depths[row]
            if not any(active):
                return written
            logits = self._text.append(tokens, active, self.passes)

    def _min_joint(self, rows: int) -> float:
        """The joint probability below which a further token costs more than it gains; 0 without a latency model.

        It gains a plain step with that probability, and costs a pass of the draft and one more token in the target's.
        """
        latency = self.call.depth.latency if self._is_adaptive and self.call.depth is not None else None
        if latency is None:
            return 0.0
        target, drafter = latency.at(rows, context_length(self.call))
        plain, two, three = target.by_tokens(np.array([rows, 2 * rows, 3 * rows])).tolist()
        return float((drafter.by_tokens(rows) + three - two) / plain)

    def end(self) -> None:
        if self._translation is not None:
            warn_if_slower(self.call, self._translation)
