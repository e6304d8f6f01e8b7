"""Receipts: what was checked of an implementation on a real GPU, and of which source.

``tuning_db/receipts/nvidia-SKU.jsonl`` holds one line for every implementation. A receipt whose
``source`` differs from the implementation's digest today proves nothing; CI refuses it. What a
user checks on a GPU of their own goes to a local file of the same form.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from kernelcat import paths, sources
from kernelcat.implementation import Implementation


@dataclass(frozen=True)
class Receipt:
    """One implementation's proof.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    source : digest of its files when it was checked
    gpu, environment : where
    problems : the named problems that passed, each on two seeds
    fuzz_examples : random problems and configurations that passed
    sanitizer : tool -> errors found (compute-sanitizer); empty where it did not run
    created_at : ISO 8601, UTC
    """

    implementation: str
    source: str
    gpu: str
    environment: Mapping[str, Any]
    problems: tuple[str, ...]
    fuzz_examples: int
    sanitizer: Mapping[str, int]
    created_at: str

    @staticmethod
    def from_json(line: str) -> Receipt:
        values = json.loads(line)
        return Receipt(**{**values, "problems": tuple(values["problems"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def shipped_folder() -> Path:
    """Where the receipts that come with the package lie."""
    return paths.data("tuning_db") / "receipts"


def local_folder() -> Path:
    """Where this user's own receipts lie: ``$KERNELCAT_RECEIPTS``, else the user's data folder."""
    chosen = os.environ.get("KERNELCAT_RECEIPTS")
    return Path(chosen) if chosen else Path(platformdirs.user_data_dir("kernelcat")) / "receipts"


def read(folder: Path) -> list[Receipt]:
    """Every receipt in a folder, in file and line order."""
    return [
        Receipt.from_json(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def write(folder: Path, receipts: Iterable[Receipt]) -> None:
    """Merge ``receipts`` into the folder's files, newest for each implementation and GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {(r.gpu, r.implementation): r for r in [*read(folder), *receipts]}
    for gpu in {gpu for gpu, _ in merged}:
        lines = [merged[key].to_json() for key in sorted(merged) if key[0] == gpu]
        path = folder / f"nvidia-{gpu}.jsonl"
        temporary = path.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(path)


def valid_for(implementation: Implementation, receipts: Iterable[Receipt]) -> list[Receipt]:
    """The receipts that prove this implementation as its source is now."""
    digest = sources.digest(implementation)
    return [r for r in receipts if r.implementation == implementation.name and r.source == digest]


def faults(implementation: Implementation, receipts: Iterable[Receipt]) -> list[str]:
    """What is wrong with an implementation's proof; empty when it holds or none is owed."""
    if implementation.unverified:
        return []
    of_name = [r for r in receipts if r.implementation == implementation.name]
    if not of_name:
        return [f"{implementation.name} has no receipt: run it on a GPU (kernelcat check)"]
    valid = valid_for(implementation, of_name)
    if not valid:
        return [f"{implementation.name} changed since its receipt: run it on a GPU again"]
    findings = {t: n for r in valid for t, n in r.sanitizer.items() if n}
    return [f"{implementation.name}: {tool} found {n} errors" for tool, n in findings.items()]
