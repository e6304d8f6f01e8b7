"""Wrapped launches: what watches calls costs nothing while nothing watches.

A watcher makes of a launch a function that does more: it counts calls (`recording`) or checks what
lies in arrays (`debugging`). A watcher that starts or stops makes operators forget their fast
calls, and those made meanwhile are wrapped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakSet

from kernelcat.call.choice import Decision
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu

Launch = Callable[[tuple[int, ...], int], None]
"""``launch(addresses of all tensors, stream)``."""


class Watcher(Protocol):
    """An object that makes more of launches."""

    def wrap(
        self, launch: Launch, problem: Problem, gpu: Gpu, device: int, decision: Decision
    ) -> Launch:
        """``launch`` on the GPU with the index ``device``, and more."""
        ...


class Listener(Protocol):
    """An object that wraps launches by :func:`wrapped`."""

    def rewrap(self) -> None:
        """Wrap again: a watcher has started or stopped."""
        ...


active: tuple[Watcher, ...] = ()
"""The watchers that run."""
_listeners: WeakSet[Listener] = WeakSet()
_lock = threading.Lock()  # guards the two above; nothing else is locked, or called, meanwhile
changes = 0
"""How often a watcher has started or stopped."""


def start(watcher: Watcher) -> None:
    """Let ``watcher`` wrap all launches from now on."""
    _change(lambda running: (*running, watcher))


def stop(watcher: Watcher) -> None:
    """Let ``watcher`` wrap no more launches."""
    _change(lambda running: [each for each in running if each is not watcher])


def _change(change: Callable[[tuple[Watcher, ...]], Iterable[Watcher]]) -> None:
    global active, changes
    with _lock:
        active = tuple(change(active))
        changes += 1
        listeners = list(_listeners)
    for listener in listeners:
        listener.rewrap()


def wrapped(launch: Launch, problem: Problem, gpu: Gpu, device: int, decision: Decision) -> Launch:
    """``launch`` as it is while nothing watches, else a function that does more."""
    for watcher in active:
        launch = watcher.wrap(launch, problem, gpu, device, decision)
    return launch


def listen(listener: Listener) -> None:
    """Let ``listener`` wrap its launches again whenever a watcher starts or stops."""
    with _lock:
        _listeners.add(listener)


def _go_on_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may hold the old one


os.register_at_fork(after_in_child=_go_on_after_fork)
