"""Connections: engines of databases, private copies of files that must not change, plain errors."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from kernelcat.errors import MissingDependency, StoreError
from kernelcat.store.location import VARIABLE, Location

MAX_COPY_BYTES = 4 << 30
"""Largest file that is copied."""
MAX_VALUE_BYTES = 4 << 20
"""Largest value that is read from a copied file, and the longest statement in its schema."""
MAX_STEPS = 20_000_000
"""Steps of SQLite's virtual machine, in thousands, that a query of a copied file may take."""
STEPS_AT_A_TIME = 1000
SUFFIXES = ("", "-wal", "-journal")
"""A SQLite database is these files; without the latter two, its last transactions are missing."""

_ADVICE = (
    ("disk is full", "the disk is full: free some space, or name a database elsewhere in"),
    ("could not extend file", "the disk of the server is full: free some space there, or name a "
     "database elsewhere in"),
    ("disk i/o error", "the disk reports an error or is full: free some space, or name a "
     "database elsewhere in"),
    ("readonly", "it is read-only: make it writable, or name another database in"),
    ("lock timeout", "another process keeps it locked: wait for that process, or name another "
     "database in"),
    ("locked", "another process keeps it locked: wait for that process, or name another "
     "database in"),
    ("not a database", "the file is not a SQLite database: move it away, or name another in"),
    ("malformed", "the file is damaged: move it away and import an export of it, or name another "
     "in"),
    ("unable to open", "it cannot be opened: check that its folder exists and that you may write "
     "there, or name another database in"),
)  # fmt: skip
"""Part of a driver's message -> what the user can do; the name of the variable follows."""

_OUTAGES = ("08", "57P01", "57P02", "57P03")
"""Beginnings of PostgreSQL's codes (SQLSTATE) of a connection that broke, or of a server that ends
or starts."""


class ServerLost(StoreError):
    """The server does not answer. A server that restarts answers again a little later."""


def engine_of(location: Location, timeout: float, is_foreign: bool = False) -> Engine:
    """The engine of a database.

    Parameters
    ----------
    timeout : seconds to wait for other writers
    is_foreign : whether somebody else made the file, so that SQLite must limit what the file does

    Raises
    ------
    StoreError
        The location is not a database's.
    MissingDependency
        The driver of the database is not installed.
    """
    url = location.url if location.is_url else URL.create("sqlite", database=str(location.path))
    try:
        engine = create_engine(url, **_server_options(url, timeout))
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
            if is_foreign:
                _limit(connection)

    return engine


def _server_options(url: URL | str, timeout: float) -> dict[str, Any]:
    """Options of the engine of a PostgreSQL server; none for other databases.

    A statement in a transaction sees what was committed before the statement: what another writer
    adds while this one waits for the lock is seen. A commit is on disk when it returns.
    """
    if not make_url(url).drivername.startswith("postgresql"):
        return {}
    asked, milliseconds = make_url(url).query, max(1, int(timeout * 1000))
    options = f"-c lock_timeout={milliseconds} -c synchronous_commit=on {asked.get('options', '')}"
    waits = {"connect_timeout": max(2, round(timeout)), "tcp_user_timeout": milliseconds}
    return {
        "isolation_level": "READ COMMITTED",
        "pool_pre_ping": True,
        "connect_args": {**waits, **asked, "options": options},
    }


def _limit(connection: sqlite3.Connection) -> None:
    """Bound what a file's schema and values can make SQLite do."""
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    calls = iter(range(MAX_STEPS // STEPS_AT_A_TIME))
    connection.set_progress_handler(lambda: next(calls, None) is None, STEPS_AT_A_TIME)


@contextmanager
def copied(location: Location) -> Iterator[Location]:
    """The location of a private copy of a SQLite database; the copy is deleted at the end.

    Raises
    ------
    StoreError
        The file cannot be read, or has more than :data:`MAX_COPY_BYTES`.
    """
    path = location.path
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="kernelcat-") as folder:
        target = Path(folder) / "copy.sqlite3"
        try:
            for suffix in SUFFIXES:
                source = path.with_name(path.name + suffix)
                if suffix == "" or source.exists():
                    if source.stat().st_size > MAX_COPY_BYTES:
                        raise StoreError(f"{source} has more than {MAX_COPY_BYTES >> 30} GiB")
                    shutil.copyfile(source, target.with_name(target.name + suffix))
        except OSError as error:
            raise StoreError(f"cannot read {path} ({error.strerror})") from error
        yield replace(location, url="", path=target, is_url=False)


@contextmanager
def explained(location: Location) -> Iterator[None]:
    """Turn an exception of the database into a ``StoreError`` of one line with advice."""
    start = f"cannot use the tuning database {location}: "
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{start}{error}") from error
    except DBAPIError as error:
        kind = ServerLost if _is_outage(error) else StoreError
        raise kind(f"{start}{_advice(str(error.orig))}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"{start}{_first_line(str(error))}") from error
    except sqlite3.Error as error:  # from a connection that SQLAlchemy does not wrap yet
        raise StoreError(f"{start}{_advice(str(error))}") from error
    except (UnicodeDecodeError, OverflowError) as error:
        raise StoreError(f"{start}{_advice('malformed')} ({type(error).__name__})") from error


def _is_outage(error: DBAPIError) -> bool:
    """Whether a connection to a server broke, or could not be made."""
    if not hasattr(error.orig, "sqlstate"):
        return False  # SQLite
    code: str | None = getattr(error.orig, "sqlstate", None)
    return isinstance(error, OperationalError) and (code is None or code.startswith(_OUTAGES))


def _advice(message: str) -> str:
    for sign, advice in _ADVICE:
        if sign in message.lower():
            return f"{advice} {VARIABLE}"
    return _first_line(message) or "no reason was given"


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]
