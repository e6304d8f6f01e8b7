"""Imports on first use, one thread at a time.

Python's import system has a lock for each module. Two threads that begin at different modules of
one package can wait for each other; then Python gives one of them a module that is not complete.
So all imports that happen inside of calls go through one lock.
"""

from __future__ import annotations

import importlib
import sys
from _thread import RLock
from types import ModuleType

LOCK = RLock()
"""Held during an import, and while state is made that threads share."""


def import_module(name: str) -> ModuleType:
    """The module called ``name``, imported under :data:`LOCK`."""
    with LOCK:
        return importlib.import_module(name)


def is_imported(name: str) -> bool:
    """Whether the module has been imported, completely: another thread may be at it."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
