"""A draft model with another tokenizer: its text is encoded again in the target's vocabulary.

The draft reads the text of the row in its own tokens and continues it greedily; what it writes is decoded, encoded by
the target's tokenizer and proposed. Only proposals are translated, so verification stays exact. Text near the end of
a row may be tokenized differently once more of it is known, so the last few tokens are encoded anew::

    target    The| cat| s                 "The cat s"                 ►  at| on           proposed
    draft     T|he c|at s            ►    T|he c|at s| a|t on    ►   "at on"

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), section 3 (string-level exact match).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.candidates.base import DraftSession
from hf_specgen.candidates.draft_prompt import decoder_prompt
from hf_specgen.state import Call
from hf_specgen.target.base import Target
from hf_specgen.target.compiled import CompiledPasses
from hf_specgen.tree import DraftTree

UNSTABLE_TOKENS = 8
"""Tokens at the end of a text that are encoded anew when it grows; earlier ones do not change in practice."""
INCOMPLETE = "\ufffd"
"""The replacement character: what a tokenizer decodes the first bytes of a character to."""


@lru_cache(maxsize=8)
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or repository."""
    return AutoTokenizer.from_pretrained(name)


class Codec:
    """A tokenizer without the special tokens that another one does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        unknown = (None, other.unk_token_id)
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self._hidden = {index for index, token in special if other.convert_tokens_to_ids(token) in unknown}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens that the other tokenizer does not know are left out."""
        shown = [token for token in tokens if token not in self._hidden]
        return str(self._tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """The tokens of a text; with the tokenizer's special tokens, such as BOS, if it `begins` a sequence."""
        return list(self._tokenizer.encode(text, add_special_tokens=begins))


class Reencoder:
    """One row's text in the draft's tokens, and the draft's continuations in the target's.

    Args:
        target, draft: of the two tokenizers.
        prompt: the row's prompt in the target's tokens.

    Attributes:
        tokens: the text in the draft's tokens.
        stable: how many of them at the beginning never change.
    """

    def __init__(self, target: Codec, draft: Codec, prompt: Sequence[int]):
        self._target, self._draft = target, draft
        complete = len(prompt)
        while complete and target.decode(prompt[:complete]).endswith(INCOMPLETE):
            complete -= 1
        self._text, self._incomplete = list(prompt[:complete]), list(prompt[complete:])
        self.tokens: list[int] = draft.encode(target.decode(self._text), begins=True) or [0]
        self.stable = 1
        self.stable = self._first_unstable()

    def extend(self, new: Sequence[int]) -> bool:
        """Append target tokens; returns False, and keeps them for the next call, while a character is incomplete."""
        new = [*self._incomplete, *new]
        window = self._text[-UNSTABLE_TOKENS:]
        before, after = self._target.decode(window), self._target.decode([*window, *new])
        self._incomplete = new if after.endswith(INCOMPLETE) else []
        if self._incomplete:
            return False
        kept = self._first_unstable()
        tail = self._draft.decode(self.tokens[kept:])
        text = tail + after[len(before) :] if after.startswith(before) else tail + self._target.decode(new)
        self.tokens[kept:] = self._draft.encode(text)
        self._text.extend(new)
        return True

    def _first_unstable(self) -> int:
        """Index of the first token that is encoded anew; a character begins there."""
        place = max(self.stable, len(self.tokens) - UNSTABLE_TOKENS)
        while place > self.stable and self._draft.decode(self.tokens[place:]).startswith(INCOMPLETE):
            place -= 1
        return place

    def translate(self, continuation: Sequence[int]) -> list[int]:
        """Draft tokens that continue the text, as target tokens; none if they contain no complete character."""
        tail = self.tokens[-UNSTABLE_TOKENS:]
        before, after = self._draft.decode(tail), self._draft.decode([*tail, *continuation])
        text = after[len(before) :].split(INCOMPLETE)[0] if after.startswith(before) else ""
        if not text:
            return []
        known = self._target.decode(self._text[-UNSTABLE_TOKENS:])
        base = self._target.encode(known)
        longer = self._target.encode(known + text)
        if longer[: len(base)] == base:
            return longer[len(base) :]
        return self._target.encode(text)  # encoded together, the text's last token would be longer


class ReencodingSession(DraftSession):
    """Drafts chains with a model of another tokenizer.

    Args:
        call: the call.
        draft: the draft model.
        tokenizers: of the target and of the draft.
        k: maximum depth.
        confidence_threshold: a draft ends before a token with a lower probability.
        compiled: the draft's compiled passes; None to run it eagerly.
    """

    def __init__(
        self,
        call: Call,
        draft: PreTrainedModel,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase],
        k: int,
        confidence_threshold: float,
        compiled: CompiledPasses | None = None,
    ):
        super().__init__(call)
        self._k, self._threshold = k, confidence_threshold
        of_target, of_draft = tokenizers
        codecs = Codec(of_target, of_draft), Codec(of_draft, of_target)
        self._rows = [Reencoder(*codecs, prompt) for prompt in call.state.prompts]
        self._translated = [0] * call.state.batch
        self._cached = [row.tokens[: row.stable] for row in self._rows]
        self._target = _reader(draft, self._cached, call, compiled)
        self._prompts = list(map(len, self._cached))
        self._table = int(getattr(draft.config.get_text_config(), "max_position_embeddings", None) or 2**31)
        self._has_read_prompt = False
        self.passes: list[int] = []

    @torch.no_grad()
    def draft(self, budget: Sequence[int]) -> DraftTree:
        self.passes = []
        depths = [min(self._k, depth) if self._catch_up(row) else 0 for row, depth in enumerate(budget)]
        depths = [
            max(0, min(depth, self._table - len(row.tokens))) for depth, row in zip(depths, self._rows, strict=True)
        ]
        if not any(depths):
            return DraftTree.empty(len(depths))
        if not self._has_read_prompt:
            self._target.prefill(DraftTree.empty(len(depths)))
            self._target.commit([[] for _ in depths])
            self._has_read_prompt = True
        written = self._write(depths)
        drafts = zip(self._rows, written, depths, strict=True)
        return DraftTree.chains([row.translate(tokens)[:depth] if tokens else [] for row, tokens, depth in drafts])

    def _catch_up(self, row: int) -> bool:
        """Translate what was generated since the last draft; False while its last character is incomplete."""
        new = self.call.state.generated[row][self._translated[row] :]
        self._translated[row] += len(new)
        return self._rows[row].extend(new)

    def _write(self, depths: Sequence[int]) -> list[list[int]]:
        """Draft greedily: the tokens of the draft model that continue each row."""
        unread = [self._unread(row) if depth else [0] for row, depth in enumerate(depths)]
        read = [len(tokens) - prompt for tokens, prompt in zip(self._cached, self._prompts, strict=True)]
        self._target.rewind(read)
        written: list[list[int]] = [[] for _ in depths]
        active = [depth > 0 for depth in depths]
        while any(active):
            tree = DraftTree.chains([tokens[1:] for tokens in unread])
            self.passes.append(sum(active) * (1 + tree.nodes))
            logits = self._target.forward(tree, [tokens[0] for tokens in unread], active)
            self._target.commit(
                [list(range(len(tokens) - 1)) if takes else None for tokens, takes in zip(unread, active, strict=True)]
            )
            for row, tokens in enumerate(unread):
                if not active[row]:
                    continue
                self._cached[row] = self._cached[row] + tokens
                probability, token = logits[row, len(tokens) - 1].float().softmax(dim=-1).max(dim=-1)
                written[row].append(int(token))
                active[row] = len(written[row]) < depths[row] and float(probability) >= self._threshold
            unread = [[tokens[-1]] if tokens else [0] for tokens in written]
        return written

    def _unread(self, row: int) -> list[int]:
        """The row's tokens that the draft has not read, at least one; cached tokens that differ are dropped."""
        tokens, cached = self._rows[row].tokens, self._cached[row]
        pairs = enumerate(zip(cached, tokens, strict=False))
        common = next((place for place, (old, new) in pairs if old != new), min(len(cached), len(tokens)))
        common = max(self._prompts[row], min(common, len(tokens) - 1))
        self._cached[row] = tokens[:common]
        return tokens[common:] or tokens[-1:]


def _reader(
    draft: PreTrainedModel, prompts: Sequence[Sequence[int]], call: Call, compiled: CompiledPasses | None
) -> Target:
    return Target(draft, *decoder_prompt(draft, call, prompts), compiled)
