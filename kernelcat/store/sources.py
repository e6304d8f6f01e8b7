"""Sources: who brought the rows of a database, what can be wrong with them, and their removal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import delete, func, select

from kernelcat.errors import InvalidArgument, UnknownName, nearest
from kernelcat.store.database import Store
from kernelcat.store.lines import shipped
from kernelcat.store.location import locate
from kernelcat.store.measurement import Measurement
from kernelcat.store.models import from_row, measurements
from kernelcat.store.origin import SHIPPED
from kernelcat.store.plausibility import doubt

VERDICTS = ("crashed", "timeout")
"""Statuses that another process, or a busy machine, can cause as well as the kernel."""


@dataclass(frozen=True)
class Source:
    """Who brought rows: :mod:`kernelcat.store.origin` has the names.

    ``rows`` is their number; ``first`` and ``last`` are the dates of the oldest and the newest row.
    """

    name: str
    rows: int
    first: str
    last: str


@dataclass(frozen=True)
class Finding:
    """A row that cannot be true, or a verdict that may not be the kernel's own.

    Attributes
    ----------
    source : who brought the row
    row : what the row is about, in words
    reason : why the row cannot be true, or what a verdict saw
    is_verdict : whether the row is a crash or a timeout
    """

    source: str
    row: str
    reason: str
    is_verdict: bool


@contextmanager
def opened(url: str | None = None) -> Iterator[Store | None]:
    """The database, open; None where nothing names a database and there is none."""
    location = locate(url)
    if not location.named and location.path and not location.path.exists():
        yield None
        return
    with Store.open(url, create=False) as store:
        yield store


def sources(store: Store | None) -> list[Source]:
    """The sources of the shipped rows and of the database's rows, sorted by name."""
    dates = [row.created_at for row in shipped()]
    found = [Source(SHIPPED, len(dates), min(dates), max(dates))] if dates else []
    if store is not None:
        created_at, origin = measurements.c.created_at, measurements.c.origin
        columns = (origin, func.count(), func.min(created_at), func.max(created_at))
        with store._reading() as connection:
            for row in connection.execute(select(*columns).group_by(origin)):
                found.append(Source(*row))
    return sorted(found, key=lambda source: source.name)


def drop(store: Store, name: str) -> int:
    """Delete every row of the source ``name`` from the database; returns their number.

    Raises
    ------
    InvalidArgument
        The rows came with the package.
    UnknownName
        The database has no row of this source; the message lists the nearest names.
    """
    if name == SHIPPED:
        raise InvalidArgument("shipped rows are files of the package: edit tuning_db/ instead")
    with store._writing() as connection:
        deleted = connection.execute(delete(measurements).where(measurements.c.origin == name))
    if not deleted.rowcount:
        names = [source.name for source in sources(store) if source.name != SHIPPED]
        raise UnknownName(f"there are no rows of {name!r}{nearest(name, names)}; "
                          "kernelcat db sources lists the sources")  # fmt: skip
    return int(deleted.rowcount)


def verify(store: Store | None) -> list[Finding]:
    """Rows that cannot be true, shipped rows among them, and then all crashes and timeouts."""
    findings = [found for row in shipped() if (found := _finding(row))]
    return sorted([*findings, *_in_database(store)], key=lambda finding: finding.is_verdict)


def _in_database(store: Store | None) -> Iterator[Finding]:
    if store is None:
        return
    with store._reading() as connection:
        for row in connection.execute(select(measurements).order_by(measurements.c.id)):
            try:
                found = _finding(from_row(row))
            except (InvalidArgument, ValueError, TypeError) as error:
                found = Finding(str(row.origin), f"row {row.id}", str(error), is_verdict=False)
            if found is not None:
                yield found


def _finding(row: Measurement) -> Finding | None:
    """What is wrong with ``row``, or None."""
    reason = doubt(row)
    if reason is not None:
        return Finding(row.origin, _title(row), reason, is_verdict=False)
    if row.status in VERDICTS:
        return Finding(row.origin, _title(row), row.detail or "no detail", is_verdict=True)
    return None


def _title(row: Measurement) -> str:
    name = f"{row.entry}/{row.language}/{row.variant}"
    config = " ".join(f"{key}={value}" for key, value in row.config.items())
    time = "" if row.median_us is None else f" {row.median_us:g} us"
    problem = row.problem_name or row.problem_key
    return f"{name} [{config}] {problem} on {row.gpu}, {row.created_at[:10]}: {row.status}{time}"
