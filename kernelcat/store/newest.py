"""The rows of the newest races of a database, by queries whose time is linear in its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from kernelcat.store.races import SCREEN, TIE

COLUMNS = measurements.c
SUBJECT = ("gpu", "entry", "problem", "regime", "kind", "state", "origin")
"""Columns that are equal in all rows of a race, as one origin brought it."""
CASE = ("gpu", "entry", "problem", "language", "variant", "config", "source", "kind")
"""Columns that a verdict is about."""


def _temporary(name: str, columns: Sequence[str]) -> Table:
    """A table of the connection, with an index over all its columns."""
    return Table(
        name,
        MetaData(),
        *(Column(column, COLUMNS[column].type, primary_key=True) for column in columns),
        prefixes=["TEMPORARY"],
        sqlite_with_rowid=False,
    )


WRONG = _temporary("kernelcat_wrong", CASE)
"""Cases that were found wrong."""
NEWEST = _temporary("kernelcat_newest", (*SUBJECT, "run"))
"""Runs of subjects, of which rows are wanted."""
WANTED = _temporary("kernelcat_wanted", ("gpu", "entry", "problem", "regime", "kind"))
"""Subjects, in any state, of which all rows are wanted."""
IMPOSSIBLE = _temporary("kernelcat_impossible", ("entry", "language", "variant", "config"))
"""Configurations whose rows cannot be true."""

Values = Mapping[str, str | None]
"""Column name -> value that rows must have, or None."""
Name = tuple[str, ...]
"""Values of :data:`SUBJECT` or :data:`CASE`."""


class Newest(NamedTuple):
    """The newest run of a subject: when it ended, its samples, its name, the problem's name."""

    created_at: str
    samples: int
    run: str
    problem_name: str


Choice = Callable[[Mapping[Name, Newest]], Collection[Name]]
"""Chooses the subjects whose rows are wanted, from the subjects of all databases."""


def equal(values: Values) -> list[Any]:
    """A condition for each column (name -> value) whose value is not None."""
    return [COLUMNS[name] == value for name, value in values.items() if value is not None]


def newest_rows(
    connections: Sequence[Connection], values: Values, choose: Choice | None = None
) -> list[Row[Any]]:
    """The rows of the newest run of every subject in each database that can be shown.

    They are the best row of each variant, those that may tie with it, and the last row of each
    peer. Left out is a configuration that was ever found wrong, in any of the databases, for its
    problem and with the same source: it must not win by a timing from before or after. Left out are
    screenings of what was raced. ``choose`` selects subjects.
    """
    wrong: set[Name] = set()
    for connection in connections:
        wrong.update(_wrong_cases(connection, values))
    found = []
    for connection in connections:
        _fill(connection, WRONG, wrong)
        found.append(_newest_runs(connection, values))
    every: dict[Name, Newest] = {}
    for newest in found:
        every |= {name: max(run, every.get(name, run)) for name, run in newest.items()}
    chosen = _without_screenings(every)
    wanted = set(chosen if choose is None else choose(chosen))
    rows: list[Row[Any]] = []
    for connection, newest in zip(connections, found, strict=True):
        runs = ((*name, run.run) for name, run in newest.items() if name in wanted)
        _fill(connection, NEWEST, runs)
        rows += _rows(connection, values)
    return rows


def passed_rows(
    connections: Sequence[Connection],
    values: Values,
    subjects: Iterable[Name],
    is_possible: Callable[[str, str, str, str], bool],
) -> list[Row[Any]]:
    """Every passed row of ``subjects`` (values of :data:`WANTED`) whose configuration is possible.

    Left out are peers' rows of runs without any other such row. ``is_possible`` gets an entry, a
    language, a variant and a configuration as canonical JSON.
    """
    names, rows = set(subjects), list[Row[Any]]()
    configs, runs = (select(*(COLUMNS[column.name] for column in table.c)).distinct()
                     for table in (IMPOSSIBLE, NEWEST))  # fmt: skip
    for connection in connections:
        _fill(connection, WANTED, names)
        wanted = (COLUMNS.status == "passed", _is_in(WANTED), *equal(values))
        tried = [tuple(row) for row in connection.execute(configs.where(*wanted))]
        _fill(connection, IMPOSSIBLE, (name for name in tried if not is_possible(*name)))
        possible = (*wanted, ~_is_in(IMPOSSIBLE))
        ours = runs.where(*possible, COLUMNS.language != PEER)
        _fill(connection, NEWEST, [tuple(row) for row in connection.execute(ours)])
        rows += connection.execute(select(measurements).where(*possible, _is_in(NEWEST))).all()
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
    ranked = select(COLUMNS.id, place).where(*raced, is_peer | ~_is_in(WRONG)).subquery()
    statement = select(measurements).join(ranked, ranked.c.id == COLUMNS.id)
    rows: list[Row[Any]] = []
    for connection in connections:
        _fill(connection, WRONG, wrong)
        rows += connection.execute(statement.where(ranked.c.place == 1)).all()
    return rows


