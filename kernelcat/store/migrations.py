"""Schema versions: a list of small functions, each run once, in order, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import (
    Connection,
    MetaData,
    Table,
    delete,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)

from kernelcat.errors import StoreError
from kernelcat.store import models

Migration = Callable[[Connection], None]


def add_sqnr(connection: Connection) -> None:
    """Signal to quantization noise, which older rows do not have."""
    table = models.measurements.name
    connection.execute(text(f"ALTER TABLE {table} ADD COLUMN sqnr_db DOUBLE PRECISION"))


def add_winner(connection: Connection) -> None:
    """A column for the tuner's winner, which was the word ``winner`` in ``detail``."""
    name = models.measurements.name
    connection.execute(text(f"ALTER TABLE {name} ADD COLUMN winner BOOLEAN NOT NULL DEFAULT FALSE"))
    table = Table(name, MetaData(), autoload_with=connection)
    declared = (table.c.detail == "winner", table.c.status == "passed")
    for row in connection.execute(select(table).where(*declared)).all():
        won = replace(models.from_row(row), detail=None, winner=True)
        changes = {"detail": None, "winner": True, "digest": won.digest}
        connection.execute(update(table).where(table.c.id == row.id).values(**changes))


MIGRATIONS: list[Migration] = [add_sqnr, add_winner]
"""``MIGRATIONS[n]`` takes a database from version ``n + 1`` to ``n + 2``. Only ever append.

A new database is made by ``models`` as it is now, so a change of ``models`` comes with the step
that brings older databases there: ``ALTER TABLE ...`` spelled out.
"""


def newest() -> int:
    """The version this kernelcat reads and writes."""
    return 1 + len(MIGRATIONS)


def version(connection: Connection) -> int:
    """The version of a database; 0 for an empty one.

    Raises
    ------
    StoreError
        When the tables are another program's, or a newer kernelcat's.
    """
    tables = inspect(connection).get_table_names()
    if models.schema.name not in tables:
        if tables and connection.dialect.name == "sqlite":
            raise StoreError(f"it holds tables of another program ({tables[0]})")
        return 0
    found = int(connection.execute(select(func.max(models.schema.c.version))).scalar() or 0)
    if found > newest():
        raise StoreError(
            f"a newer kernelcat wrote it (schema {found}, this one knows {newest()}): "
            "upgrade kernelcat, or name another database in KERNELCAT_DB"
        )
    return found


def migrate(connection: Connection) -> None:
    """Bring a database to the newest version. The caller holds the lock and the transaction."""
    start = version(connection)
    if start == newest():
        return
    if start == 0:
        models.metadata.create_all(connection)
    else:
        for step in MIGRATIONS[start - 1 :]:
            step(connection)
    connection.execute(delete(models.schema))
    connection.execute(insert(models.schema).values(version=newest()))
