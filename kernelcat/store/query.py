"""Reading the database by SQL of the user's own, which can neither write nor open other files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store.connection import explained
from kernelcat.store.location import locate

_ALLOWED = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)
"""What a statement may do. ATTACH, VACUUM INTO and PRAGMA could reach files or settings."""

_REFUSALS = ("not authorized", "authorization denied")
"""What SQLite says of other statements."""


@dataclass(frozen=True)
class Answer:
    """What a query found: names of the columns, and values by row and column."""

    columns: list[str]
    rows: list[tuple[Any, ...]]

    def records(self) -> list[dict[str, Any]]:
        """A mapping from column to value for each row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def query(sql: str, url: str | None = None) -> Answer:
    """The answer of the SQLite database at ``url`` to one statement that only reads.

    Shipped results and layers of read-only databases are not in it: they are other files.

    Raises
    ------
    InvalidArgument
        The statement is wrong, would write, or has two columns of one name; or the database is a
        server's.
    StoreError
        There is no such database, or it cannot be read.
    """
    location = locate(url)
    if location.path is None:
        raise InvalidArgument(f"{location} is on a server: ask it by the server's own client")
    if not location.path.exists():
        raise StoreError(f"there is no database {location}: kernelcat tune makes it")
    with explained(location):
        address = f"{location.path.resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(address, uri=True)
    with closing(connection):
        with explained(location):
            connection.execute("SELECT count(*) FROM sqlite_master")
        connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
        )
        try:
            cursor = connection.execute(sql)
            rows = cursor.fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            refused = any(text in str(error) for text in _REFUSALS)
            reason = "only SELECT is allowed, nothing was changed" if refused else str(error)
            raise InvalidArgument(f"the query failed: {reason}") from error
    if cursor.description is None:
        raise InvalidArgument("the query is empty: write SELECT ...")
    columns = [column[0] for column in cursor.description]
    if len(set(columns)) < len(columns):
        raise InvalidArgument("two columns have one name: give them names by AS")
    return Answer(columns, rows)
