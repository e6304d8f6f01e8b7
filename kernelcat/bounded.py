"""A dictionary with a limit."""

from __future__ import annotations

import threading
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dictionary that forgets its oldest items over ``limit``; threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            super().__setitem__(key, value)
            while len(self) > self.limit:
                del self[next(iter(self))]
