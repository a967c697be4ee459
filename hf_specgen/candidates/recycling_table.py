"""The table of Token Recycling: for every token the most likely next tokens, as a model last predicted them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from hf_specgen.candidates.acceptance import EDGES
from hf_specgen.candidates.locked import Locked
from hf_specgen.verification.top_tokens import TopTokens

FORMAT = "hf_specgen token recycling 1"
SUCCESSORS = 8
"""Tokens kept after each token, as in the paper: the eighth is accepted in about 1% of the cases."""
MAX_RECENT = 4096
"""Number of recent rows that are also kept as lists, which are read ten times as fast: 2 MB."""
MAX_VOCAB = 2**21
"""Maximum vocabulary size, also of a file: 84 MB."""


class RecyclingTable(Locked):
    """The `SUCCESSORS` most likely tokens after each token, and how probable they were. May be shared by threads.

    Takes 40 bytes for each token of the vocabulary: 5 MB at 128,000.

    Args:
        vocab_size: of the model: the target, or a draft model that reads ahead.

    Raises:
        ValueError: if it is not positive.

    Example:
        >>> table = RecyclingTable(vocab_size=100)
        >>> table.update(TopTokens(np.array([5]), np.array([[7, 9]]), np.array([[0.6, 0.3]])))
        >>> table.row(5)[0], table.row(7)
        ([7, 9], ([], []))
    """

    def __init__(self, vocab_size: int):
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size must be 1 to {MAX_VOCAB}, got {vocab_size}")
        self._successors: NDArray[np.int32] = np.full((vocab_size, SUCCESSORS), -1, dtype=np.int32)
        self._bins: NDArray[np.uint8] = np.zeros((vocab_size, SUCCESSORS), dtype=np.uint8)
        self._recent: dict[int, tuple[list[int], list[int]]] = {}
        super().__init__()

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return len(self._successors)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._successors.nbytes + self._bins.nbytes

    def update(self, top: TopTokens) -> None:
        """Overwrite the successors of every input token of a step; of a token that occurs twice the last ones stay.

        There may be fewer than `SUCCESSORS` of each token, as in a smaller vocabulary.
        """
        count = top.successors.shape[1]
        bins = np.searchsorted(EDGES, top.probabilities)
        with self._lock:
            self._successors[top.tokens, :count] = top.successors
            self._successors[top.tokens, count:] = -1
            self._bins[top.tokens, :count] = bins
            if len(self._recent) > MAX_RECENT or count < SUCCESSORS:
                self._recent.clear()
            if count == SUCCESSORS:
                rows = zip(top.successors.tolist(), bins.tolist(), strict=True)
                self._recent.update(zip(top.tokens.tolist(), rows, strict=True))

    def row(self, token: int) -> tuple[list[int], list[int]]:
        """The successors of a token, most likely first, and the confidence bin of each; nothing if it is unknown."""
        recent = self._recent.get(token)
        if recent is not None:
            return recent
        with self._lock:
            successors, bins = self._successors[token].tolist(), self._bins[token].tolist()
        known = successors.index(-1) if -1 in successors else SUCCESSORS
        return successors[:known], bins[:known]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a safetensors file; `load` reads it back."""
        with self._lock:
            arrays: dict[str, NDArray[Any]] = {"successors": self._successors.copy(), "bins": self._bins.copy()}
        save_file(arrays, str(path), metadata={"format": FORMAT})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecyclingTable:
        """Read what `save` wrote.

        Raises:
            ValueError: if it is another file, or a damaged one.
            OSError: if it cannot be read.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        try:
            successors, bins = _read(path)
        except OSError:
            raise
        except Exception as error:  # safetensors raises its own errors for damaged files
            raise ValueError(f"{str(path)!r} is no table of Token Recycling: {error}") from None
        table = cls(len(successors))
        table._successors[:], table._bins[:] = successors, bins
        return table

    def __repr__(self) -> str:
        return f"RecyclingTable(vocab_size={self.vocab_size})"


def _read(path: str | os.PathLike[str]) -> tuple[NDArray[Any], NDArray[Any]]:
    with safe_open(str(path), framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {json.dumps(metadata.get('format'))}, not {FORMAT!r}")
        shapes: Sequence[Any] = [tuple(file.get_slice(name).get_shape()) for name in ("successors", "bins")]
        vocab_size = shapes[0][0] if shapes[0] else 0
        if shapes != [(vocab_size, SUCCESSORS)] * 2 or not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"its tensors have the shapes {shapes}")
        successors, bins = file.get_tensor("successors"), file.get_tensor("bins")
    if successors.dtype != np.int32 or bins.dtype != np.uint8:
        raise ValueError(f"its tensors have the types {successors.dtype} and {bins.dtype}")
    if successors.min() < -1 or successors.max() >= vocab_size or bins.max() > len(EDGES):
        raise ValueError("it has tokens outside its vocabulary")
    if (np.diff(successors < 0, axis=1) & (successors[:, 1:] >= 0)).any():
        raise ValueError("it has successors after the last one of a token")
    return successors, bins
