"""Ledgers: receipts, profiles and machine-code records, as JSON Lines that git can hold.

A ledger is a folder with one file for every GPU, ``nvidia-SKU.jsonl``, which holds the newest
record of each key. The package's ledgers lie under ``tuning_db/``; each user has local ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

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


def shipped_folder(name: str) -> Path:
    """Folder of the ledger ``name`` that comes with the package."""
    return paths.data("tuning_db") / name


def local_folder(name: str) -> Path:
    """Folder of this user's ledger: ``$KERNELCAT_NAME``, else one in the user's data folder."""
    folder = os.environ.get(f"KERNELCAT_{name.upper()}")
    return Path(folder) if folder else Path(platformdirs.user_data_dir("kernelcat")) / name


def lines(folder: Path) -> list[str]:
    """Every line in a folder, in file and line order."""
    return [
        line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def write(folder: Path, records: Iterable[Record]) -> None:
    """Write the last record of each key to the folder's files, each file in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = {record.key: record for record in records}
    for gpu in {key[0] for key in newest}:
        text = "".join(f"{newest[key].to_json()}\n" for key in sorted(newest) if key[0] == gpu)
        path = folder / f"nvidia-{gpu}.jsonl"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(path)
