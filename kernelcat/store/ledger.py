"""Ledgers: receipts, profiles and machine-code records, as JSON Lines that git can hold.

A ledger is a folder with one file for every GPU, ``nvidia-SKU.jsonl``, which holds the newest
record of each key. The package's ledgers lie under ``tuning_db/``; each user has local ones.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import platformdirs

from kernelcat import paths


class Record(Protocol):
    """One line of a ledger."""

    @property
    def key(self) -> tuple[str, ...]:
        """The SKU, then what identifies the record; a newer record replaces the one of its key."""
        ...

    def to_json(self) -> str:
        """The line, without the newline."""
        ...


R = TypeVar("R", bound=Record)

REFUSED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What a parser raises for a line that it cannot read."""


def shipped_folder(name: str) -> Path:
    """Folder of the ledger ``name`` that comes with the package."""
    return paths.data("tuning_db") / name


def local_folder(name: str) -> Path:
    """Folder of this user's ledger: ``$KERNELCAT_NAME``, else one in the user's data folder."""
    folder = os.environ.get(f"KERNELCAT_{name.upper()}")
    return Path(folder) if folder else Path(platformdirs.user_data_dir("kernelcat")) / name


def read(folder: Path, parse: Callable[[str], R], containing: str = "") -> list[R]:
    """Every record in a folder, in file and line order.

    ``parse`` makes a record from a line. A line that ``parse`` refuses (half a line after a crash,
    or a line of a newer kernelcat) is left out, with a warning for each file. ``containing``
    selects the lines with this text; the others are not parsed.
    """
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        refused = []
        for number, line in enumerate(_lines(path), 1):
            if containing in line:
                try:
                    records.append(parse(line))
                except REFUSED as error:
                    refused.append(f"{path}:{number}: {type(error).__name__}: {error}")
        if refused:
            warnings.warn(
                f"{len(refused)} unreadable lines are ignored ({refused[0]:.300}): update "
                "kernelcat, or delete them", RuntimeWarning, stacklevel=3,
            )  # fmt: skip
    return records


def merge(folder: Path, records: Iterable[R], parse: Callable[[str], R]) -> None:
    """Add records to the folder's files; the last record of each key stays.

    Other processes may do the same at the same time. Lines of a newer kernelcat stay as they are.
    """
    from filelock import FileLock  # not on the path of calls

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        newest = {record.key: record for record in [*read(folder, parse), *records]}
        for gpu in {key[0] for key in newest}:
            path = folder / f"nvidia-{gpu}.jsonl"
            text = [newest[key].to_json() for key in sorted(newest) if key[0] == gpu]
            _write(path, [*text, *_newer(path, parse)])


def _newer(path: Path, parse: Callable[[str], Record]) -> list[str]:
    """The lines of a file that are JSON, but no record that ``parse`` knows."""
    newer = []
    for line in _lines(path):
        try:
            parse(line)
        except REFUSED:
            with suppress(*REFUSED):
                json.loads(line)
                newer.append(line)
    return newer


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _write(path: Path, lines: Iterable[str]) -> None:
    """Write a file in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    temporary.replace(path)
