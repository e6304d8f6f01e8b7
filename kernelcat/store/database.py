"""The database of measurements: SQLite by default, any SQLAlchemy URL. The only SQL."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Self, TypeVar

from sqlalchemy import (
    Connection,
    Row,
    Select,
    func,
    insert,
    select,
)

from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store import migrations
from kernelcat.store.connection import ServerLost, copied, engine_of, explained
from kernelcat.store.journal import Journal
from kernelcat.store.location import VARIABLE, Location, locate
from kernelcat.store.measurement import Measurement, canonical
from kernelcat.store.models import from_row, measurements, to_row
from kernelcat.store.newest import Choice, Values, best_rows, equal, newest_rows, passed_rows
from kernelcat.store.races import Race, newest_races

BUSY_S = 30.0
"""Seconds to wait for another process's transaction, or for a server that restarts."""
RETRY_S = 0.2
"""Seconds between two tries to reach a server."""

_POSTGRES_LOCK = 0x6B65726E
"""Number of the advisory lock that a writer holds in PostgreSQL until its transaction ends."""
_CHUNK = 500
"""Rows that are added at a time."""

Text = Problem | Mapping[str, Any] | str | None
"""A problem or configuration to look for: as an object or as its canonical JSON."""

T = TypeVar("T")


class Store:
    """An open database, for any number of threads of one process.

    Each process opens the database for itself.

    Examples
    --------
    >>> with Store.open() as store:
    ...     store.add(measurements)
    ...     best = [race.winner for race in store.winners(gpu="h200", entry="gemm")]
    """

    def __init__(self, location: Location, timeout: float, is_copy: bool = False) -> None:
        self.location = location
        self.journal = Journal(location.journal)
        self.layers: list[Store] = []
        self._is_copy = is_copy
        self._timeout = timeout
        self._journaling = False
        self._files = ExitStack()
        opened = self._files.enter_context(copied(location)) if is_copy else location
        self.engine = engine_of(opened, timeout, is_foreign=is_copy)
        self._files.callback(self.engine.dispose)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | None = None,
        create: bool = True,
        timeout: float = BUSY_S,
        as_copy: bool = False,
    ) -> Self:
        """Open a database, bring its schema up to date and take in its journal.

        A SQLite file that cannot be written, and one opened ``as_copy``, is left alone: a private
        copy is opened, which can be read only.

        Parameters
        ----------
        url : what :func:`~kernelcat.store.location.locate` takes
        create : whether to make it where there is none
        timeout : seconds to wait for other writers

        Raises
        ------
        StoreError
            The database is missing, unreadable, locked or damaged, or it was written by another
            program or by a newer kernelcat.
        MissingDependency
            The driver of the URL's database is not installed.
        """
        return cls._open(locate(url), create, timeout, as_copy)

    @classmethod
    def _open(cls, location: Location, create: bool, timeout: float, as_copy: bool) -> Self:
        if location.path:
            _check_file(location, create)
        is_copy = location.path is not None and (as_copy or location.is_read_only)
        store = cls(location, timeout, is_copy)
        try:
            with nullcontext() if is_copy else location.lock(timeout):
                store._prepare()
                store._take_in_journal()
            for layer in location.layers:
                store.layers.append(cls._open(layer, False, timeout, as_copy=True))
                store._files.callback(store.layers[-1].close)
        except BaseException:
            store._files.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections, after a last try to move the journal into the database."""
        try:
            if self._journaling:
                with self.location.lock(self._timeout):
                    self._take_in_journal()
        except StoreError:
            pass  # keep() has warned; the next open() takes in the journal
        finally:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, rows: Iterable[Measurement]) -> int:
        """Add rows in one transaction, which is on disk when this returns.

        Where iterating over ``rows`` raises an exception, nothing is added.

        Returns the number of new rows. A row that the database already has is not added again.

        Raises
        ------
        StoreError
            The database cannot be written; nothing was added.
        """
        if self._is_copy:
            raise StoreError(f"the tuning database {self.location} is read-only: make it writable, "
                             f"or name another database in {VARIABLE}")  # fmt: skip
        return self._add(rows)

    def _add(self, rows: Iterable[Measurement]) -> int:
        statement = insert(measurements)
        added, iterator = 0, iter(rows)
        with self._writing() as connection:
            while fresh := {row.digest: row for row in islice(iterator, _CHUNK)}:
                known = select(measurements.c.digest).where(measurements.c.digest.in_(fresh))
                for digest in connection.scalars(known):
                    del fresh[digest]
                if fresh:
                    connection.execute(statement, [to_row(row) for row in fresh.values()])
                added += len(fresh)
        return added

    def keep(self, rows: Iterable[Measurement]) -> bool:
        """Add rows to the database or, if that fails, to the journal.

        A server that does not answer is tried again until the timeout of :meth:`open` has passed.
        Returns True if the rows are in the database. The first failure warns; from then on this
        store writes to the journal only, so that a tuner does not wait for a lock at every step.
        The next :meth:`open` moves the journal into the database.

        Raises
        ------
        StoreError
            The journal cannot be written either.
        """
        rows = list(rows)
        if not self._journaling:
            try:
                self._retried(lambda: self.add(rows))
                return True
            except StoreError as error:
                warnings.warn(f"{error}. Results go to {self.journal.path}, which is moved into "
                              "the database when it is next opened", stacklevel=2)  # fmt: skip
                self._journaling = True
        with self.location.lock(self._timeout):
            self.journal.append(rows)
        return False

    def rows(
        self,
        *,
        entry: str | None = None,
        gpu: str | None = None,
        language: str | None = None,
        variant: str | None = None,
        problem: Text = None,
        config: Text = None,
        source: str | None = None,
        kind: str | None = None,
        status: str | None = None,
        run: str | None = None,
        regime: str | None = None,
    ) -> list[Measurement]:
        """The rows that match all arguments that are not None, oldest first.

        Raises ``StoreError`` if the database cannot be read.
        """
        values = {"entry": entry, "gpu": gpu, "language": language, "variant": variant,
                  "problem": _key(problem), "config": _key(config), "source": source,
                  "kind": kind, "status": status, "run": run, "regime": regime}  # fmt: skip
        statement = select(measurements).order_by(measurements.c.created_at, measurements.c.id)
        return self._read(statement.where(*equal(values)))

    def tried(
        self,
        entry: str,
        language: str,
        variant: str,
        problem: Text,
        gpu: str,
        source: str,
        kind: str = "measured",
    ) -> dict[str, str]:
        """Configuration (canonical JSON) -> last status, for the sources with digest ``source``.

        A resumed tune does not repeat these configurations, not even the failed ones. Raises
        ``StoreError`` if the database cannot be read.
        """
        values = {"entry": entry, "language": language, "variant": variant, "gpu": gpu,
                  "problem": _key(problem), "source": source, "kind": kind}  # fmt: skip
        columns = measurements.c
        statement = select(columns.config, columns.status).where(*equal(values))
        statement = statement.order_by(columns.created_at, columns.id)

        def read(store: Store) -> dict[str, str]:
            with store._reading() as connection:
                return {row.config: row.status for row in connection.execute(statement)}

        tried: dict[str, str] = {}
        for store in (*self.layers, self):
            tried |= store._retried(partial(read, store))
        return tried

    def winners(
        self,
        gpu: str | None = None,
        entry: str | None = None,
        regime: str | None = "graph",
        choose: Choice | None = None,
    ) -> list[Race]:
        """The newest race of every (gpu, entry, problem, regime, kind, state), with its peers.

        Only rows of one run are compared. A race that was measured here outranks imported races. A
        configuration that was ever found wrong with the same source is left out, because it must
        not win by a timing from before or after. See :func:`kernelcat.store.newest_races`.
        ``choose`` selects races. Raises ``StoreError`` if the database cannot be read.
        """
        values = {"gpu": gpu, "entry": entry, "regime": regime}
        return newest_races(self._of_races(partial(newest_rows, choose=choose), values))

    def possible_rows(
        self, subjects: Iterable[Sequence[str]], is_possible: Callable[[str, str, str, str], bool]
    ) -> list[Measurement]:
        """The passed rows of ``subjects``; see :func:`kernelcat.store.newest.passed_rows`."""
        query = partial(passed_rows, subjects=map(tuple, subjects), is_possible=is_possible)
        return self._of_races(query, {})

    def best_rows(self, gpu: str | None = None, entry: str | None = None) -> list[Measurement]:
        """The winner and the fastest peer of every race, old races included.

        Raises ``StoreError`` if the database cannot be read.
        """
        return self._of_races(best_rows, {"gpu": gpu, "entry": entry})

    def _of_races(
        self, query: Callable[[Sequence[Connection], Values], list[Row[Any]]], values: Values
    ) -> list[Measurement]:
        """What ``query`` finds in this database and its layers."""
        stores = (self, *self.layers)

        def read() -> list[Row[Any]]:
            with ExitStack() as stack:
                connections = [stack.enter_context(store._reading()) for store in stores]
                return query(connections, values)

        return self._measurements(self._retried(read))

    def valid_rows(
        self, check: Callable[[Measurement], None] = lambda row: None
    ) -> tuple[list[Measurement], tuple[tuple[int, str], ...]]:
        """Every valid row, oldest first, and the number and reason of each other row.

        ``check`` raises ``InvalidArgument`` for a row that does not count as valid. Raises
        ``StoreError`` if the database cannot be read.
        """
        statement = select(measurements).order_by(measurements.c.created_at, measurements.c.id)
        rows, refused = [], []
        with self._reading() as connection:
            for row in connection.execute(statement):
                try:
                    measurement = from_row(row)
                    check(measurement)
                    rows.append(measurement)
                except (InvalidArgument, ValueError) as error:
                    refused.append((row.id, str(error)))
        return rows, tuple(refused)

    def _read(self, statement: Select[Any]) -> list[Measurement]:
        """The rows of a statement that orders them by time, from this database and its layers."""

        def read() -> list[Row[Any]]:
            with self._reading() as connection:
                return list(connection.execute(statement).all())

        rows = self._measurements(self._retried(read))
        for layer in self.layers:
            known = {row.digest for row in rows}
            rows += [row for row in layer._read(statement) if row.digest not in known]
        return sorted(rows, key=lambda row: row.created_at) if self.layers else rows

    def _measurements(self, rows: Iterable[Row[Any]]) -> list[Measurement]:
        try:
            return [from_row(row) for row in rows]
        except (InvalidArgument, ValueError) as error:
            raise StoreError(f"the tuning database {self.location} holds a row that is not a "
                             f"measurement: {error}") from error  # fmt: skip

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with explained(self.location), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that takes the write lock when it begins, which rules out a deadlock."""
        with explained(self.location), self.engine.begin() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            elif connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_POSTGRES_LOCK)))
            yield connection

    def _retried(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which is tried again while the server does not answer.

        ``work`` may have been done although the answer was lost, so it must change nothing when it
        is done again: rows that the database has are not added again.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return work()
            except ServerLost:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def _prepare(self) -> None:
        """Create the tables, or migrate them to the newest version."""
        with self._reading() as connection:
            ready = migrations.version(connection) == migrations.newest()
        if ready:
            return
        if self.engine.dialect.name == "sqlite":
            with self._reading() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        with self._writing() as connection:
            migrations.migrate(connection)

    def _take_in_journal(self) -> None:
        rows = self.journal.read()
        if rows:
            self._add(rows)
        if not self._is_copy:
            self.journal.remove()


def _check_file(location: Location, create: bool) -> None:
    path = location.path
    assert path is not None
    if create:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot make the folder {path.parent} ({error.strerror}): name a database "
                f"elsewhere in {VARIABLE}"
            ) from error
    elif not path.exists():
        raise StoreError(
            f"there is no tuning database at {path}: run kernelcat tune, or name one in {VARIABLE}"
        )


def _key(value: Text) -> str | None:
    """Canonical JSON of a problem or configuration."""
    if value is None or isinstance(value, str):
        return value
    return value.key if isinstance(value, Problem) else canonical(value)
