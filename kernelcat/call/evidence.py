"""What the database knows of an entry, read once for all operators of a process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kernelcat.importing import LOCK

if TYPE_CHECKING:
    from kernelcat.store import Measurement
    from kernelcat.store.snapshots import Choice, Snapshot


@cache
def snapshot() -> Snapshot:
    """The database as it was when the first call asked for it."""
    from kernelcat import store

    return store.snapshot()


def of_entry(name: str) -> tuple[tuple[Choice, ...], tuple[Measurement, ...]]:
    """The rows of entry ``name`` that calls may use, best first, and those found wrong here."""
    with LOCK:  # threads that call for the first time read the database once
        known = snapshot()
        return known.choices(name), known.refuted(name)
