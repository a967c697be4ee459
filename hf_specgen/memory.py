"""What `generate` calls learn about a target, for later calls with it: acceptance and speed, by strategy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary


class Learnt(Protocol):
    """What is learnt in a call and useful in later ones."""

    def copy(self) -> Self:
        """A copy for another call, which learns on its own."""


T = TypeVar("T", bound=Learnt)


class Memory:
    """Keeps what calls have learnt as long as their target exists. May be shared by threads.

    `generate(..., memory=False)` neither uses it nor adds to it.
    """

    def __init__(self, max_entries: int = 64):
        self._max_entries, self._lock = max_entries, threading.Lock()
        self._entries: WeakKeyDictionary[Any, OrderedDict[Hashable, Any]] = WeakKeyDictionary()

    def recall(self, model: Any, key: Hashable, new: Callable[[], T]) -> T:
        """A copy of what was last stored for this target and key, or else what `new` makes; `model` may be None."""
        with self._lock:
            entry = None if model is None else self._entries.get(model, OrderedDict()).get(key)
            return new() if entry is None else entry.copy()

    def store(self, model: Any, key: Hashable, learnt: Learnt) -> None:
        """Keep what a call has learnt, as a copy; nothing if `model` is None."""
        if model is None:
            return
        with self._lock:
            entries = self._entries.setdefault(model, OrderedDict())
            entries[key] = learnt.copy()
            entries.move_to_end(key)
            if len(entries) > self._max_entries:
                entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


memory = Memory()
