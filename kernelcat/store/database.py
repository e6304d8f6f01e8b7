"""The database of measurements: SQLite by default, any SQLAlchemy URL. The only SQL."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from sqlalchemy import (
    Connection,
    Engine,
    Select,
    and_,
    create_engine,
    event,
    exists,
    func,
    insert,
    select,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, MissingDependency, StoreError
from kernelcat.store import migrations
from kernelcat.store.journal import Journal
from kernelcat.store.location import VARIABLE, Location, locate
from kernelcat.store.measurement import PEER, Measurement, canonical
from kernelcat.store.models import from_row, measurements, to_row
from kernelcat.store.races import Race, newest_races

BUSY_S = 30.0
"""Seconds to wait for another process's transaction."""

_ADVICE = (
    ("disk is full", "the disk is full: free some space, or name a database elsewhere in"),
    ("disk i/o error", "the disk reports an error or is full: free some space, or name a "
     "database elsewhere in"),
    ("readonly", "it is read-only: make it writable, or name another database in"),
    ("locked", "another process keeps it locked: wait for that process, or name another "
     "database in"),
    ("not a database", "the file is not a SQLite database: move it away, or name another in"),
    ("malformed", "the file is damaged: move it away and import an export of it, or name another "
     "in"),
    ("unable to open", "it cannot be opened: check that its folder exists and that you may write "
     "there, or name another database in"),
)  # fmt: skip
"""Part of a driver's message -> what the user can do; the name of the variable follows."""
_POSTGRES_LOCK = 0x6B65726E
"""Number of the advisory lock that PostgreSQL holds during a migration."""
_CHUNK = 500
"""Most digests in one query."""

Text = Problem | Mapping[str, Any] | str | None
"""A problem or configuration to look for: as an object or as its canonical JSON."""


