"""A mapping of bounded size, for what is remembered of clients' requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

_K = TypeVar("_K")
_T = TypeVar("_T")


class Bounded(Generic[_K, _T]):
    """A mapping that forgets what was longest unused once it holds ``limit`` entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[_K, _T] = OrderedDict()

    def limit(self, limit: int) -> None:
        """Hold at most ``limit`` entries from now on."""
        self._limit = limit
        while len(self._items) > limit:
            self._items.popitem(last=False)

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: _K) -> _T | None:
        """The entry, now the most recently used; None when it is not known."""
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def pop(self, key: _K) -> _T | None:
        """Take an entry out; None when it is not known."""
        return self._items.pop(key, None)

    def put(self, key: _K, item: _T) -> None:
        """Remember an entry."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._limit:
            self._items.popitem(last=False)
