"""Runs a draft model with another tokenizer, its KV cache aligned with each row's text in the draft's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.draft_prompt import draft_prompt, embedding_size, known_tokens
from hf_specgen.candidates.reencoding import Reencoder
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.support import position_table
from hf_specgen.tree import DraftTree


class DraftText:
    """The rows' texts in the draft's tokens, and how much of them the draft model has in its cache.

    Args:
        call: the call.
        draft: the draft model.
        rows: translate the text of each row.
        compile: whether the draft's passes are compiled.

    Raises:
        ValueError: if a prompt is longer than what the draft can read.
    """

    def __init__(self, call: DraftCall, draft: PreTrainedModel, rows: Sequence[Reencoder], compile: Compile):
        self._state, self._rows = call.state, rows
        self._embedded = embedding_size(draft)
        self._max_positions = position_table(text_config(draft))
        self._longest = max(len(row.tokens) for row in rows)
        if self._longest > self._max_positions:
            raise ValueError(
                f"the prompt has {self._longest} tokens of the draft's vocabulary, but the draft reads at most "
                f"{self._max_positions}; use another draft"
            )
        self._cached = [self._known(row.tokens[: row.stable]) for row in rows]
        self._prompt_lengths = list(map(len, self._cached))
        prompt = draft_prompt(draft, call, self._cached, share_encoder=None)
        self._reader = make_target(TargetRequirements(), draft, *prompt, compile=compile)
        self.chains_only = self._reader.verifies_chains_only
        """Whether the draft model can only read chains."""
        self._translated = [0] * len(rows)
        self._is_complete = [True] * len(rows)
        self._prompt_logits: torch.Tensor | None = None

    def follow(self) -> None:
        """Translate what has been generated since the last call."""
        for row, text in enumerate(self._state.generated):
            self._is_complete[row] = self._rows[row].extend(text[self._translated[row] :])
            self._translated[row] = len(text)
        self._longest = max(len(row.tokens) for row in self._rows)

    def room(self, row: int) -> int:
        """How many tokens the draft can read after a row's text; 0 while the text ends within a character."""
        if not self._is_complete[row] or self._longest + MAX_DRAFT_SLOTS > self._reader.slot_limit:
            return 0
        return max(0, self._max_positions - len(self._rows[row].tokens))

    def read(self, active: Sequence[bool], passes: list[int]) -> torch.Tensor:
        """Read what the cache lacks of the texts of the active rows.

        Args:
            active: the rows to read, as `follow` has translated them.
            passes: receives the number of tokens of the pass over new text, if there is one.

        Returns:
            `[batch, draft vocab]` logits after each active row's text.
        """
        if self._prompt_logits is None:
            self._prompt_logits = self._reader.prefill(DraftTree.empty(len(active)))[:, -1]
        self._reader.drop_rows([not self._state.has_ended(row) for row in range(len(active))])
        unread = [self._take_unread(row) if is_active else [] for row, is_active in enumerate(active)]
        self._rewind()
        return self._forward(unread, passes) if any(unread) else self._prompt_logits

    def append(self, tokens: Sequence[int], active: Sequence[bool], passes: list[int]) -> torch.Tensor:
        """Read one draft token for each active row, in the draft's vocabulary; logits as from `read`."""
        return self._forward([[token] if reads else [] for token, reads in zip(tokens, active, strict=True)], passes)

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool]) -> torch.Tensor:
        """Read the last `new` nodes of a tree of draft tokens; `[batch, new, draft vocab]` logits after each."""
        return self._reader.grow(tree, new, active)

    def keep(self, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> None:
        """Keep a path of the last tree in each row's cache; `tokens` are those of its nodes."""
        self._reader.commit(paths)
        for row, path in enumerate(paths):
            self._cached[row] += [tokens[row][node] for node in path]

    def _take_unread(self, row: int) -> list[int]:
        """The row's tokens to read next: those that the cache lacks. Cached tokens that differ are dropped.

        The last token is always read anew, for the logits after it, unless they are those after the prompt.
        """
        text, cached = self._rows[row], self._cached[row]
        same = min(text.unchanged, len(cached))
        tail = self._known(text.tokens[same:])
        same += next(
            (place for place, (old, new) in enumerate(zip(cached[same:], tail, strict=False)) if old != new),
            min(len(cached) - same, len(tail)),
        )
        same = max(self._prompt_lengths[row], min(same, len(text.tokens) - 1))
        del cached[same:]
        text.unchanged = len(text.tokens)
        return self._known(text.tokens[same:])

    def _rewind(self) -> None:
        self._reader.rewind(
            [len(tokens) - prompt for tokens, prompt in zip(self._cached, self._prompt_lengths, strict=True)]
        )

    def _forward(self, unread: Sequence[list[int]], passes: list[int]) -> torch.Tensor:
        """Read tokens of some rows; `[batch, draft vocab]` logits after each row's text."""
        assert self._prompt_logits is not None
        reads = [bool(tokens) for tokens in unread]
        tree = DraftTree.chains([tokens[1:] for tokens in unread])
        passes.append(sum(reads) * (1 + tree.nodes))
        logits = self._reader.forward(tree, [tokens[0] if tokens else 0 for tokens in unread], reads)
        self._reader.commit([list(range(len(tokens) - 1)) if tokens else None for tokens in unread])
        for row, tokens in enumerate(unread):
            self._cached[row] += tokens
        last = torch.tensor([max(0, len(tokens) - 1) for tokens in unread], device=logits.device)
        after = logits[torch.arange(len(unread), device=logits.device), last]
        return torch.where(torch.tensor(reads, device=logits.device)[:, None], after, self._prompt_logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return known_tokens(tokens, self._embedded)
