"""Schema versions: a list of functions that each run once, in order, in one transaction."""

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
from kernelcat.store.origin import MAX_CHARS, UNKNOWN

Migration = Callable[[Connection], None]


def add_sqnr(connection: Connection) -> None:
    """Add the column ``sqnr_db``; it is null in older rows."""
    table = models.measurements.name
    connection.execute(text(f"ALTER TABLE {table} ADD COLUMN sqnr_db DOUBLE PRECISION"))


def add_winner(connection: Connection) -> None:
    """Add the column ``winner``; older rows have the word ``winner`` in ``detail`` instead."""
    name = models.measurements.name
    connection.execute(text(f"ALTER TABLE {name} ADD COLUMN winner BOOLEAN NOT NULL DEFAULT FALSE"))
    table = Table(name, MetaData(), autoload_with=connection)
    declared = (table.c.detail == "winner", table.c.status == "passed")
    for row in connection.execute(select(table).where(*declared)).all():
        won = replace(models.from_row(row), detail=None, winner=True)
        changes = {"detail": None, "winner": True, "digest": won.digest}
        connection.execute(update(table).where(table.c.id == row.id).values(**changes))


def add_origin(connection: Connection) -> None:
    """Add the column ``origin``; it is ``unknown`` in older rows."""
    name, kind = models.measurements.name, f"VARCHAR({MAX_CHARS})"
    column = f"origin {kind} NOT NULL DEFAULT '{UNKNOWN}'"
    connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {column}"))


def add_quantiles(connection: Connection) -> None:
    """Add the column ``quantiles_us``; it is null in older rows."""
    table = models.measurements.name
    connection.execute(text(f"ALTER TABLE {table} ADD COLUMN quantiles_us TEXT"))


MIGRATIONS: list[Migration] = [add_sqnr, add_winner, add_origin, add_quantiles]
"""``MIGRATIONS[n]`` takes a database from version ``n + 1`` to ``n + 2``. Append only.

``models`` creates a new database in the newest version. A change of ``models`` therefore needs a
migration for older databases, with ``ALTER TABLE ...`` spelled out.
"""


def newest() -> int:
    """The schema version that this kernelcat reads and writes."""
    return 1 + len(MIGRATIONS)


def version(connection: Connection) -> int:
    """The schema version of a database; 0 for an empty database.

    Raises
    ------
    StoreError
        The tables belong to another program or to a newer kernelcat.
    """
    tables = inspect(connection).get_table_names()
    if connection.dialect.name == "sqlite":
        _check_tables(connection)
    if models.schema.name not in tables:
        if tables and connection.dialect.name == "sqlite":
            raise StoreError(f"it holds tables of another program ({tables[0]})")
        return 0
    number = int(connection.execute(select(func.max(models.schema.c.version))).scalar() or 0)
    if number > newest():
        raise StoreError(
            f"a newer kernelcat wrote it (schema {number}, this kernelcat reads up to {newest()}): "
            "upgrade kernelcat, or name another database in KERNELCAT_DB"
        )
    return number


def _check_tables(connection: Connection) -> None:
    """Raise ``StoreError`` where a view or a virtual table has the name of one of our tables.

    Such a table is a program: reading it may never end.
    """
    names = (models.schema.name, models.measurements.name)
    made = connection.exec_driver_sql("SELECT type, name, sql FROM sqlite_master")
    for kind, name, sql in made:
        is_table = kind == "table" and str(sql).upper().startswith("CREATE TABLE")
        if name in names and kind != "index" and not is_table:
            raise StoreError(f"{name} is not a plain table: the file is not a tuning database")


def migrate(connection: Connection) -> None:
    """Bring a database to the newest version. The caller holds the lock and the transaction.

    Raises what :func:`version` raises.
    """
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
