"""Receipts: which checks an implementation passed on a real GPU, and with which source.

``tuning_db/receipts/nvidia-SKU.jsonl`` holds one line for every implementation. A receipt proves
today's implementation if the receipt's ``source`` is today's digest, or a digest that runs the same
machine code (:mod:`kernelcat.verify.code_record`). Otherwise the receipt proves nothing, and CI
refuses it. What a user checks on their own GPU goes to a local file of the same form.

An implementation is *unverified* if it has no valid receipt and is marked as unverified, or if the
sanitizer found something in every valid receipt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat import catalog
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
    source : digest of the implementation that was checked (:mod:`kernelcat.catalog.digest`)
    gpu : SKU
    environment : the machine and its compilers (:class:`kernelcat.runtime.environment.Environment`)
    problems : the named problems that passed, each with two seeds
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
        """GPU and implementation; a newer receipt replaces the one with the same key."""
        return self.gpu, self.implementation

    @property
    def findings(self) -> str:
        """The number of errors of each sanitizer tool, in words; empty without errors."""
        errors = {tool: count for tool, count in self.sanitizer.items() if count}
        return ", ".join(f"{tool} found {count} errors" for tool, count in sorted(errors.items()))

    @staticmethod
    def from_json(line: str) -> Receipt:
        """The receipt in a line; ``ValueError``, ``TypeError`` or ``KeyError`` for another line."""
        values = json.loads(line)
        receipt = Receipt(**{**values, "problems": tuple(values["problems"])})
        texts = (receipt.implementation, receipt.source, receipt.gpu, receipt.created_at)
        counts = (receipt.fuzz_examples, *receipt.sanitizer.values())
        if not (all(isinstance(text, str) for text in (*texts, *receipt.problems))
                and all(isinstance(count, int) for count in counts)
                and isinstance(receipt.environment, dict)):  # fmt: skip
            raise ValueError("a field has another type")
        return receipt

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def shipped_folder() -> Path:
    """Folder of the receipts that come with the package."""
    return ledger.shipped_folder("receipts")


def local_folder() -> Path:
    """Folder of this user's receipts: ``$KERNELCAT_RECEIPTS``, else the user's data folder."""
    return ledger.local_folder("receipts")


def read(folder: Path) -> list[Receipt]:
    """Every receipt in a folder, in file and line order."""
    return ledger.read(folder, Receipt.from_json)


@cache
def known() -> tuple[Receipt, ...]:
    """The shipped receipts and this user's own, read once; ``known.cache_clear()`` drops them."""
    return (*read(shipped_folder()), *read(local_folder()))


_sorted_by_name: tuple[tuple[Receipt, ...], dict[str, list[Receipt]]] = ((), {})
"""Receipts, and the same ones by implementation."""


def _known_of(name: str) -> Sequence[Receipt]:
    """The known receipts of an implementation."""
    global _sorted_by_name
    receipts = known()
    if _sorted_by_name[0] is not receipts:
        by_name: dict[str, list[Receipt]] = {}
        for receipt in receipts:
            by_name.setdefault(receipt.implementation, []).append(receipt)
        _sorted_by_name = receipts, by_name
    return _sorted_by_name[1].get(name, ())


def write(folder: Path, receipts: Iterable[Receipt]) -> None:
    """Merge ``receipts`` into the folder's files; the last receipt of each key stays."""
    ledger.merge(folder, receipts, Receipt.from_json)


def valid_for(implementation: Implementation, receipts: Iterable[Receipt]) -> list[Receipt]:
    """The receipts that prove today's code of ``implementation``."""
    now = digest(implementation)
    return [
        r
        for r in receipts
        if r.implementation == implementation.name
        and code_record.are_equal(r.implementation, r.gpu, r.source, now)
    ]


def checked() -> set[tuple[str, str]]:
    """Entry and SKU of shipped receipts that hold for today's code, without findings."""
    shipped: dict[str, list[Receipt]] = {}
    for receipt in read(shipped_folder()):
        shipped.setdefault(receipt.implementation, []).append(receipt)
    return {
        (name, receipt.gpu)
        for name in catalog.names()
        for implementation in catalog.implementations(name)
        for receipt in valid_for(implementation, shipped.get(implementation.name, []))
        if not receipt.findings
    }


def state(implementation: Implementation) -> str:
    """Whether the shipped receipts of an implementation hold, in words."""
    of_name = [r for r in read(shipped_folder()) if r.implementation == implementation.name]
    valid = valid_for(implementation, of_name)
    if not valid:
        if implementation.unverified:
            return f"no receipt, {implementation.unverified}"
        return "void: other code than the receipt's" if of_name else "no receipt"
    newest = valid[-1]
    now = digest(implementation)
    record = code_record.find(implementation.name, newest.gpu)
    carried = f", {record.digests[now]}" if record and newest.source != now else ""
    findings = f", {newest.findings}" if newest.findings else ""
    return f"holds, ran on {newest.gpu} {newest.created_at[:10]}{carried}{findings}"


def doubt(implementation: Implementation, receipts: Iterable[Receipt] | None = None) -> str | None:
    """Why an implementation is unverified; None when it is verified.

    ``receipts`` (default: :func:`known`) decide if any of them proves today's code; else the
    implementation's own ``unverified``.
    """
    if receipts is None:
        of_name = _known_of(implementation.name)
    else:
        of_name = [r for r in receipts if r.implementation == implementation.name]
    valid = valid_for(implementation, of_name) if of_name else []
    if any(not r.findings for r in valid):
        return None
    for receipt in valid:
        return f"{receipt.findings} on {receipt.gpu}"
    return implementation.unverified


def faults(implementation: Implementation, receipts: Iterable[Receipt]) -> list[str]:
    """Why an implementation's receipts prove nothing; empty if one holds or none is required.

    Findings of the sanitizer are no fault here: they make the implementation unverified.
    """
    if implementation.unverified:
        return []
    of_name = [r for r in receipts if r.implementation == implementation.name]
    if not of_name:
        return [f"{implementation.name} has no receipt: run it on a GPU (kernelcat check)"]
    if not valid_for(implementation, of_name):
        return [f"{implementation.name} changed since its receipt: run it on a GPU again"]
    return []
