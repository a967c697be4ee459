"""Texts of earlier calls, and any corpus of yours, for n-gram candidates to look into."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import HfApi, hf_hub_download
from safetensors import safe_open
from safetensors.numpy import save_file

from hf_specgen.candidates.locked import Locked
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.candidates.ngram_odds import HISTORY_OUTPUT, HISTORY_PROMPT
from hf_specgen.candidates.ngram_votes import Occurrence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_NAME = "ngram_history.safetensors"
FORMAT = "hf_specgen n-gram history 1"
MAX_TOKENS_OF_FILE = 2**28
"""Maximum number of tokens in a file: 10 GB in memory."""


class NgramHistory(Locked):
    """Texts of earlier calls, and any corpus of yours, for `NgramCandidates` to look into. May be shared by threads.

    Takes 37 bytes a token. When it is full, every new token overwrites the oldest one, so that nothing has to be
    rebuilt. Generated text has higher odds than prompts, since it is the target's own.

    Args:
        max_tokens: how many tokens are remembered.

    Raises:
        ValueError: if `max_tokens` is not positive.

    Example:
        >>> history = NgramHistory(max_tokens=100_000)
        >>> history.add([5, 6, 7, 8], prompt_length=2)
        >>> len(history)  # and a separator
        5
    """

    def __init__(self, max_tokens: int = 1_000_000):
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens!r}")
        self.max_tokens = max_tokens
        self.index = NgramIndex(max_tokens)
        self._is_output = bytearray(max_tokens)
        super().__init__()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.index.nbytes + len(self._is_output)

    def add(self, tokens: Sequence[int], prompt_length: int = 0) -> None:
        """Remember a text, given as token ids.

        Args:
            tokens: the text; of one longer than `max_tokens`, its end.
            prompt_length: how many of its tokens are a prompt; the others count as generated.
        """
        kept = [*tokens[max(0, len(tokens) + 1 - self.max_tokens) :], SEPARATOR][-self.max_tokens :]
        is_output = [int(len(tokens) + 1 - len(kept) + place >= prompt_length) for place in range(len(kept))]
        with self._lock:
            self._extend(kept, bytes(is_output))

    def add_texts(self, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """Remember texts, e.g. `dataset["text"]`."""
        for text in texts:
            self.add(tokenizer(text, add_special_tokens=False)["input_ids"])

    def find(
        self, tail: Sequence[int], limit: int, known: Mapping[int, int], grown: int
    ) -> tuple[dict[int, int], list[Occurrence]]:
        """What `NgramIndex.occurrences` returns, and the same as votes for a tree.

        Texts that other threads add later may overwrite what was found. That changes what is proposed, never the
        output: the target verifies every proposal.
        """
        with self._lock:
            index, is_output = self.index, self._is_output
            found = index.occurrences(tail, limit, known, grown)
            text, end = index.tokens, index.end
        return found, [
            (
                text,
                end if position < end else len(text),
                position,
                length,
                HISTORY_OUTPUT if is_output[position] else HISTORY_PROMPT,
            )
            for position, length in found.items()
        ]

    def kind(self, position: int) -> int:
        """Whether a token was generated or belongs to a prompt, as a kind of `MatchOdds`."""
        return HISTORY_OUTPUT if self._is_output[position] else HISTORY_PROMPT

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the texts to a safetensors file; `load` reads them back."""
        with self._lock:
            text, is_output = np.asarray(self.index.tokens), np.frombuffer(self._is_output, dtype=np.uint8)
            if len(self) == self.max_tokens:  # oldest first
                text, is_output = np.roll(text, -self.index.end), np.roll(is_output, -self.index.end)
            arrays = {"tokens": text[: len(self)].copy(), "is_output": is_output[: len(self)].copy()}
        save_file(arrays, str(path), metadata={"format": FORMAT, "max_tokens": str(self.max_tokens)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NgramHistory:
        """Read what `save` wrote.

        Raises:
            ValueError: if it is another file, or a damaged one.
            OSError: if it cannot be read.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        try:
            tokens, is_output, max_tokens = _read(path)
        except OSError:
            raise
        except Exception as error:  # safetensors raises its own errors for damaged files
            raise ValueError(f"{str(path)!r} is no n-gram history: {error}") from None
        history = cls(max_tokens)
        history._extend(tokens.tolist(), is_output.tobytes())
        return history

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
        """Upload the history to a repository of the Hub, which is made if it does not exist.

        Texts can be read back from it: share only what everybody may read.

        Returns:
            the address of the commit.
        """
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with TemporaryDirectory() as folder:
            self.save(Path(folder) / FILE_NAME)
            return str(
                api.upload_file(path_or_fileobj=str(Path(folder) / FILE_NAME), path_in_repo=FILE_NAME, repo_id=repo_id)
            )

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **download: Any) -> NgramHistory:
        """Read a history from a folder, or from a repository of the Hub.

        Args:
            name_or_path: the folder or repository.
            download: such as `revision` and `token`, see `hf_hub_download`.
        """
        folder = Path(name_or_path)
        return cls.load(
            folder / FILE_NAME if folder.is_dir() else hf_hub_download(str(name_or_path), FILE_NAME, **download)
        )

    def __repr__(self) -> str:
        return f"NgramHistory(max_tokens={self.max_tokens})"

    def _extend(self, tokens: Sequence[int], is_output: bytes) -> None:
        first = self.index.end % self.max_tokens
        split = min(len(tokens), self.max_tokens - first)
        self._is_output[first : first + split] = is_output[:split]
        self._is_output[: len(tokens) - split] = is_output[split:]
        self.index.extend(tokens)


def _read(path: str | os.PathLike[str]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    with safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {json.dumps(metadata.get('format'))}, not {FORMAT!r}")
        max_tokens = int(metadata["max_tokens"])
        shapes = [file.get_slice(name).get_shape() for name in ("tokens", "is_output")]
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not shapes[0][0] <= max_tokens <= MAX_TOKENS_OF_FILE:
            raise ValueError(f"it has {shapes} tokens and flags, but room for {max_tokens}")
        tokens, is_output = file.get_tensor("tokens"), file.get_tensor("is_output")
    if tokens.dtype != np.int32 or is_output.dtype != np.uint8 or (tokens < SEPARATOR).any():
        raise ValueError(f"it has tokens of type {tokens.dtype} and flags of type {is_output.dtype}")
    return tokens, is_output, max_tokens
