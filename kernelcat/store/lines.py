"""Reading JSON Lines files of measurements."""

from __future__ import annotations

from pathlib import Path

from kernelcat import paths
from kernelcat.errors import InvalidArgument, StoreError
from kernelcat.store.measurement import Measurement

Refusals = tuple[tuple[int, str], ...]
"""Line numbers and why each line was refused."""


def read_lines(path: Path) -> tuple[list[Measurement], Refusals]:
    """The rows of a file, and the lines that are none."""
    rows: list[Measurement] = []
    refused: list[tuple[int, str]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    rows.append(Measurement.from_line(line))
                except InvalidArgument as error:
                    refused.append((number, str(error)))
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
