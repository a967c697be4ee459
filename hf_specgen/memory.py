"""What `generate` calls learn about a target, for later calls with it: latencies, and acceptance by strategy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Memory:
    """Keeps what calls have learnt as long as their target exists. May be shared by threads.

    `generate(..., memory=False)` uses and adds latencies only.
    """

    def __init__(self, max_entries: int = 64):
        self._max_entries, self._lock = max_entries, threading.Lock()
        self._entries: WeakKeyDictionary[Any, OrderedDict[Hashable, Any]] = WeakKeyDictionary()

    def recall(self, model: Any, key: Hashable, new: Callable[[], T]) -> T:
        """A copy of what was last stored for this target and key, or else what `new` makes; `model` may be None."""
        with self._lock:
            entry = None if model is None else self._entries.get(model, OrderedDict()).get(key)
            return new() if entry is None else _copied(entry)

    def store(self, model: Any, key: Hashable, learnt: Any) -> None:
        """Keep what a call has learnt, as a copy; nothing if `model` is None."""
        if model is None:
            return
        with self._lock:
            entries = self._entries.setdefault(model, OrderedDict())
            entries[key] = _copied(learnt)
            entries.move_to_end(key)
            if len(entries) > self._max_entries:
                entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


def _copied(learnt: T) -> T:
    """A copy for a call that learns on its own, of what has a method `copy`; other values are shared."""
    return getattr(learnt, "copy", lambda: learnt)()


memory = Memory()
