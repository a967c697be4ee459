"""Tokenizers of the tiny models: one character a token, so that any text can be encoded again; others for drafts."""

import tempfile
from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

VOCAB = 99
FIRST_CHARACTER = 0x4E00
UNKNOWN = "?"
CHARACTERS = [chr(FIRST_CHARACTER + place) for place in range(VOCAB)]
KINDS = ("characters", "reversed", "subset", "pairs", "bytes")
"""Of `tokenizer_folder`; the first is that of the targets."""


@lru_cache(maxsize=len(KINDS))
def tokenizer_folder(kind: str = "characters") -> Path:
    """A folder with a tokenizer; it lives as long as the process.

    Args:
        kind: "characters", whose token i is the i-th character; "reversed": the same with id VOCAB - 1 - i; "subset":
            every third character is unknown; "pairs": SentencePiece's way of writing spaces, half of the characters,
            and pairs of them; "bytes": byte-level BPE, in which a third of the characters are tokens.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-tokenizer-{kind}-"))
    special = {"unk_token": UNKNOWN} if kind != "bytes" else {}
    PreTrainedTokenizerFast(tokenizer_object=_backend(kind), **special).save_pretrained(folder)
    return folder


def _backend(kind: str) -> Tokenizer:
    if kind == "pairs":
        return _pairs()
    if kind == "bytes":
        return _bytes()
    ids = range(VOCAB) if kind == "characters" else range(VOCAB - 1, -1, -1)
    vocabulary = dict(zip(CHARACTERS, ids, strict=True)) | {UNKNOWN: VOCAB}
    if kind == "subset":
        vocabulary = {text: token for text, token in vocabulary.items() if token == VOCAB or token % 3}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _pairs() -> Tokenizer:
    known = CHARACTERS[::2]
    merges = [(known[i], known[j]) for i in range(4) for j in range(12)]
    texts = [UNKNOWN, "▁", *known, *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE({text: token for token, text in enumerate(texts)}, merges, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _bytes() -> Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [split.pre_tokenize_str(character)[0][0] for character in CHARACTERS]  # three letters, one for each byte
    alphabet = sorted({letter for piece in pieces for letter in piece})
    starts = sorted({piece[:2] for piece in pieces})
    whole = pieces[: VOCAB - len(alphabet) - len(starts)]
    merges = [(start[0], start[1]) for start in starts] + [(piece[:2], piece[2]) for piece in whole]
    vocabulary = {text: token for token, text in enumerate([*alphabet, *starts, *whole])}
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend
