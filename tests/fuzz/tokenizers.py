"""Tokenizers of the tiny models: one character a token, so that any text can be encoded again."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

VOCAB = 99
FIRST_CHARACTER = 0x4E00
UNKNOWN = "?"


@lru_cache(maxsize=2)
def tokenizer_folder(reversed_ids: bool = False) -> Path:
    """A folder with a tokenizer of `VOCAB` characters, in this or the opposite order; it lives as long as the process.

    Args:
        reversed_ids: token i has the id VOCAB - 1 - i.
    """
    ids = range(VOCAB - 1, -1, -1) if reversed_ids else range(VOCAB)
    vocabulary = {chr(FIRST_CHARACTER + place): token for place, token in enumerate(ids)} | {UNKNOWN: VOCAB}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    folder = Path(tempfile.mkdtemp(prefix="tiny-tokenizer-"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN).save_pretrained(folder)
    return folder