def _wrong_cases(connection: Connection, values: Values) -> Iterator[Name]:
    """The cases that were found wrong, whatever the regime in which they were tried."""
    anywhere = {name: value for name, value in values.items() if name != "regime"}
    statement = select(*(COLUMNS[name] for name in CASE)).distinct()
    statement = statement.where(COLUMNS.status == "wrong", *equal(anywhere))
    return (tuple(row) for row in connection.execute(statement))


def _fill(connection: Connection, table: Table, names: Iterable[Name]) -> None:
    """Make ``table`` hold the lines ``names`` until the connection's transaction ends."""
    connection.execute(CreateTable(table, if_not_exists=True))
    connection.execute(delete(table))
    columns = [column.name for column in table.c]
    if lines := [dict(zip(columns, name, strict=True)) for name in names]:
        connection.execute(insert(table), lines)


def _is_in(table: Table) -> Any:
    """Condition: ``table`` has the row's values."""
    return exists().where(*(column == COLUMNS[column.name] for column in table.c))


def _newest_runs(connection: Connection, values: Values) -> dict[Name, Newest]:
    """The run of each subject with its newest row; of equally new ones that with most samples."""
    columns = [COLUMNS[name] for name in SUBJECT]
    last = (func.max(COLUMNS.created_at), func.max(COLUMNS.samples), COLUMNS.run,
            func.max(COLUMNS.problem_name))  # fmt: skip
    statement = (
        select(*columns, *last)
        .where(COLUMNS.status == "passed", COLUMNS.language != PEER, *equal(values))
        .where(~_is_in(WRONG))
        .group_by(COLUMNS.run, *columns)  # a run tells most groups apart, and is a short text
    )
    newest: dict[Name, Newest] = {}
    for *subject, created_at, samples, run, problem_name in connection.execute(statement).all():
        name = tuple(subject)
        count = samples if isinstance(samples, int) else 0
        found = Newest(str(created_at), count, str(run), problem_name or "")
        newest[name] = max(newest.get(name, found), found)
    return newest


def _without_screenings(newest: Mapping[Name, Newest]) -> dict[Name, Newest]:
    """``newest`` without the screenings of what was raced in another state."""
    state = SUBJECT.index("state")

    def raced(name: Name) -> Name:
        return name[:state]

    known = {raced(name) for name in newest if name[state] != SCREEN}
    return {n: run for n, run in newest.items() if n[state] != SCREEN or raced(n) not in known}


def _rows(connection: Connection, values: Values) -> Sequence[Row[Any]]:
    """What :func:`newest_rows` returns, of the runs in :data:`NEWEST`."""
    variant = [COLUMNS[name] for name in (*SUBJECT, "run", "language", "variant")]
    newest_first = (COLUMNS.created_at.desc(), COLUMNS.samples.desc(), COLUMNS.id.desc())
    place = func.row_number().over(partition_by=(*variant, COLUMNS.config), order_by=newest_first)
    is_of_run = COLUMNS.run.in_(select(NEWEST.c.run))  # so that the index of runs is used
    of_races = (COLUMNS.status == "passed", is_of_run, _is_in(NEWEST), *equal(values))
    raced = (
        select(COLUMNS.id, COLUMNS.median_us, COLUMNS.winner, *variant, place.label("place"))
        .where(*of_races, (COLUMNS.language == PEER) | ~_is_in(WRONG))
        .subquery()
    )
    row = raced.c
    least = func.min(row.median_us).over(partition_by=[row[column.name] for column in variant])
    last = select(row.id, row.median_us, row.winner, least.label("least"))
    last_rows = last.where(row.place == 1).subquery()
    may_be_best = last_rows.c.winner | (last_rows.c.median_us <= last_rows.c.least * _TIED)
    statement = select(measurements).join(last_rows, last_rows.c.id == COLUMNS.id)
    return connection.execute(statement.where(may_be_best).order_by(COLUMNS.id)).all()


_TIED = (1 + TIE) * (1 + 1e-9)
"""A little more than a tie: databases may round otherwise than :func:`kernelcat.store.rank`."""
