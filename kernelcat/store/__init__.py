"""The tuning database: measurements, races, snapshots, and import and export as JSON Lines.

A module belongs here if it defines, stores, reads or exchanges results. The only SQL of the package
is here. Reading shipped results must be fast, so modules that need SQLAlchemy are imported when
they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelcat.errors import StoreError
from kernelcat.importing import import_module
from kernelcat.store.journal import Journal
from kernelcat.store.lines import shipped
from kernelcat.store.location import Location, locate
from kernelcat.store.measurement import PEER, Measurement, new_run, now
from kernelcat.store.races import (
    SCREEN,
    STATES,
    Race,
    decisive,
    newest_races,
    rank,
    tied,
)
from kernelcat.store.snapshots import Choice, Snapshot, snapshot

if TYPE_CHECKING:
    from kernelcat.store.database import Store
    from kernelcat.store.transfer import Conflict, ImportReport, MergeReport, export, import_, merge

_LAZY = {
    "Store": "database",
    "Conflict": "transfer",
    "ImportReport": "transfer",
    "MergeReport": "transfer",
    "export": "transfer",
    "import_": "transfer",
    "merge": "transfer",
}

__all__ = [
    "PEER",
    "SCREEN",
    "STATES",
    "Choice",
    "Conflict",
    "ImportReport",
    "Journal",
    "Location",
    "Measurement",
    "MergeReport",
    "Race",
    "Snapshot",
    "Store",
    "StoreError",
    "decisive",
    "export",
    "import_",
    "locate",
    "merge",
    "new_run",
    "newest_races",
    "now",
    "rank",
    "shipped",
    "snapshot",
    "tied",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
