"""JSON Lines files of measurements: one row a line.

What many rows have in common stands once, before them: where they were measured, on a line
``{"environment": {...}, "id": "..."}``, and the race they were in, on a line ``{"id": "...",
"race": {...}}`` that gives the environment's id. A row gives the race's id instead of its fields.
A row that has all fields itself, as a database keeps it, is a row too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store.measurement import Measurement, canonical, decode

Refusals = tuple[tuple[int, str], ...]
"""Line numbers and why each line was refused."""

RACE = ("entry", "environment", "gpu", "kind", "problem", "problem_name", "protocol", "run")
"""Fields of a row that its race has."""
ENVIRONMENT = b'{"environment":'
"""Begins the line of an environment and no other: a row begins with its ``ci_us``."""


class Reader:
    """Rows from lines, in the order of the file."""

    def __init__(self) -> None:
        self._environments: dict[str, Any] = {}
        self._races: dict[str, dict[str, Any]] = {}

    def row(self, line: str | bytes) -> Measurement | None:
        """The row on a line; None for what rows have in common.

        Raises
        ------
        InvalidArgument
            The line is neither, or names what does not stand before it.
        """
        record = decode(line)
        if isinstance(record, dict):
            if record.keys() == {"environment", "id"}:
                self._environments[str(record["id"])] = record["environment"]
                return None
            if record.keys() == {"id", "race"}:
                if not isinstance(record["race"], dict):
                    raise InvalidArgument("a race must be a JSON object")
                self._races[str(record["id"])] = self._placed(record["race"])
                return None
            if "race" in record:
                record |= _named(self._races, "race", record.pop("race"))
            else:
                record = self._placed(record)
        return Measurement.from_json(record)

    def has_race(self, line: bytes) -> bool:
        """Whether the race of a canonical line has been read, told without parsing it."""
        _, _, after = line.partition(b'"race":"')
        return after.partition(b'"')[0].decode(errors="replace") in self._races

    def _placed(self, record: dict[str, Any]) -> dict[str, Any]:
        """``record`` with its environment, of which it may have the name."""
        name = record.get("environment")
        if not isinstance(name, str):
            return record
        return record | {"environment": _named(self._environments, "environment", name)}


def _named(known: Mapping[str, Any], kind: str, name: Any) -> Any:
    if not isinstance(name, str) or name not in known:
        raise InvalidArgument(f"no {kind} {name!r} stands before this line")
    return known[name]


def write_lines(rows: Sequence[Measurement]) -> str:
    """The text of a file with these rows in this order, each race before its first row."""
    environments: dict[str, Any] = {}
    lines: dict[str, None] = {}  # in order, races once
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
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:8]


def read_lines(path: Path) -> tuple[list[Measurement], Refusals]:
    """The rows of a file, and the lines that are none."""
    rows: list[Measurement] = []
    refused: list[tuple[int, str]] = []
    reader = Reader()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = reader.row(line)
                except InvalidArgument as error:
                    refused.append((number, str(error)))
                    continue
                if row is not None:
                    rows.append(row)
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror})") from error
    return rows, tuple(refused)


def read_all(path: Path) -> list[Measurement]:
    """The rows of a file in which every line must be one; ``StoreError`` names the first bad."""
    rows, refused = read_lines(path)
    if refused:
        number, reason = refused[0]
        raise StoreError(f"{path}:{number}: {reason}; mend or remove that line")
    return rows


def shipped() -> list[Measurement]:
    """Every row of ``tuning_db/``, peers included."""
    files = sorted(paths.data("tuning_db").glob("*.jsonl"))
    return [row for file in files for row in read_all(file)]
