"""The forward passes of a draft model that has the target's tokenizer, in one `generate` call.

The draft model keeps a per-row cache of its own from step to step. After a step it keeps what it computed for accepted
nodes and drops the rest, so it reads at most two new tokens: an accepted leaf of its tree, and the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import DraftCall, Tree
from hf_specgen.candidates.draft_prompt import embedding_size, known_tokens
from hf_specgen.candidates.read_ahead import ReadAhead
from hf_specgen.candidates.read_nodes import LeadingText
from hf_specgen.candidates.recycling_table import RecyclingTable
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.support import position_table
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

_tables: WeakKeyDictionary[PreTrainedModel, RecyclingTable] = WeakKeyDictionary()
"""What draft models proposed last after each token."""


class DraftModelSession(AutoregressiveSession):
    """Drafts for one call with a model that has the target's tokenizer.

    Args:
        call: the call.
        draft: the draft model.
        reader: runs its forward passes.
        k, tree, confidence_threshold: as for `DraftModelCandidates`; a model that cannot read trees drafts chains.
    """

    def __init__(
        self,
        call: DraftCall,
        draft: PreTrainedModel,
        reader: Target,
        k: int,
        tree: Tree,
        confidence_threshold: float,
    ):
        tree = None if reader.verifies_chains_only else tree
        super().__init__(call, k, tree, confidence_threshold, vocabulary_size(call.model or draft))
        self._state, self._reader = call.state, reader
        self._embedded = embedding_size(draft)
        self._max_positions = position_table(text_config(draft))
        self._has_read_prompt = False
        self._read = [0] * call.state.batch  # generated tokens of each row in the draft model's cache
        self._drafts = [True] * call.state.batch  # the rows that draft in this step
        self._text: LeadingText | None = None  # read with suggested nodes, and not committed yet
        self.takes_suggestions = not reader.verifies_chains_only
        if self.takes_suggestions and tree == "auto" and not self.wants_q:
            self._ahead = ReadAhead(_table(draft, self.remembers), min(self._vocab, self._embedded))

    def room(self, row: int) -> int:
        """How many positions the draft model has left; none where its cache slots may run out."""
        state = self._state
        longest = max(map(len, state.prompts)) + max(map(len, state.generated))
        if longest + MAX_DRAFT_SLOTS > self._reader.slot_limit:
            return 0
        return max(0, self._max_positions - len(self._state.prompts[row]) - len(self._state.generated[row]))

    def first_scores(self) -> torch.Tensor:
        """Read what was generated since the last draft, in the rows that draft now.

        The prompt is read before the first draft, so that a call that never drafts does not read it.
        """
        if not self._has_read_prompt:
            logits = self._reader.prefill(DraftTree.empty(len(self._read)))
            self._has_read_prompt = True
            if not any(self._state.generated):
                self._drafts = [True] * len(self._read)
                return logits[:, -1]
        unread = self._take_unread()
        tree = DraftTree.chains([tokens[1:] for tokens in unread])
        logits = self._run(tree, unread)
        kept = zip(unread, self._drafts, strict=True)
        self._reader.commit([list(range(len(tokens) - 1)) if drafts else None for tokens, drafts in kept])
        for row, tokens in enumerate(unread):
            self._read[row] += len(tokens) if self._drafts[row] else 0
        last = torch.tensor([len(tokens) - 1 for tokens in unread], device=logits.device)
        return logits[torch.arange(len(unread), device=logits.device), last]

    def _take_unread(self) -> list[list[int]]:
        """The tokens of each row that the draft model has not read, in the rows that draft; otherwise the last one."""
        rows = range(len(self._read))
        self._reader.drop_rows([not self._state.has_ended(row) for row in rows])
        self._drafts = [self.budget[row] > 0 and self.room(row) > 0 for row in rows]
        texts = zip(self._state.generated, self._read, self._drafts, strict=True)
        return [known_tokens(text[read:] if drafts else text[-1:], self._embedded) for text, read, drafts in texts]

    def _run(self, tree: DraftTree, unread: Sequence[Sequence[int]]) -> torch.Tensor:
        self.passes.append(sum(self._drafts) * (1 + tree.nodes))
        return self._reader.forward(tree, [tokens[0] for tokens in unread], self._drafts)

    @property
    def reads_first_stage_with_text(self) -> bool:  # type: ignore[override]
        """The first pass of a call reads the prompt alone."""
        return self._has_read_prompt

    def read_suggested(self, suggested: DraftTree) -> torch.Tensor:
        """Read one tree of the unread tokens and the suggested nodes; `keep` commits both."""
        self._text = LeadingText(self._take_unread())
        return self._text.results(self._run(self._text.before(suggested), self._text.unread))

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        return self._reader.grow(tree if self._text is None else self._text.before(tree), new, self._drafts)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep accepted nodes in the cache; those that were not expanded are read by the next `first_scores`."""
        text, self._text = self._text, None
        kept: list[Sequence[int] | None] = list(paths)
        if text is not None:
            kept = [text.path(row, path) if self._drafts[row] else None for row, path in enumerate(paths)]
        self._reader.commit(kept)
        for row, path in enumerate(paths):
            if self._drafts[row]:
                self._read[row] += len(path) + (0 if text is None else len(text.unread[row]))


def _table(draft: PreTrainedModel, remembers: bool) -> RecyclingTable:
    """The table of a draft model; an empty one if equal calls have to draft alike."""
    known = _tables.get(draft) if remembers else None
    if known is not None:
        return known
    empty = RecyclingTable(vocabulary_size(draft))
    return _tables.setdefault(draft, empty) if remembers else empty
