"""The rows of the newest races of a database, by queries whose time is linear in its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    Row,
    Table,
    delete,
    exists,
    func,
    insert,
    select,
)
from sqlalchemy.schema import CreateTable

from kernelcat.store.measurement import PEER
from kernelcat.store.models import measurements

COLUMNS = measurements.c
SUBJECT = ("gpu", "entry", "problem", "regime", "kind", "state", "origin")
"""Columns that are equal in all rows of a race, as one origin brought it."""
CASE = ("gpu", "entry", "problem", "language", "variant", "config", "source", "kind")
"""Columns that a verdict is about."""
CHUNK = 200
"""Most runs in one query."""

WRONG = Table(
    "kernelcat_wrong",
    MetaData(),
    *(Column(name, COLUMNS[name].type, primary_key=True) for name in CASE),
    prefixes=["TEMPORARY"],
    sqlite_with_rowid=False,
)
"""Cases that were found wrong: a table of the connection, with an index that finds each case."""

Values = Mapping[str, str | None]
"""Column name -> value that rows must have, or None."""
Name = tuple[str, ...]
"""Values of :data:`SUBJECT` or :data:`CASE`."""


def equal(values: Values) -> list[Any]:
    """A condition for each column (name -> value) whose value is not None."""
    return [COLUMNS[name] == value for name, value in values.items() if value is not None]


def newest_rows(connections: Sequence[Connection], values: Values) -> list[Row[Any]]:
    """Passed rows of the newest run of every subject in each database, and its peers' rows.

    Left out is a configuration that was ever found wrong, in any of the databases, for its problem
    and with the same source: it must not win by a timing from before or after.
    """
    wrong: set[Name] = set()
    for connection in connections:
        wrong.update(_wrong_cases(connection, values))
    rows: list[Row[Any]] = []
    for connection in connections:
        _fill(connection, wrong)
        rows += _rows(connection, values, _newest_runs(connection, values))
    return rows


def best_rows(connections: Sequence[Connection], values: Values) -> list[Row[Any]]:
    """The row of the winner and that of the fastest peer of every run of every subject.

    The winner is the row that the tuner declared, else the fastest one. Cases that were ever found
    wrong are left out, as in :func:`newest_rows`.
    """
    wrong: set[Name] = set()
    for connection in connections:
        wrong.update(_wrong_cases(connection, values))
    is_peer = COLUMNS.language == PEER
    group = (*(COLUMNS[name] for name in SUBJECT), COLUMNS.run, is_peer)
    order = (COLUMNS.winner.desc(), COLUMNS.median_us, COLUMNS.id)
    place = func.row_number().over(partition_by=group, order_by=order).label("place")
    raced = (COLUMNS.status == "passed", COLUMNS.kind == "measured", *equal(values))
    ranked = select(COLUMNS.id, place).where(*raced, is_peer | ~_is_wrong()).subquery()
    statement = select(measurements).join(ranked, ranked.c.id == COLUMNS.id)
    rows: list[Row[Any]] = []
    for connection in connections:
        _fill(connection, wrong)
        rows += connection.execute(statement.where(ranked.c.place == 1)).all()
    return rows


def _wrong_cases(connection: Connection, values: Values) -> Iterator[Name]:
    """The cases that were found wrong, whatever the regime in which they were tried."""
    anywhere = {name: value for name, value in values.items() if name != "regime"}
    statement = select(*(COLUMNS[name] for name in CASE)).distinct()
    statement = statement.where(COLUMNS.status == "wrong", *equal(anywhere))
    return (tuple(row) for row in connection.execute(statement))


def _fill(connection: Connection, wrong: set[Name]) -> None:
    """Make :data:`WRONG` hold the cases ``wrong`` until the connection's transaction ends."""
    connection.execute(CreateTable(WRONG, if_not_exists=True))
    connection.execute(delete(WRONG))
    if wrong:
        connection.execute(insert(WRONG), [dict(zip(CASE, c, strict=True)) for c in wrong])


def _is_wrong() -> Any:
    """Condition: the row's case is in :data:`WRONG`."""
    return exists().where(*(WRONG.c[name] == COLUMNS[name] for name in CASE))


def _newest_runs(connection: Connection, values: Values) -> dict[Name, str]:
    """Subject -> the run with its newest row; of equally new ones that with most samples."""
    columns = [COLUMNS[name] for name in SUBJECT]
    statement = (
        select(*columns, func.max(COLUMNS.created_at), func.max(COLUMNS.samples), COLUMNS.run)
        .where(COLUMNS.status == "passed", COLUMNS.language != PEER, *equal(values))
        .where(~_is_wrong())
        .group_by(*columns, COLUMNS.run)
    )
    newest: dict[Name, tuple[str, int, str]] = {}
    for *subject, created_at, samples, run in connection.execute(statement):
        name = tuple(subject)
        evidence = (str(created_at), samples if isinstance(samples, int) else 0, str(run))
        newest[name] = max(newest.get(name, ("", 0, "")), evidence)
    return {name: run for name, (_, _, run) in newest.items()}


def _rows(connection: Connection, values: Values, newest: Mapping[Name, str]) -> list[Row[Any]]:
    """Passed rows of the runs in ``newest`` (subject -> run), without the cases found wrong."""
    rows: list[Row[Any]] = []
    runs = sorted(set(newest.values()))
    for first in range(0, len(runs), CHUNK):
        in_chunk = COLUMNS.run.in_(runs[first : first + CHUNK])
        statement = select(measurements).where(
            COLUMNS.status == "passed",
            in_chunk,
            *equal(values),
            (COLUMNS.language == PEER) | ~_is_wrong(),
        )
        for row in connection.execute(statement):
            subject = tuple(row._mapping[name] for name in SUBJECT)
            if newest.get(subject) == row.run:
                rows.append(row)
    return rows
