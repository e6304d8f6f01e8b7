"""JSON Lines files of measurements: one row a line.

Where many rows were measured stands once, on a line ``{"environment": {...}, "id": "..."}`` before
them; they give its id for their environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store.measurement import Measurement, canonical, decode

Refusals = tuple[tuple[int, str], ...]
"""Line numbers and why each line was refused."""

ENVIRONMENT = b'{"environment":'
"""Begins the line of an environment and no other: a row begins with its ``ci_us``."""


class Reader:
    """Rows from lines, in the order of the file."""

    def __init__(self) -> None:
        self._environments: dict[str, Any] = {}

    def row(self, line: str | bytes) -> Measurement | None:
        """The row on a line, None for an environment; ``InvalidArgument`` where it is neither."""
        record = decode(line)
        if isinstance(record, dict):
            if record.keys() == {"environment", "id"}:
                self._environments[str(record["id"])] = record["environment"]
                return None
            name = record.get("environment")
            if isinstance(name, str):
                if name not in self._environments:
                    raise InvalidArgument(f"no environment {name!r} stands before this row")
                record["environment"] = self._environments[name]
        return Measurement.from_json(record)


def write_lines(rows: Sequence[Measurement]) -> str:
    """The text of a file with these rows in this order, after their environments."""
    environments = {canonical(row.environment): row.environment for row in rows}
    names = {text: hashlib.sha256(text.encode()).hexdigest()[:8] for text in environments}
    records = [
        *({"environment": dict(environments[text]), "id": names[text]} for text in sorted(names)),
        *(row.to_json() | {"environment": names[canonical(row.environment)]} for row in rows),
    ]
    return "".join(f"{canonical(record)}\n" for record in records)


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
