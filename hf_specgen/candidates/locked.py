"""Objects that threads share under a lock, and that can be copied and pickled all the same."""

from __future__ import annotations

from threading import RLock
from typing import Any


class Locked:
    """Has the lock `_lock`, which copies and pickles leave out: each copy gets its own.

    Example:
        >>> import copy
        >>> one = Locked()
        >>> copy.deepcopy(one)._lock is one._lock
        False
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = RLock()
