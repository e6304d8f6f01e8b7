"""JSON Lines files of measurements.

A file has three kinds of lines. An environment is ``{"environment": {...}, "id": "..."}``. A race
is ``{"id": "...", "race": {...}}`` and names its environment by id. A row is a measurement in which
the id of its race replaces the fields of :data:`RACE`. A line must follow the lines that it names.
A row may also have all fields itself, as in a database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store.measurement import LINE_BYTES, Measurement, canonical, decode
from kernelcat.store.origin import LOCAL, SHIPPED, brought

Refusals = tuple[tuple[int, str], ...]
"""Line number and reason of each refused line."""

MAX_BYTES = 1 << 30
"""Largest file that is read."""

RACE = ("entry", "environment", "gpu", "kind", "problem", "problem_name", "protocol", "run")
"""Fields that a race has for all of its rows."""
ENVIRONMENT = b'{"environment":'
"""Beginning of the line of an environment, and of no other line: keys are sorted, so a row begins
with ``ci_us`` and a race with ``id``."""


class Reader:
    """Reads lines in the order of the file; remembers environments and races for later rows.

    ``origin`` is that of the rows.
    """

    def __init__(self, origin: str = LOCAL) -> None:
        self._origin = origin
        self._environments: dict[str, Any] = {}
        self._races: dict[str, dict[str, Any]] = {}

    def row(self, line: str | bytes) -> Measurement | None:
        """The row on a line; None for the line of an environment or a race.

        Raises
        ------
        InvalidArgument
            The line is none of the three kinds, or no earlier line has the id that it names.
        """
        record = decode(line)
        if isinstance(record, dict):
            if record.keys() == {"environment", "id"}:
                self._environments[str(record["id"])] = record["environment"]
                return None
            if record.keys() == {"id", "race"}:
                if not isinstance(record["race"], dict):
                    raise InvalidArgument("a race must be a JSON object")
                self._races[str(record["id"])] = self._with_environment(record["race"])
                return None
            if "race" in record:
                record |= _named(self._races, "race", record.pop("race"))
            else:
                record = self._with_environment(record)
        return brought(Measurement.from_json(record), self._origin)

    def has_race(self, line: bytes) -> bool:
        """Whether the race of a row has been read. ``line`` is canonical JSON and is not parsed."""
        _, _, after = line.partition(b'"race":"')
        return after.partition(b'"')[0].decode(errors="replace") in self._races

    def _with_environment(self, record: dict[str, Any]) -> dict[str, Any]:
        """``record`` with its environment in place of the environment's id."""
        name = record.get("environment")
        if not isinstance(name, str):
            return record
        return record | {"environment": _named(self._environments, "environment", name)}


def _named(values: Mapping[str, Any], kind: str, name: Any) -> Any:
    """The value of the environment or race (``kind``) that an earlier line has defined."""
    if not isinstance(name, str) or name not in values:
        raise InvalidArgument(f"no {kind} {name!r} stands before this line")
    return values[name]


def write_lines(rows: Sequence[Measurement]) -> str:
    """The text of a file: environments, then the rows in order, each race before its first row."""
    environments: dict[str, Any] = {}
    lines: dict[str, None] = {}  # an ordered set: each race once
    for row in rows:
        record = row.to_json()
        environment = _name(record["environment"])
        environments[environment] = record["environment"]
        race = {field: record.pop(field) for field in RACE} | {"environment": environment}
        name = _name(race)
        lines[canonical({"id": name, "race": race})] = None
        lines[canonical(record | {"race": name})] = None
    named = sorted(environments.items(), key=lambda item: canonical(item[1]))
    heads = [canonical({"environment": dict(value), "id": name}) for name, value in named]
    return "".join(f"{line}\n" for line in [*heads, *lines])


def _name(value: Mapping[str, Any]) -> str:
    """The id of an environment or race: a digest of its content."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:8]


class File:
    """The rows of a file, which is read line by line while the rows are iterated over.

    ``origin`` is that of the rows. ``check`` raises ``InvalidArgument`` for a row to be refused.

    Attributes
    ----------
    refused : line number and reason of each invalid line so far
    num_rows : number of rows so far
    """

    def __init__(
        self,
        path: Path,
        origin: str = LOCAL,
        check: Callable[[Measurement], None] = lambda row: None,
    ) -> None:
        self.path = path
        self._origin = origin
        self._check = check
        self.refused: list[tuple[int, str]] = []
        self.num_rows = 0

    def __iter__(self) -> Iterator[Measurement]:
        """Raises ``StoreError`` where the file cannot be read or has over :data:`MAX_BYTES`."""
        reader = Reader(self._origin)
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            try:
                row = reader.row(line)
                if row is not None:
                    self._check(row)
            except InvalidArgument as error:
                self.refused.append((number, str(error)))
                continue
            if row is not None:
                self.num_rows += 1
                yield row

    def _lines(self) -> Iterator[bytes]:
        """The lines; of a line that is too long only the beginning, which is too long as well."""
        size = 0
        try:
            with self.path.open("rb") as file:
                while line := file.readline(LINE_BYTES + 2):
                    yield line
                    while not line.endswith(b"\n") and line:
                        size += len(line)
                        self._check_size(size)
                        line = file.readline(LINE_BYTES + 2)
                    size += len(line)
                    self._check_size(size)
        except OSError as error:
            raise StoreError(f"cannot read {self.path} ({error.strerror})") from error

    def _check_size(self, size: int) -> None:
        if size > MAX_BYTES:
            raise StoreError(f"{self.path} has more than {MAX_BYTES >> 20} MiB: import it in parts")


def read_all(path: Path, origin: str = LOCAL) -> list[Measurement]:
    """The rows of a file without any invalid line; ``origin`` is that of the rows.

    Raises
    ------
    StoreError
        The file cannot be read or has an invalid line; the message names the first one.
    """
    file = File(path, origin)
    rows = list(file)
    if file.refused:
        number, reason = file.refused[0]
        raise StoreError(f"{path}:{number}: {reason}; mend or remove that line")
    return rows


def shipped() -> list[Measurement]:
    """Every row of ``tuning_db/``, those of peers included; raises as :func:`read_all` does.

    A file that has not changed is read once: its rows are the same objects.
    """
    files = sorted(paths.data("tuning_db").glob("*.jsonl"))
    versions = ((file, file.stat()) for file in files)
    return [row for file, now in versions for row in _shipped(file, now.st_mtime_ns, now.st_size)]


@lru_cache(maxsize=16)
def _shipped(file: Path, mtime_ns: int, size: int) -> Sequence[Measurement]:
    return read_all(file, SHIPPED)
