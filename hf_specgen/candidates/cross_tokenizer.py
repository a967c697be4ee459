"""Draft models with another tokenizer, by token-level intersection (TLI): trees of tokens that both vocabularies have.

The draft model is restricted to these tokens: its logits for them become logits over the target's vocabulary, those of
all other tokens are left out. So its draft tokens are ordinary target tokens with probabilities q, which form trees and
are verified in every mode.

The draft model runs on the text in its own tokens. A token that both vocabularies have is taken over as it is; other
text is encoded with what follows it.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), section 4 (Token-Level Intersection).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.call import Call
from hf_specgen.candidates.base import vocabulary_size
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.encoder_draft import embedding_size
from hf_specgen.libraries import decoded

INCOMPLETE = "\ufffd"  # the replacement character: what a tokenizer decodes the first bytes of a character to
CONTEXT = 8  # tokens of the text before new ones that these are decoded with


def retokenized_texts(batch: DraftBatch, draft: PreTrainedModel) -> tuple[list[DraftText], SharedVocabulary]:
    """The prompts in the tokens of a draft model with another tokenizer, and the tokens that both models have."""
    names = str(batch.model.name_or_path), str(draft.name_or_path)
    of_target, of_draft = map(load_tokenizer, names)
    draft_size = min(draft.config.get_text_config().vocab_size, embedding_size(draft))
    shared = shared_vocabulary(*names, vocabulary_size(batch.model), draft_size)
    tokenizers = FilteredTokenizer(of_target, of_draft), FilteredTokenizer(of_draft, of_target)
    return [Retokenizer(*tokenizers, prompt, shared) for prompt in batch.state.prompts], shared


class DraftText:
    """One row's text in the tokens of a draft model, which here are those of the target."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens = list(prompt)
        self._num_read = 0

    def extend(self, generated: Sequence[int]) -> bool:
        """Append what was generated since the last call; returns False while it ends within a character."""
        self.tokens += generated[self._num_read :]
        self._num_read = len(generated)
        return True


