"""Upkeep of a database: what it holds, and the removal of rows that nothing reads any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import case, delete, func, select

from kernelcat.errors import StoreError
from kernelcat.store.connection import explained
from kernelcat.store.database import Store
from kernelcat.store.measurement import Measurement
from kernelcat.store.models import measurements

WRONG = "wrong"
"""Status of rows that tell of a wrong result. Calls and races obey them, whatever their age."""
_CHUNK = 500


@dataclass(frozen=True)
class Count:
    """The rows of one entry, SKU and kind (``measured`` or ``predicted``).

    ``passed`` rows have a time, the others say why there is none. ``runs`` is the number of tunes;
    ``first`` and ``last`` are the dates of the oldest and the newest row.
    """

    entry: str
    gpu: str
    kind: str
    rows: int
    passed: int
    runs: int
    first: str
    last: str


@dataclass(frozen=True)
class Pruned:
    """How many rows were deleted (or would be), how many stay, and the file's bytes around it.

    The bytes are None for a database that is no file.
    """

    deleted: int
    kept: int
    bytes_before: int | None
    bytes_after: int | None


def counts(store: Store | None) -> list[Count]:
    """The rows of a database by entry, SKU and kind, sorted; none where there is no database."""
    if store is None:
        return []
    columns = measurements.c
    keys = (columns.entry, columns.gpu, columns.kind)
    statement = select(
        *keys,
        func.count(),
        func.sum(case((columns.status == "passed", 1), else_=0)),
        func.count(columns.run.distinct()),
        func.min(columns.created_at),
        func.max(columns.created_at),
    )
    with store._reading() as connection:
        rows = connection.execute(statement.group_by(*keys).order_by(*keys)).all()
    return [Count(*row) for row in rows]


def size(store: Store | None) -> int | None:
    """Bytes of the database's files; None where it is no file."""
    path = None if store is None else store.location.path
    if path is None:
        return None
    files = (path.with_name(path.name + suffix) for suffix in ("", "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def prune(store: Store, is_todays: Callable[[Measurement], bool], dry_run: bool = False) -> Pruned:
    """Delete the rows of old code that no call, table or tune reads.

    Kept are rows of today's code, which a tune goes on from; the newest race of each problem, with
    its peers, which decides calls; and every row that found a result wrong. With ``dry_run`` rows
    are only counted.

    Raises
    ------
    StoreError
        The database cannot be read or written, is read-only, or holds a row that is no measurement.
    """
    if store._is_copy:
        raise StoreError(f"the tuning database {store.location} is read-only")
    rows, refused = store.valid_rows()
    if refused:
        number, reason = refused[0]
        raise StoreError(f"row {number} of {store.location} is no measurement: {reason}; "
                         "kernelcat db verify lists such rows")  # fmt: skip
    raced = {row.digest for race in store.winners(regime=None) for row in race.measurements}
    dead = [
        row.digest
        for row in rows
        if row.status != WRONG and row.digest not in raced and (row.is_peer or not is_todays(row))
    ]
    before = size(store)
    if dead and not dry_run:
        with store._writing() as connection:
            for some in _chunks(dead):
                connection.execute(delete(measurements).where(measurements.c.digest.in_(some)))
        _give_back(store)
    return Pruned(len(dead), len(rows) - len(dead), before, size(store))


def _chunks(digests: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(digests), _CHUNK):
        yield digests[start : start + _CHUNK]


def _give_back(store: Store) -> None:
    """Return the space of deleted rows to the file system; PostgreSQL does it by itself."""
    if store.engine.dialect.name == "sqlite":
        with explained(store.location), store.engine.connect() as connection:
            bare = connection.execution_options(isolation_level="AUTOCOMMIT")
            bare.exec_driver_sql("VACUUM")
            bare.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
