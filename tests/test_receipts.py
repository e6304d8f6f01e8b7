"""No kernel changes without having run on a real GPU."""

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
def test_every_implementation_was_checked_on_a_gpu_as_its_source_is_now(
    implementation: Implementation,
) -> None:
    assert receipts.faults(implementation, SHIPPED) == []
    if implementation.unverified is None:
        receipt = receipts.valid_for(implementation, SHIPPED)[0]
        assert receipt.problems and receipt.fuzz_examples >= 100
        assert {"memcheck", "racecheck"} <= set(receipt.sanitizer)


@pytest.mark.parametrize(
    "path", sorted(paths.data("tuning_db").glob("*.jsonl")), ids=lambda p: p.name
)
def test_shipped_results_are_of_the_sources_as_they_are_now(path: Path) -> None:
    stale = set()
    for row in read_all(path):
        if not row.is_peer:
            found = catalog.implementation(row.entry, row.language, row.variant)
            if not code_record.is_current(row):
                stale.add(found.name)
    assert not stale, f"tune again: {sorted(stale)}"


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
    good = a_receipt(implementation)
    assert receipts.faults(implementation, [good]) == []
    assert "no receipt" in receipts.faults(implementation, [])[0]
    assert "changed" in receipts.faults(implementation, [replace(good, source="0" * 16)])[0]


def test_what_the_sanitizer_found_makes_an_implementation_unverified() -> None:
    implementation = verified()
    good = a_receipt(implementation)
    doubtful = replace(good, sanitizer={"racecheck": 3, "memcheck": 0})
    assert receipts.faults(implementation, [doubtful]) == []
    assert receipts.doubt(implementation, [doubtful]) == "racecheck found 3 errors on h200"
    assert receipts.doubt(implementation, [doubtful, good]) is None
    assert receipts.doubt(implementation, [replace(doubtful, source="0" * 16)]) is None


def test_a_receipt_makes_verified_what_calls_itself_unverified() -> None:
    modest = replace(verified(), unverified="needs a Blackwell GPU")
    assert receipts.doubt(modest, []) == "needs a Blackwell GPU"
    assert receipts.doubt(modest, [a_receipt(modest)]) is None
    stale = replace(a_receipt(modest), source="0" * 16)
    assert receipts.doubt(modest, [stale]) == "needs a Blackwell GPU"


def test_unverified_implementations_owe_no_receipt() -> None:
    assert receipts.faults(replace(verified(), unverified="needs a Blackwell GPU"), []) == []


def test_writing_keeps_the_newest_receipt_of_each_implementation(tmp_path: Path) -> None:
    first = a_receipt(verified())
    other = replace(first, implementation="gemm/cuda/another")
    receipts.write(tmp_path, [first, other])
    receipts.write(tmp_path, [replace(first, fuzz_examples=500)])
    kept = {r.implementation: r for r in receipts.read(tmp_path)}
    assert len(kept) == 2 and kept[first.implementation].fuzz_examples == 500
