"""The shipped records of machine code, against the sources as they are now."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.runtime import gpu
from kernelcat.verify import code_record
from kernelcat.verify.carry import compare, unchecked
from kernelcat.verify.code_record import Record
from kernelcat.verify.machine_code import launched

RECORDS = code_record.read(code_record.shipped_folder())


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.implementation}-{r.gpu}")
def test_every_recorded_case_launches_what_it_launched(record: Record) -> None:
    implementation = catalog.implementation(*record.implementation.split("/"))
    where = gpu.find(record.gpu)
    codes = list(record.codes())
    assert codes
    for case, code in codes:
        assert launched(implementation, case, where) == code.partition(".")[0], case


def test_what_was_carried_since_the_last_full_check_is_the_same_machine_code() -> None:
    """Builds nothing where ``kernelcat receipts verify`` ran on these sources."""
    different = [str(found) for found in compare(unchecked(RECORDS)) if not found.same]
    assert not different