class Store:
    """An open database, for any number of threads of one process.

    Each process opens the database for itself.

    Examples
    --------
    >>> with Store.open() as store:
    ...     store.add(measurements)
    ...     best = [race.winner for race in store.winners(gpu="h200", entry="gemm")]
    """

    def __init__(self, engine: Engine, location: Location, timeout: float) -> None:
        self.engine = engine
        self.location = location
        self.journal = Journal(location.journal)
        self._timeout = timeout
        self._journaling = False

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | None = None,
        create: bool = True,
        timeout: float = BUSY_S,
    ) -> Self:
        """Open a database, bring its schema up to date and take in its journal.

        Parameters
        ----------
        url : a path or SQLAlchemy URL; None means ``$KERNELCAT_DB`` or the user's own
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
        location = locate(url)
        if location.path:
            _check_file(location, create)
        store = cls(_engine(location, timeout), location, timeout)
        try:
            with location.lock(timeout):
                store._prepare()
                store._take_in_journal()
        except BaseException:
            store.engine.dispose()
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
            self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, rows: Iterable[Measurement]) -> int:
        """Add rows in one transaction, which is on disk when this returns.

        Returns the number of new rows. A row that the database already has is not added again.

        Raises
        ------
        StoreError
            The database cannot be written; nothing was added.
        """
        fresh = {row.digest: row for row in rows}
        with self._writing() as connection:
            for digests in _chunks(list(fresh)):
                known = select(measurements.c.digest).where(measurements.c.digest.in_(digests))
                for digest in connection.scalars(known):
                    del fresh[digest]
            if fresh:
                statement: Any = insert(measurements)
                if connection.dialect.name == "postgresql":  # SQLite has one writer at a time
                    statement = postgresql_insert(measurements).on_conflict_do_nothing()
                connection.execute(statement, [to_row(row) for row in fresh.values()])
        return len(fresh)

    def keep(self, rows: Iterable[Measurement]) -> bool:
        """Add rows to the database or, if that fails, to the journal.

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
                self.add(rows)
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
        return self._read(statement.where(*_equal(values)))

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
        statement = select(columns.config, columns.status).where(*_equal(values))
        with self._reading() as connection:
            rows = connection.execute(statement.order_by(columns.created_at, columns.id)).all()
        return {row.config: row.status for row in rows}

    def winners(
        self, gpu: str | None = None, entry: str | None = None, regime: str | None = "graph"
    ) -> list[Race]:
        """The newest race of every (gpu, entry, problem, regime, kind, state), with its peers.

        Only rows of one run are compared. A race that was measured here outranks imported races. A
        configuration that was ever found wrong with the same source is left out, because it must
        not win by a timing from before or after. See :func:`kernelcat.store.newest_races`. Raises
        ``StoreError`` if the database cannot be read.
        """
        columns = measurements.c
        subject = (columns.gpu, columns.entry, columns.problem, columns.regime, columns.kind,
                   columns.state, columns.origin)  # fmt: skip
        passed = (columns.status == "passed", *_equal({"gpu": gpu, "entry": entry,
                                                       "regime": regime}), ~_refuted())  # fmt: skip
        place = func.row_number().over(
            partition_by=subject,
            order_by=(columns.created_at.desc(), columns.samples.desc(), columns.run.desc()),
        )
        runs = (
            select(*subject, columns.run, place.label("place"))
            .where(*passed, columns.language != PEER)
            .subquery()
        )
        newest = and_(
            runs.c.place == 1,
            runs.c.run == columns.run,
            *(runs.c[column.name] == column for column in subject),
        )
        return newest_races(self._read(select(measurements).join(runs, newest).where(*passed)))

    def _read(self, statement: Select[Any]) -> list[Measurement]:
        with self._reading() as connection:
            rows = connection.execute(statement).all()
        try:
            return [from_row(row) for row in rows]
        except (InvalidArgument, ValueError) as error:
            raise StoreError(f"the tuning database {self.location} holds a row that is not a "
                             f"measurement: {error}") from error  # fmt: skip

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _explained(self.location), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that takes the write lock when it begins, which rules out a deadlock."""
        with _explained(self.location), self.engine.begin() as connection:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

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
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_POSTGRES_LOCK)))
            migrations.migrate(connection)

    def _take_in_journal(self) -> None:
        rows = self.journal.read()
        if rows:
            self.add(rows)
        self.journal.remove()


def _engine(location: Location, timeout: float) -> Engine:
    try:
        engine = create_engine(location.url)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the database {location} needs the module {error.name!r}: "
            "pip install 'kernelcat[postgres]'"
        ) from error
    except (NoSuchModuleError, ArgumentError, ValueError) as error:
        raise StoreError(
            f"{VARIABLE}={location} is not a database: use a path, sqlite:///PATH or "
            "postgresql+psycopg://USER@HOST/NAME"
        ) from error
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _: object) -> None:
            connection.execute(f"PRAGMA busy_timeout={int(timeout * 1000)}")
            connection.execute("PRAGMA synchronous=FULL")

    return engine


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


@contextmanager
def _explained(location: Location) -> Iterator[None]:
    """Turn an exception of the database into a ``StoreError`` of one line with advice."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"cannot use the tuning database {location}: {error}") from error
    except DBAPIError as error:
        raise StoreError(f"cannot use the tuning database {location}: "
                         f"{_advice(str(error.orig))}") from error  # fmt: skip
    except SQLAlchemyError as error:
        raise StoreError(f"cannot use the tuning database {location}: {error}") from error


def _advice(message: str) -> str:
    for sign, advice in _ADVICE:
        if sign in message.lower():
            return f"{advice} {VARIABLE}"
    return message.strip().splitlines()[0] if message.strip() else "no reason was given"


def _key(value: Text) -> str | None:
    """Canonical JSON of a problem or configuration."""
    if value is None or isinstance(value, str):
        return value
    return value.key if isinstance(value, Problem) else canonical(value)


def _equal(values: Mapping[str, str | None]) -> list[Any]:
    """A condition for each column (name -> value) whose value is not None."""
    return [measurements.c[name] == value for name, value in values.items() if value is not None]


def _refuted() -> Any:
    """Condition: the row's configuration was found wrong for its problem, with its source."""
    failed = measurements.alias("failed")
    same = ("gpu", "entry", "problem", "language", "variant", "config", "source", "kind")
    return exists().where(
        failed.c.status == "wrong",
        measurements.c.language != PEER,
        *(failed.c[name] == measurements.c[name] for name in same),
    )


def _chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
