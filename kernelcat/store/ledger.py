"""Ledgers: records of what ran on GPUs, as JSON Lines that git can hold.

A ledger is a folder with one file for every GPU, ``nvidia-SKU.jsonl``, that holds the newest
record of each kind. What comes with the package lies under ``tuning_db/``, what a user measures in
a folder of their own.
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
        """What a newer record replaces: the GPU first."""
        ...

    def to_json(self) -> str: ...


def shipped_folder(name: str) -> Path:
    """Where the ledger ``name`` that comes with the package lies."""
    return paths.data("tuning_db") / name


def local_folder(name: str) -> Path:
    """Where this user's own lies: ``$KERNELCAT_NAME``, else in the user's data folder."""
    chosen = os.environ.get(f"KERNELCAT_{name.upper()}")
    return Path(chosen) if chosen else Path(platformdirs.user_data_dir("kernelcat")) / name


def lines(folder: Path) -> list[str]:
    """Every line in a folder, in file and line order."""
    return [
        line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def write(folder: Path, records: Iterable[Record]) -> None:
    """Make the folder's files hold the last one of each key."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {record.key: record for record in records}
    for gpu in {key[0] for key in kept}:
        text = "".join(f"{kept[key].to_json()}\n" for key in sorted(kept) if key[0] == gpu)
        path = folder / f"nvidia-{gpu}.jsonl"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(path)
