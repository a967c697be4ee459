"""Texts of earlier calls, and any corpus of yours, for n-gram candidates to look into."""

from __future__ import annotations

import atexit
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from threading import RLock, get_ident
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from hf_specgen.call import checked_count
from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, SEPARATOR, NgramIndex
from hf_specgen.random_state import NoiseSeeds

FORMAT = "hf_specgen n-gram history 1"
MAX_TOKENS_OF_FILE = 2**28  # maximum number of tokens in a file: 20 GB in memory

Occurrence = tuple[Sequence[int], int, int, int, int]
"""A place after tokens that equal the last ones of a row: the text, where it ends, the position of the token that
followed, the length of the match, and its kind. A plain tuple, since every draft makes dozens."""
OWN, NEAR, HISTORY_PROMPT, HISTORY_OUTPUT, ALIGNED, OLDER = range(6)
"""Kinds of occurrences: in the row's own text; in it, close to where tokens were copied from last; in the prompt, or in
the generated part, of earlier texts; in an expected output, close to where tokens were copied from last: in the first
one, which is the most likely, or in another."""
MAX_ANSWERS = 8  # earlier answers of a prompt that drafts are made from, the last ones


class NgramHistory:
    """Texts of earlier calls, and any corpus of yours, for `NgramCandidates` to look into. May be shared by threads.

    Takes up to 70 bytes a token. When it is full, the older half is dropped. Generated text has higher odds than
    prompts, since it is the target's own. Earlier answers to the prompt of a call, or to one that differs in a few
    tokens, are expected outputs of the call.

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
        self.max_tokens = checked_count("max_tokens", max_tokens, 1, "tokens")
        self.index = NgramIndex()
        self._is_output = bytearray()
        self._answers: dict[int, list[tuple[int, int]]] = {}  # by the hash of a prompt: where its answers are
        self.seeds = NoiseSeeds()
        self.file: Path | None = None
        self._version: tuple[int, ...] | None = None  # of the file that was read or written last
        self._unsaved: list[tuple[Sequence[int], int]] = []  # texts that were added since, and their prompt lengths
        self._next_sync = 0.0
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name not in ("_lock", "seeds")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = RLock()
        self.seeds = NoiseSeeds()  # no seed may be used by two histories

    def __len__(self) -> int:
        return len(self.index)

    def add(self, tokens: Sequence[int], prompt_length: int = 0) -> None:
        """Remember a text, given as token ids, unless it repeats the last answer to its prompt.

        Args:
            tokens: the text; of one longer than `max_tokens`, its end.
            prompt_length: how many of its tokens are a prompt; the others count as generated.

        Raises:
            TypeError: if `tokens` are no token ids.
        """
        ids = _token_ids(tokens)
        text = [*(max(SEPARATOR, token) for token in ids), SEPARATOR][-self.max_tokens :]
        prompt = max(0, prompt_length - (len(ids) + 1 - len(text)))
        is_output = bytes(min(prompt, len(text))) + b"\1" * (len(text) - prompt)
        with self._lock:
            for first, end in self._answers.get(_hash(text[:prompt]), [])[-1:]:
                if text[prompt:-1] == self.index.tokens[first:end].tolist():
                    return
            if len(self) + len(text) > self.max_tokens:  # keep the later half of what is allowed, or what fits
                kept = min(self.max_tokens // 2, self.max_tokens - len(text), len(self))
                first = len(self) - kept
                if 0 < first < len(self):  # from the beginning of a text on, so that `forget` finds all of it
                    first = self.index.tokens.index(SEPARATOR, first - 1) + 1
                self._replace(self.index.tokens[first:], self._is_output[first:])
            self._append(text, is_output)
            if self.file is not None:
                self._unsaved.append((text[:-1], prompt))

    def forget(self, prompt: Sequence[int]) -> int:
        """Remove all answers to a prompt, given as token ids, and the prompt before each, also from `of_file`'s file.

        Texts that were added without an answer, and texts longer than `max_tokens`, of which the end is kept, stay.

        Returns:
            How many texts were removed.
        """
        prompt = _token_ids(prompt)
        self.sync()
        self.seeds.forget(prompt)
        with self._lock:
            spans = self._answers.get(_hash(prompt), [])
            tokens = self.index.tokens
            is_output = self._is_output
            for first, end in reversed(spans):
                text = slice(first - len(prompt), end + 1)
                tokens = tokens[: text.start] + tokens[text.stop :]
                is_output = is_output[: text.start] + is_output[text.stop :]
            self._replace(tokens, is_output)
            if self.file is not None:
                self._write()
        return len(spans)

    def answers(self, prompt: Sequence[int]) -> list[Sequence[int]]:
        """The last earlier answers to a prompt, newest first, or to one that differs in a few tokens if it is new."""
        with self._lock:
            spans = self._answers.get(_hash(prompt)) or self._answers_to_similar(prompt)
            texts = [self.index.tokens[first:end].tobytes() for first, end in reversed(spans[-MAX_ANSWERS:])]
        return [array("i", text) for text in dict.fromkeys(texts)]

    def _answers_to_similar(self, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """The spans `(first, end)` in the index of the answers to the stored prompt that is most similar to a new one.

        Compared are the n-grams that end at eight positions of the new prompt. Empty if more than a few tokens differ.
        """
        text = self.index.tokens
        scores: dict[int, float] = {}
        prompts: dict[int, array[int]] = {}
        for eighth in range(1, 9):
            end = len(prompt) * eighth // 8
            keys = set[int]()
            for position in self.index.occurrences(prompt[max(0, end - MAX_MATCH_LENGTH) : end], 24):
                if position and not self._is_output[position - 1]:
                    # The prompt around the occurrence: from the end of the output before it to the next output.
                    begin = self._is_output.rfind(1, 0, position - 1) + 1
                    earlier = text[begin : self._is_output.find(1, position)]
                    key = _hash(earlier)
                    prompts[key] = earlier
                    keys.add(key)
            for key in keys:  # an n-gram of many prompts, as of a chat template, counts little for each
                scores[key] = scores.get(key, 0.0) + 1 / len(keys)
        if not scores:
            return []
        most_similar = max(reversed(scores), key=scores.__getitem__)  # of equal ones the last
        stored = prompts[most_similar]
        longer = max(len(prompt), len(stored))
        common = (Counter(prompt) & Counter(stored)).total()
        return self._answers.get(most_similar, []) if longer - common <= min(8, longer // 8) else []

    def _append(self, tokens: Sequence[int], is_output: bytes | bytearray) -> None:
        """Append whole texts, and add the spans of their answers to `_answers`."""
        first = len(self)
        self.index.extend(tokens)
        self._is_output += is_output
        text = self.index.tokens
        while (answer := self._is_output.find(1, first)) >= 0:
            end = text.index(SEPARATOR, answer)
            if first < answer < end:
                self._answers.setdefault(_hash(text[first:answer]), []).append((answer, end))
            first = end + 1

    def _replace(self, tokens: Sequence[int], is_output: bytes | bytearray) -> None:
        """Replace all texts."""
        self.index = NgramIndex()
        self._is_output = bytearray()
        self._answers = {}
        self._append(tokens, is_output)

    def add_texts(self, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """Remember texts, e.g. `dataset["text"]`."""
        if isinstance(texts, str):
            raise TypeError("add_texts takes a list of texts; give [text] for a single one")
        for text in texts:
            self.add(tokenizer(text, add_special_tokens=False)["input_ids"])

    def add_folder(self, folder: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, files: str = "*") -> None:
        """Remember the text files of a folder and of the folders in it, in the order of their names.

        Args:
            folder: where they are.
            tokenizer: of the target.
            files: a pattern that their names match, such as "*.py".

        Raises:
            ValueError: if there are none.
            UnicodeDecodeError: if one of them is no UTF-8 text.
        """
        paths = [path for path in sorted(Path(folder).expanduser().rglob(files)) if path.is_file()]
        if not paths:
            raise ValueError(f"there are no files {files!r} in {str(folder)!r}; give the folder and pattern of texts")
        self.add_texts((path.read_text(encoding="utf-8") for path in paths), tokenizer)

    def refresh(self, path: str | os.PathLike[str]) -> bool:
        """Replace the texts by those that another process saved, unless the file is the one that was read last.

        One process adds texts and calls `save` from time to time, and any number of others call this.

        Returns:
            Whether there was a new file.
        """
        version = _version_of(Path(path).expanduser())
        if version == self._version:
            return False
        saved = self.load(path)
        with self._lock:
            self.index = saved.index
            self._is_output = saved._is_output
            self._answers = saved._answers
            self.max_tokens = saved.max_tokens
            self._version = version
        return True

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> NgramHistory:
        """The history in a file, the same object for all callers in this process, read from the file if there is one.

        Calls add their answers to it, and write them to the file from time to time, together with those that other
        processes have written since. It takes at most a hundredth of the time between two calls of `sync`; what was
        added after the last one is written when the process ends. Where two processes write at the same moment, texts
        of one may be missing.

        Raises:
            ValueError: if it is another file, or a damaged one.
            OSError: if it cannot be read, or its folder does not exist.
        """
        file = Path(path).expanduser().resolve()
        with _files_lock:
            if file not in _of_files:
                history = cls()
                history.file = file
                if file.exists():
                    history.refresh(file)
                elif not file.parent.is_dir():
                    raise FileNotFoundError(f"there is no folder {str(file.parent)!r} for the history; make it first")
                _of_files[file] = history
                atexit.register(history.sync)
            return _of_files[file]

    def sync(self, only_if_due: bool = False) -> None:
        """Exchange texts with the file of `of_file`: read what others have written, write what was added."""
        began = time.perf_counter()
        with self._lock:
            if self.file is None or (only_if_due and began < self._next_sync):
                return
            if self.file.exists() and self.refresh(self.file):
                added = self._unsaved
                self._unsaved = []
                for text, prompt in added:
                    self.add(text, prompt)
            if self._unsaved:
                self._write()
            now = time.perf_counter()
            self._next_sync = now + 100 * (now - began)

    def _write(self) -> None:
        """Write all texts to the file of `of_file`, and note its version."""
        assert self.file is not None
        self.save(self.file)
        self._unsaved = []
        self._version = _version_of(self.file)

    def find(self, tail: Sequence[int], limit: int, vocabulary: int | None = None) -> list[Occurrence]:
        """Where the end of a text occurs, see `NgramIndex.occurrences`; nowhere if a token is beyond the vocabulary."""
        with self._lock:
            if vocabulary is not None and self.index.max_token >= vocabulary:  # another model has added a text
                return []
            text = self.index.tokens
            end = len(self.index)
            is_output = self._is_output
            return [
                (text, end, position, length, HISTORY_OUTPUT if is_output[position] else HISTORY_PROMPT)
                for position, length in self.index.occurrences(tail, limit).items()
            ]

    def check_vocabulary(self, size: int) -> None:
        """Raise a `ValueError` if a token is beyond a target's vocabulary, as of a target with another tokenizer."""
        if (token := self.index.max_token) >= size:
            raise ValueError(
                f"the history has token {token}, but the target's vocabulary ends at {size - 1}; use one history for "
                "each tokenizer"
            )

    def __repr__(self) -> str:
        return f"NgramHistory(max_tokens={self.max_tokens})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; `load` reads it back. Other processes that read it see the old or the new file."""
        with self._lock:
            tokens = np.array(self.index.tokens, dtype=np.int32)
            is_output = np.array(self._is_output, dtype=np.uint8)
        path = Path(path).expanduser()
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {str(path.parent)!r} to save the history in; make it first")
        temporary = f"{path}.{os.getpid()}.{get_ident()}"
        metadata = {"format": FORMAT, "max_tokens": str(self.max_tokens)}
        try:
            save_file({"tokens": tokens, "is_output": is_output}, temporary, metadata=metadata)
            _replace_file(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NgramHistory:
        """Read what `save` wrote.

        Raises:
            ValueError: if it is another file, or a damaged one.
            OSError: if it cannot be read.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        try:
            with safe_open(str(path), framework="numpy") as file:
                return cls._from_file(file, file.metadata() or {})
        except OSError:
            raise
        except Exception as error:  # safetensors raises its own errors for damaged files
            message = f"{str(path)!r} is no n-gram history: {error}; give a file that NgramHistory.save wrote"
            raise ValueError(message) from None

    @classmethod
    def _from_file(cls, file: Any, metadata: Mapping[str, str]) -> NgramHistory:
        """The history in an open file; shapes are checked before tensors are read."""
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {json.dumps(metadata.get('format'))}, not {FORMAT!r}")
        max_tokens = int(metadata["max_tokens"])
        shapes = [file.get_slice(name).get_shape() for name in ("tokens", "is_output")]
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not shapes[0][0] <= max_tokens <= MAX_TOKENS_OF_FILE:
            raise ValueError(f"it has {shapes} tokens and flags, but holds at most {max_tokens}")
        tokens = file.get_tensor("tokens")
        is_output = file.get_tensor("is_output")
        if tokens.dtype != np.int32 or is_output.dtype != np.uint8 or (tokens < SEPARATOR).any():
            raise ValueError(f"it has tokens of type {tokens.dtype} and flags of type {is_output.dtype}")
        history = cls(max_tokens)
        history._append(tokens.tolist(), is_output.tobytes())
        return history


_of_files: dict[Path, NgramHistory] = {}
_files_lock = RLock()


def _version_of(file: Path) -> tuple[int, ...]:
    """A version of a file, which changes when the file is replaced: time of change, inode and size."""
    status = file.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _token_ids(tokens: Any) -> list[int]:
    """The ids of one text, given as a list, a tensor or an array, as plain integers."""
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        return array("i", map(index, values)).tolist()
    except (TypeError, OverflowError):
        raise TypeError(f"a text must be token ids, such as tokenizer(text)['input_ids'], got {tokens!r:.80}") from None


def _hash(tokens: Sequence[int]) -> int:
    """A hash of tokens, in this process."""
    return hash(array("i", tokens).tobytes())


def _replace_file(temporary: str, path: str | os.PathLike[str]) -> None:
    """Move a temporary file to a path; tried again while another process reads the old file, which Windows refuses."""
    for seconds in (0.1, 0.3, 1.0):
        try:
            return os.replace(temporary, path)
        except PermissionError:
            time.sleep(seconds)
    os.replace(temporary, path)