class FilteredTokenizer:
    """A tokenizer without the special tokens that another one does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, other_tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        unknown = (None, other_tokenizer.unk_token_id)
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        other_id = other_tokenizer.convert_tokens_to_ids
        self._hidden = {index for index, token in special if other_id(token) in unknown}
        self._line_break = self._encode("\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens that the other tokenizer does not know are left out."""
        shown = [token for token in tokens if token not in self._hidden]
        return str(self._tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that follows another: SentencePiece adds a space to what begins a text."""
        tokens = self._encode("\n" + text)
        before = len(self._line_break)
        return tokens[before:] if tokens[:before] == self._line_break else self._encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text with which a sequence begins, with special tokens such as BOS."""
        tokens: list[int] = list(self._tokenizer.encode(text))
        begin = self._tokenizer.bos_token_id
        return tokens[1:] if tokens[:2] == [begin, begin] else tokens  # the text has begun with one, too

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class Retokenizer(DraftText):
    """One row's text in the tokens of a draft model with another tokenizer. Tokens never change once they are added."""

    def __init__(
        self, target: FilteredTokenizer, draft: FilteredTokenizer, prompt: Sequence[int], shared: SharedVocabulary
    ):
        self._target = target
        self._draft = draft
        self._shared = shared
        complete = len(prompt)
        while complete and target.decode(prompt[:complete]).endswith(INCOMPLETE):
            complete -= 1
        super().__init__(draft.encode_prompt(target.decode(prompt[:complete])) or [0])
        self._prompt = list(prompt[max(0, complete - CONTEXT) :])
        self._num_read = min(complete, CONTEXT)

    def extend(self, generated: Sequence[int]) -> bool:
        text = [*self._prompt, *generated]
        while self._num_read < len(text) and (token := self._shared.draft_token(text[self._num_read])) is not None:
            self.tokens.append(token)
            self._num_read += 1
        if self._num_read < len(text):
            context = text[max(0, self._num_read - CONTEXT) : self._num_read]
            before = self._target.decode(context)
            after = self._target.decode([*context, *text[self._num_read :]])
            if after.endswith(INCOMPLETE):
                return False
            self.tokens += self._draft.encode(after[len(before) :])
            self._num_read = len(text)
        return True


class SharedVocabulary:
    """The common tokens of two vocabularies.

    `draft_ids` has for each token of the target the id of the draft's token with the same text, or -1. The sizes are
    numbers of logits; tokens of the draft beyond its size are not shared.

    Example:
        >>> shared = SharedVocabulary([2, -1, 0], target_size=4, draft_size=3)
        >>> shared.draft_token(0), shared.draft_token(1)
        (2, None)
        >>> # token 3 of the target is a padding row of its embedding matrix
        >>> shared.target_logits(torch.tensor([5.0, 6.0, 7.0])).tolist()
        [7.0, -1000000000.0, 5.0, -1000000000.0]
    """

    def __init__(self, draft_ids: Sequence[int], target_size: int, draft_size: int):
        known = [index if index < draft_size else -1 for index in draft_ids[:target_size]]
        self._draft_ids = known + [-1] * (target_size - len(known))
        self._index = torch.tensor(self._draft_ids)

    def draft_token(self, token: int) -> int | None:
        """The draft's token for a token of the target; None where it has none."""
        index = self._draft_ids[token] if token < len(self._draft_ids) else -1
        return None if index < 0 else index

    def draft_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft's tokens for those of the target, of any shape; 0 where it has none."""
        return self._on(tokens.device)[tokens].clamp(min=0)

    def _on(self, device: torch.device) -> torch.Tensor:
        """The draft's ids on a device."""
        if self._index.device != device:
            self._index = self._index.to(device)
        return self._index

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits over the target's vocabulary: `[…, draft vocab]` to `[…, target vocab]`, float32."""
        index = self._on(logits.device)
        # Finite, so that scores stay valid if a processor suppresses all others; its exponential is 0.
        return logits[..., index.clamp(min=0)].float().masked_fill_(index < 0, -1e9)


def target_tokenizer(call: Call) -> PreTrainedTokenizerBase:
    """The tokenizer that was given to `generate`, or else that of the target's checkpoint."""
    if call.tokenizer is not None:
        return call.tokenizer
    if not (name := str(cast(Any, call.model).name_or_path or "")):
        raise ValueError(
            "the target was not loaded from a folder or repository, so that its tokenizer is not known; give "
            "generate(tokenizer=…), or a prediction= of token ids"
        )
    return load_tokenizer(name)


@lru_cache(maxsize=8)
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or repository."""
    return AutoTokenizer.from_pretrained(name)


@lru_cache(maxsize=8)
def shared_vocabulary(target: str, draft: str, target_size: int, draft_size: int) -> SharedVocabulary:
    """The common tokens of the tokenizers in two folders or repositories; kept for later calls."""
    return SharedVocabulary(shared_ids(target, draft), target_size, draft_size)


def shared_ids(target: str, draft: str) -> tuple[int, ...]:
    """For each token of the target's tokenizer, the id of the draft's token with the same text, or -1."""
    target_ids, draft_ids = (token_texts(load_tokenizer(name)) for name in (target, draft))
    ids = [-1] * (1 + max(target_ids.values(), default=-1))
    for text, index in target_ids.items():
        ids[index] = draft_ids.get(text, -1)
    return tuple(ids)


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[tuple[Literal["text", "name"], str], int]:
    """The text of every token inside a sentence, with its id; its name where it has no text of its own.

    Decoded behind another token: then "▁the" of SentencePiece and "Ġthe" of byte-level BPE both are " the", and "ing"
    is the text of WordPiece's "##ing". A token that is a part of a character has the name of its vocabulary, which is
    the same in all byte-level vocabularies. Names are kept apart from texts: byte C3 has the name "Ã", which is also
    the text of the token "Ãĥ". Of several tokens with one text the last counts: SentencePiece has its bytes first.
    """
    first = tokenizer.encode("x", add_special_tokens=False)[-1:]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    before, *texts = decoded(tokenizer, [first, *([*first, index] for _, index in vocabulary)])
    ids: dict[tuple[Literal["text", "name"], str], int] = {}
    for (name, index), text in zip(vocabulary, texts, strict=True):
        added = text[len(before) :] if text.startswith(before) else ""
        ids[("name", name) if not added or INCOMPLETE in added else ("text", added)] = index
    return ids
