"""Receipts: every kernel in its current form has run on a real GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernelcat import catalog, paths
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Implementation
from kernelcat.store.lines import read_all
from kernelcat.verify import code_record, receipts

IMPLEMENTATIONS = [i for name in catalog.complete() for i in catalog.implementations(name)]
SHIPPED = receipts.read(receipts.shipped_folder())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_every_implementation_has_a_receipt_for_its_current_source(
    implementation: Implementation,
) -> None:
    assert receipts.faults(implementation, SHIPPED) == []
    if implementation.unverified is None:
        valid = receipts.valid_for(implementation, SHIPPED)
        assert any(
            receipt.problems
            and receipt.fuzz_examples >= 100
            and {"memcheck", "racecheck"} <= set(receipt.sanitizer)
            for receipt in valid
        )


@pytest.mark.parametrize(
    "path", sorted(paths.data("tuning_db").glob("*.jsonl")), ids=lambda p: p.name
)
def test_shipped_results_are_not_stale(path: Path) -> None:
    stale = set()
    for row in read_all(path):
        if not row.is_peer:
            implementation = catalog.implementation(row.entry, row.language, row.variant)
            if not code_record.is_current(row):
                stale.add(implementation.name)
    assert not stale, f"tune again: {sorted(stale)}"


@pytest.mark.parametrize(
    "path", sorted(paths.data("tuning_db").glob("*.jsonl")), ids=lambda p: p.name
)
def test_machine_code_of_shipped_results_is_recorded(path: Path) -> None:
    """Else they are stale as soon as a source changes, whether its machine code does or not."""
    missing = set()
    for row in read_all(path):
        if not row.is_peer and row.kind == "measured":
            name = f"{row.entry}/{row.language}/{row.variant}"
            record = code_record.find(name, row.gpu)
            case = code_record.Case(row.to_problem(), row.to_config())
            if record is None or record.code(case) is None:
                missing.add(name)
    assert not missing, f"run kernelcat receipts record: {sorted(missing)}"


def a_receipt(implementation: Implementation) -> receipts.Receipt:
    return receipts.Receipt(
        implementation=implementation.name,
        source=digest(implementation),
        gpu="h200",
        environment={},
        problems=("4096x4096x4096",),
        fuzz_examples=100,
        sanitizer={"memcheck": 0},
        created_at="2026-11-20T00:00:00+00:00",
    )


def verified() -> Implementation:
    return next(i for i in IMPLEMENTATIONS if i.unverified is None)


def test_a_changed_source_and_a_missing_receipt_are_faults() -> None:
    implementation = verified()
    receipt = a_receipt(implementation)
    assert receipts.faults(implementation, [receipt]) == []
    assert "no receipt" in receipts.faults(implementation, [])[0]
    assert "changed" in receipts.faults(implementation, [replace(receipt, source="0" * 16)])[0]


def test_findings_of_the_sanitizer_make_an_implementation_unverified() -> None:
    implementation = verified()
    receipt = a_receipt(implementation)
    doubtful = replace(receipt, sanitizer={"racecheck": 3, "memcheck": 0})
    assert receipts.faults(implementation, [doubtful]) == []
    assert receipts.doubt(implementation, [doubtful]) == "racecheck found 3 errors on h200"
    assert receipts.doubt(implementation, [doubtful, receipt]) is None
    assert receipts.doubt(implementation, [replace(doubtful, source="0" * 16)]) is None


def test_a_receipt_verifies_an_implementation_that_is_declared_unverified() -> None:
    declared_unverified = replace(verified(), unverified="needs a Blackwell GPU")
    assert receipts.doubt(declared_unverified, []) == "needs a Blackwell GPU"
    assert receipts.doubt(declared_unverified, [a_receipt(declared_unverified)]) is None
    stale = replace(a_receipt(declared_unverified), source="0" * 16)
    assert receipts.doubt(declared_unverified, [stale]) == "needs a Blackwell GPU"


def test_unverified_implementations_need_no_receipt() -> None:
    assert receipts.faults(replace(verified(), unverified="needs a Blackwell GPU"), []) == []


def test_writing_keeps_the_newest_receipt_of_each_implementation(tmp_path: Path) -> None:
    first = a_receipt(verified())
    other = replace(first, implementation="gemm/cuda/another")
    receipts.write(tmp_path, [first, other])
    receipts.write(tmp_path, [replace(first, fuzz_examples=500)])
    stored = {r.implementation: r for r in receipts.read(tmp_path)}
    assert len(stored) == 2 and stored[first.implementation].fuzz_examples == 500
