"""A cache that several owners share, with a budget in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shares(Generic[K, V]):
    """A cache for several owners. When it exceeds its budget, the owner with the most bytes loses its least recently
    used entry.

    So an owner that stays within the budget divided by the number of owners loses nothing to others. It is thread-safe.

    Args:
        budget: the most bytes of all entries.
        gone: called with each entry that is removed, for whatever reason.

    Attributes:
        bytes: the bytes of all entries.
    """

    def __init__(self, budget: int, gone: Callable[[V], None] = lambda entry: None) -> None:
        self._budget, self.bytes, self._gone = budget, 0, gone
        self._owners: dict[K, str] = {}
        self._entries: dict[str, OrderedDict[K, tuple[V, int]]] = {}
        self._used: dict[str, int] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[K]:
        return iter(self._owners)

    def put(self, key: K, value: V, owner: str, size: int) -> bool:
        """Stores an entry of ``size`` bytes, replacing one with the same key.

        Returns False, without storing it, if ``size`` is more than a quarter of the budget.
        """
        with self._lock:
            self.pop(key)
            if size > self._budget // 4:
                return False
            self._owners[key] = owner
            self._entries.setdefault(owner, OrderedDict())[key] = value, size
            self._used[owner] = self._used.get(owner, 0) + size
            self.bytes += size
            while self.bytes > self._budget:
                largest = max(self._used, key=self._used.__getitem__)
                self.pop(next(iter(self._entries[largest])))
            return True

    def get(self, key: K) -> V | None:
        """Returns an entry and marks it as used; None if there is none."""
        with self._lock:
            owner = self._owners.get(key)
            if owner is None:
                return None
            self._entries[owner].move_to_end(key)
            return self._entries[owner][key][0]

    def pop(self, key: K) -> V | None:
        """Removes an entry and returns it; None if there is none."""
        with self._lock:
            owner = self._owners.pop(key, None)
            if owner is None:
                return None
            value, size = self._entries[owner].pop(key)
            self._used[owner] -= size
            self.bytes -= size
            if not self._entries[owner]:
                del self._entries[owner], self._used[owner]
            self._gone(value)
            return value
