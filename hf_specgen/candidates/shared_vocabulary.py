"""The tokens that the vocabularies of a target and of a draft model have in common, matched by their text.

A draft model with another tokenizer is restricted to these tokens: its logits for them become logits over the target's
vocabulary, those of all other tokens are left out. Its draft tokens are then ordinary target tokens with probabilities
q, so that they form trees and are verified in every mode.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), section 4 (Token-Level Intersection).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""The replacement character: what a tokenizer decodes the first bytes of a character to."""


@lru_cache(maxsize=8)
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or repository."""
    return AutoTokenizer.from_pretrained(name)


class SharedVocabulary:
    """The common tokens of two vocabularies.

    Args:
        draft_ids: for each token of the target, the id of the draft's token with the same text, or -1.
        target_size: number of logits of the target.
        draft_size: number of tokens that the draft has embeddings and logits for; its other tokens are not shared.

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
        self._by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def draft_token(self, token: int) -> int | None:
        """The draft's token for a token of the target; None where it has none."""
        index = self._draft_ids[token] if token < len(self._draft_ids) else -1
        return None if index < 0 else index

    def draft_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft's tokens for those of the target, of any shape; 0 where it has none."""
        return self._index.to(tokens.device)[tokens].clamp(min=0)

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits over the target's vocabulary: `[…, draft vocab]` to `[…, target vocab]`, float32."""
        index, is_missing = self._index_on(logits.device)
        # Finite, so that scores stay valid if a processor suppresses all others; its exponential is 0.
        return logits[..., index].float().masked_fill_(is_missing, -1e9)

    def _index_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`[target_size]` the draft's id of each token, 0 where it has none, and whether it has none."""
        if device not in self._by_device:
            index = self._index.to(device)
            self._by_device[device] = index.clamp(min=0), index < 0
        return self._by_device[device]


@lru_cache(maxsize=8)
def shared_vocabulary(target: str, draft: str, target_size: int, draft_size: int) -> SharedVocabulary:
    """The common tokens of two tokenizers; kept for later calls.

    Args:
        target, draft: folders or repositories of the tokenizers.
        target_size, draft_size: as in `SharedVocabulary`.
    """
    return SharedVocabulary(shared_ids(target, draft), target_size, draft_size)


def shared_ids(target: str, draft: str) -> tuple[int, ...]:
    """For each token of the target's tokenizer, the id of the draft's token with the same text, or -1.

    Args:
        target, draft: folders or repositories of the tokenizers.
    """
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

    Returns:
        the id of each token, by ("text", its text) or ("name", its name).
    """
    first = tokenizer.encode("x", add_special_tokens=False)[-1:]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    before, *texts = _decoded(tokenizer, [first, *([*first, index] for _, index in vocabulary)])
    found: dict[tuple[Literal["text", "name"], str], int] = {}
    for (name, index), text in zip(vocabulary, texts, strict=True):
        added = text[len(before) :] if text.startswith(before) else ""
        found[("name", name) if not added or INCOMPLETE in added else ("text", added)] = index
    return found


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    """The text of each sequence of tokens; at once where the tokenizer can."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "decode_batch"):
        return list(backend.decode_batch(sequences, skip_special_tokens=False))
    return [str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)) for tokens in sequences]
