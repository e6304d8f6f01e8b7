"""Where the database is: an argument, ``$KERNELCAT_DB``, or the user's data folder."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from kernelcat.errors import StoreError

VARIABLE = "KERNELCAT_DB"
"""Environment variable that names the database."""


@dataclass(frozen=True)
class Location:
    """Where a database is. ``str()`` hides the password.

    Attributes
    ----------
    url : SQLAlchemy URL; empty for a path
    path : the file of a SQLite database, else None
    named : whether an argument or ``$KERNELCAT_DB`` names it; False for the default
    is_url : whether the database was named by a URL and not by a path
    layers : further databases that are read beside this one and never written
    """

    url: str
    path: Path | None
    named: bool
    is_url: bool = False
    layers: tuple[Location, ...] = ()

    @property
    def is_read_only(self) -> bool:
        """Whether the file exists and cannot be written, or its folder cannot."""
        if self.path is None or not os.path.exists(self.path):  # noqa: PTH110
            return False
        return not (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK))

    @property
    def journal(self) -> Path:
        """The file for measurements that could not be written to the database."""
        if self.path:
            return self.path.with_name(f"{self.path.name}.journal.jsonl")
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        return default_folder() / f"server-{digest}.journal.jsonl"

    def lock(self, timeout: float) -> AbstractContextManager[object]:
        """A file lock, held during migrations and while the journal is read or written.

        ``timeout`` is in seconds. A folder that cannot be written needs no lock: this returns a
        context that does nothing.

        Raises
        ------
        StoreError
            Another process holds the lock, or the file system has no locks.
        """
        from filelock import FileLock, Timeout

        path = self.path or self.journal
        if self.path is None:  # the journal of a server is in the user's data folder
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
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
    """The user's data folder. Results took GPU hours, so they are not in the cache folder."""
    return platformdirs.user_data_path("kernelcat", appauthor=False)


def locate(url: str | os.PathLike[str] | None = None) -> Location:
    """The location of a database: ``url``, else ``$KERNELCAT_DB``, else the user's own.

    ``url`` is a path or a SQLAlchemy URL. Several of them may be joined by ``:``, as in ``PATH``:
    the first database is written, and all are read. The user's own database is ``tuning.sqlite3``
    in the user's data folder.
    """
    name = os.fspath(url) if url is not None else os.environ.get(VARIABLE)
    first, *others = _split(name) if name else [str(default_folder() / "tuning.sqlite3")]
    location = _locate(first, bool(name))
    return replace(location, layers=tuple(_locate(other, True) for other in others))


def _split(name: str) -> list[str]:
    """The databases in a list that is joined by ``:``. A name with ``://`` is one URL."""
    if "://" in name or os.path.exists(name):  # noqa: PTH110 (a Path raises for a long name)
        return [name]
    return [part for part in name.split(os.pathsep) if part] or [name]


def _locate(text: str, is_named: bool) -> Location:
    if "://" in text:
        return Location(text, _sqlite_path(text), is_named, is_url=True)
    return Location("", Path(text).expanduser().absolute(), is_named)


def _sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for a database in memory or of another kind."""
    dialect, _, rest = url.partition("://")
    if not dialect.startswith("sqlite"):
        return None
    name = rest.removeprefix("/").partition("?")[0].removeprefix("file:")
    return None if name in ("", ":memory:") else Path(name).absolute()
