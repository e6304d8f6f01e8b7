"""Where the database lies: an argument, ``$KERNELCAT_DB``, or the user's data folder."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from kernelcat.errors import StoreError

VARIABLE = "KERNELCAT_DB"


@dataclass(frozen=True)
class Location:
    """A database's URL and, for a SQLite file, its path. ``str()`` hides the password."""

    url: str
    path: Path | None
    named: bool
    """Whether somebody asked for this very place; False for the default."""

    @property
    def journal(self) -> Path:
        """Where measurements wait while the database cannot be written."""
        if self.path:
            return self.path.with_name(f"{self.path.name}.journal.jsonl")
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        return default_folder() / f"server-{digest}.journal.jsonl"

    def lock(self, timeout: float) -> AbstractContextManager[object]:
        """Held while the database is created or migrated and the journal read or written.

        A folder that cannot be written needs none: nobody writes there.
        """
        from filelock import FileLock, Timeout

        path = self.path or self.journal
        if not os.access(path.parent, os.W_OK):
            return nullcontext()
        lock = FileLock(f"{path}.lock")
        try:
            return lock.acquire(timeout=timeout)
        except Timeout as error:
            raise StoreError(
                f"another process holds {path}.lock: wait for it, or name another database in "
                f"{VARIABLE}"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise StoreError(
                f"cannot lock {path}.lock ({error}): name a database elsewhere in {VARIABLE}"
            ) from error

    def __str__(self) -> str:
        if self.path:
            return str(self.path)
        parts = urlsplit(self.url)
        return self.url.replace(f":{parts.password}@", ":***@") if parts.password else self.url


def default_folder() -> Path:
    """The user's data folder: results took GPU hours, a cache cleaner must not find them."""
    return platformdirs.user_data_path("kernelcat", appauthor=False)


def locate(url: str | os.PathLike[str] | None = None) -> Location:
    """The database ``url`` (a path or any SQLAlchemy URL) means; None means the user's own."""
    asked = os.fspath(url) if url is not None else os.environ.get(VARIABLE)
    text = asked or str(default_folder() / "tuning.sqlite3")
    if "://" not in text:
        path = Path(text).expanduser().absolute()
        return Location(f"sqlite:///{path}", path, bool(asked))
    return Location(text, _sqlite_path(text), bool(asked))


def _sqlite_path(url: str) -> Path | None:
    dialect, _, rest = url.partition("://")
    if not dialect.startswith("sqlite"):
        return None
    name = rest.removeprefix("/").partition("?")[0].removeprefix("file:")
    return None if name in ("", ":memory:") else Path(name).absolute()
