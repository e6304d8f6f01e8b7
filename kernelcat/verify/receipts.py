"""Receipts: what was checked of an implementation on a real GPU, and of which source.

``tuning_db/receipts/nvidia-SKU.jsonl`` holds one line for every implementation. A receipt proves
the implementation as it is now where its ``source`` is today's digest, or one that runs the same
machine code (:mod:`kernelcat.verify.code_record`); otherwise it proves nothing, and CI refuses it.
What a user checks on a GPU of their own goes to a local file of the same form.

Whether an implementation is *unverified* follows from its receipts: without one it is so if it
says so itself, and one with findings of the sanitizer makes it so whatever it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Implementation
from kernelcat.store import ledger
from kernelcat.verify import code_record


@dataclass(frozen=True)
class Receipt:
    """One implementation's proof.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    source : its digest when it was checked (:mod:`kernelcat.catalog.digest`)
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

    @property
    def key(self) -> tuple[str, ...]:
        """What a newer receipt replaces."""
        return self.gpu, self.implementation

    @property
    def findings(self) -> str:
        """What the sanitizer found, in words; empty for nothing."""
        found = {tool: n for tool, n in self.sanitizer.items() if n}
        return ", ".join(f"{tool} found {n} errors" for tool, n in sorted(found.items()))

    @staticmethod
    def from_json(line: str) -> Receipt:
        values = json.loads(line)
        return Receipt(**{**values, "problems": tuple(values["problems"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def shipped_folder() -> Path:
    """Where the receipts that come with the package lie."""
    return ledger.shipped_folder("receipts")


def local_folder() -> Path:
    """Where this user's own receipts lie: ``$KERNELCAT_RECEIPTS``, else the user's data folder."""
    return ledger.local_folder("receipts")


def read(folder: Path) -> list[Receipt]:
    """Every receipt in a folder, in file and line order."""
    return [Receipt.from_json(line) for line in ledger.lines(folder)]


@cache
def known() -> tuple[Receipt, ...]:
    """The shipped receipts and this user's own, read once (``known.cache_clear()`` forgets)."""
    return (*read(shipped_folder()), *read(local_folder()))


def write(folder: Path, receipts: Iterable[Receipt]) -> None:
    """Merge ``receipts`` into the folder's files, newest for each implementation and GPU."""
    ledger.write(folder, [*read(folder), *receipts])


def valid_for(implementation: Implementation, receipts: Iterable[Receipt]) -> list[Receipt]:
    """The receipts that prove this implementation as it is now."""
    now = digest(implementation)
    return [
        r
        for r in receipts
        if r.implementation == implementation.name
        and code_record.are_equal(r.implementation, r.gpu, r.source, now)
    ]


def state(implementation: Implementation) -> str:
    """What its shipped receipts say of an implementation, in words."""
    own = [r for r in read(shipped_folder()) if r.implementation == implementation.name]
    valid = valid_for(implementation, own)
    if not valid:
        none = f"no receipt, {implementation.unverified}" if implementation.unverified else ""
        return none or ("void: other code than the receipt's" if own else "no receipt")
    newest = valid[-1]
    now = digest(implementation)
    record = code_record.find(implementation.name, newest.gpu)
    carried = f", {record.digests[now]}" if record and newest.source != now else ""
    findings = f", {newest.findings}" if newest.findings else ""
    return f"holds, ran on {newest.gpu} {newest.created_at[:10]}{carried}{findings}"


def doubt(implementation: Implementation, receipts: Iterable[Receipt] | None = None) -> str | None:
    """Why an implementation is unverified; None when it is not.

    ``receipts`` are the known ones by default. One of its source as it is now decides.
    """
    among = known() if receipts is None else receipts
    of_name = [r for r in among if r.implementation == implementation.name]
    valid = valid_for(implementation, of_name) if of_name else []
    if any(not r.findings for r in valid):
        return None
    for receipt in valid:
        return f"{receipt.findings} on {receipt.gpu}"
    return implementation.unverified


def faults(implementation: Implementation, receipts: Iterable[Receipt]) -> list[str]:
    """What is wrong with an implementation's proof; empty when it holds or none is owed.

    A finding is no fault here: it makes the implementation unverified.
    """
    if implementation.unverified:
        return []
    of_name = [r for r in receipts if r.implementation == implementation.name]
    if not of_name:
        return [f"{implementation.name} has no receipt: run it on a GPU (kernelcat check)"]
    if not valid_for(implementation, of_name):
        return [f"{implementation.name} changed since its receipt: run it on a GPU again"]
    return []
