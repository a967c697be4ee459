"""A row's text in the tokens of a draft model with another tokenizer, and the draft's text in the target's tokens.

The draft reads the text in its own tokens. A token that both vocabularies have is read as it is; other text is encoded
again by the draft's tokenizer. Text near the end of a row may be tokenized differently once more of it is known, so the
last few tokens are encoded anew::

    target    The| cat| s                 "The cat s"                 ►  at| on           proposed
    draft     T|he c|at s            ►    T|he c|at s| a|t on    ►   "at on"

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), section 3 (string-level exact match).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from transformers import AutoTokenizer, PreTrainedTokenizerBase

UNSTABLE_TOKENS = 8
"""Tokens at the end of a text that are encoded anew when it grows; earlier ones do not change in practice."""
INCOMPLETE = "\ufffd"
"""The replacement character: what a tokenizer decodes the first bytes of a character to."""
LINE_BREAK = "\n"
"""Text is encoded behind it, since SentencePiece adds a space to what it takes for the beginning of a text."""


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
        self._line_break = self._encode(LINE_BREAK)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens that the other tokenizer does not know are left out."""
        shown = [token for token in tokens if token not in self._hidden]
        return str(self._tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that follows another."""
        tokens, before = self._encode(LINE_BREAK + text), len(self._line_break)
        return tokens[before:] if tokens[:before] == self._line_break else self._encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text with which a sequence begins, with special tokens such as BOS."""
        tokens: list[int] = list(self._tokenizer.encode(text))
        begin = self._tokenizer.bos_token_id
        return tokens[1:] if tokens[:2] == [begin, begin] else tokens  # the text has begun with one, too

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class Reencoder:
    """One row's text in the draft's tokens, and the draft's continuations in the target's.

    Args:
        target, draft: of the two tokenizers.
        prompt: the row's prompt in the target's tokens.
        translate: the draft's token for a token of the target, None where it has none; None to encode all text again.

    Attributes:
        tokens: the text in the draft's tokens.
        stable: how many of them at the beginning never change; all of the prompt if tokens are translated one by one.
        unchanged: how many of them at the beginning have not changed since it was last set.
    """

    def __init__(
        self,
        target: Codec,
        draft: Codec,
        prompt: Sequence[int],
        translate: Callable[[int], int | None] | None = None,
    ):
        self._target, self._draft, self._translate = target, draft, translate
        complete = len(prompt)
        while complete and target.decode(prompt[:complete]).endswith(INCOMPLETE):
            complete -= 1
        self._text: list[int] = list(prompt[:complete])
        self._incomplete: list[int] = []
        self.tokens: list[int] = draft.encode_prompt(target.decode(self._text)) or [0]
        self.stable = 1
        self.stable = self.unchanged = len(self.tokens) if translate else self._first_unstable()
        self.extend(prompt[complete:])

    def extend(self, new: Sequence[int]) -> bool:
        """Append target tokens; returns False, and keeps them for the next call, while a character is incomplete."""
        if not new:
            return not self._incomplete
        new = [*self._incomplete, *new]
        known = [self._translate(token) for token in new] if self._translate else [None]
        translated = [token for token in known if token is not None]
        if len(translated) == len(new):
            self.tokens += translated
        elif not self._reencode(new):
            return False
        self._text.extend(new)
        return True

    def _reencode(self, new: list[int]) -> bool:
        """Encode the end of the text again, with new target tokens; returns False while a character is incomplete."""
        window = self._text[-UNSTABLE_TOKENS:]
        before, after = self._target.decode(window), self._target.decode([*window, *new])
        self._incomplete = new if after.endswith(INCOMPLETE) else []
        if self._incomplete:
            return False
        kept = self._first_unstable()
        tail = self._draft.decode(self.tokens[kept:])
        text = tail + after[len(before) :] if after.startswith(before) else tail + self._target.decode(new)
        self.tokens[kept:] = self._draft.encode(text)
        self.unchanged = min(self.unchanged, kept)
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
