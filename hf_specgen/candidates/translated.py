"""Sessions of a draft model with another tokenizer, which draft by the shared vocabulary or by encoding text again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import DraftSession, Tree
from hf_specgen.candidates.draft_text import DraftText
from hf_specgen.candidates.reencoding import Codec, Reencoder, load_tokenizer
from hf_specgen.candidates.shared_vocabulary import SharedVocabulary, shared_ids
from hf_specgen.state import Call
from hf_specgen.tree import DraftTree

MIN_SHARED_PROMPT = 0.5
"""Share of the prompt's tokens."""


def translated_session(
    call: Call, draft: PreTrainedModel, k: int, tree: Tree, confidence_threshold: float, compile: bool
) -> DraftSession:
    """The session of a draft model whose tokenizer differs from the target's.

    Args:
        call: the call; `call.model` is set.
        draft: the draft model.
        k, tree, confidence_threshold, compile: as in `DraftModelCandidates`.
    """
    assert call.model is not None
    names = str(call.model.name_or_path), str(draft.name_or_path)
    of_target, of_draft = map(load_tokenizer, names)
    codecs = Codec(of_target, of_draft), Codec(of_draft, of_target)
    draft_size = min(vocabulary_size(draft), len(draft.get_input_embeddings().weight))
    shared = SharedVocabulary(shared_ids(*names), vocabulary_size(call.model), draft_size)
    uses_shared = shared.share(list(chain.from_iterable(call.state.prompts))) >= MIN_SHARED_PROMPT
    translate = shared.draft_token if uses_shared else None
    rows = [Reencoder(*codecs, prompt, translate) for prompt in call.state.prompts]
    text = DraftText(call, draft, rows, compile)
    if not uses_shared:
        return ReencodingSession(call, text, rows, k, confidence_threshold)
    return SharedVocabularySession(call, text, shared, k, None if text.chains_only else tree, confidence_threshold)


class SharedVocabularySession(AutoregressiveSession):
    """Drafts trees of tokens that both vocabularies have.

    Args:
        call: the call.
        text: the rows' texts in the draft's tokens.
        shared: the common tokens.
        k, tree, confidence_threshold: as in `DraftModelCandidates`.
    """

    def __init__(
        self, call: Call, text: DraftText, shared: SharedVocabulary, k: int, tree: Tree, confidence_threshold: float
    ):
        assert call.model is not None
        super().__init__(call, k, tree, confidence_threshold, vocabulary_size(call.model))
        self._text, self._shared = text, shared
        self._drafts = [True] * call.state.batch  # the rows that draft in this step
        self._read: list[list[int]] = []  # the draft's tokens of the nodes that it has read in this step

    def room(self, row: int) -> int:
        return self._text.room(row) if self.budget[row] else 0

    def first_scores(self) -> torch.Tensor:
        self._drafts = [budget > 0 and self.room(row) > 0 for row, budget in enumerate(self.budget)]
        return self._shared.target_logits(self._text.read(self._drafts, self.passes))

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        translated = DraftTree(self._shared.draft_tokens(tree.tokens), tree.parents)
        self._read = translated.tokens.tolist()
        return self._shared.target_logits(self._text.grow(translated, new, self._drafts))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._text.keep(paths, self._read)


class ReencodingSession(DraftSession):
    """Drafts chains greedily as text, which the target's tokenizer encodes.

    Args:
        call: the call.
        text: the rows' texts in the draft's tokens.
        rows: of `text`.
        k: maximum depth.
        confidence_threshold: a draft ends before a token with a lower probability.
    """

    def __init__(self, call: Call, text: DraftText, rows: Sequence[Reencoder], k: int, confidence_threshold: float):
        super().__init__(call)
        self._text, self._rows, self._k, self._threshold = text, rows, k, confidence_threshold
        self.passes: list[int] = []

    @torch.no_grad()
    def draft(self, budget: Sequence[int]) -> DraftTree:
        self.passes = []
        depths = [min(self._k, depth, self._text.room(row)) if depth else 0 for row, depth in enumerate(budget)]
        if not any(depths):
            return DraftTree.empty(len(depths))
        drafts = zip(self._rows, self._write(depths), depths, strict=True)
        return DraftTree.chains([row.translate(tokens)[:depth] if tokens else [] for row, tokens, depth in drafts])

    def _write(self, depths: Sequence[int]) -> list[list[int]]:
        """Draft greedily: the tokens of the draft model that continue each row."""
        written: list[list[int]] = [[] for _ in depths]
        active = [depth > 0 for depth in depths]
        logits = self._text.read(active, self.passes)
        while True:
            probabilities, tokens = (values.tolist() for values in logits.float().softmax(dim=-1).max(dim=-1))
            for row, is_active in enumerate(active):
                if is_active:
                    written[row].append(tokens[row])
                    active[row] = len(written[row]) < depths[row] and probabilities[row] >= self._threshold
            if not any(active):
                return written
            logits = self._text.append(tokens, active, self.passes)
