"""State that calls and threads share, and that is saved to a safetensors file."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from threading import RLock, get_ident
from typing import Any, ClassVar, Self

from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file


class SavedState(ABC):
    """Has a lock, which copies and pickles leave out: each copy gets its own."""

    NAME: ClassVar[str]
    """What it is, for messages."""
    FORMAT: ClassVar[str]

    def __init__(self) -> None:
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = RLock()

    @abstractmethod
    def _contents(self) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        """Copies of the arrays, and metadata."""

    @classmethod
    @abstractmethod
    def _from_file(cls, file: Any, metadata: Mapping[str, str]) -> Self:
        """From an open safetensors file; checks shapes before it reads tensors, and what they contain."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; `load` reads it back. Other processes that read it see the old or the new file."""
        with self._lock:
            arrays, metadata = self._contents()
        written = f"{path}.{os.getpid()}.{get_ident()}"
        try:
            save_file(arrays, written, metadata={"format": self.FORMAT, **metadata})
            os.replace(written, path)
        finally:
            Path(written).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: if it is another file, or a damaged one.
            OSError: if it cannot be read.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        try:
            with safe_open(str(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != cls.FORMAT:
                    raise ValueError(f"its format is {json.dumps(metadata.get('format'))}, not {cls.FORMAT!r}")
                return cls._from_file(file, metadata)
        except OSError:
            raise
        except Exception as error:  # safetensors raises its own errors for damaged files
            message = f"{str(path)!r} is no {cls.NAME}: {error}; give a file that {cls.__name__}.save wrote"
            raise ValueError(message) from None
