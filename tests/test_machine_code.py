"""The shipped records of machine code, against the sources as they are now."""

from __future__ import annotations

import random

import pytest
from campaign import share

from kernelcat import catalog
from kernelcat.catalog.digest import digest_of
from kernelcat.runtime import gpu
from kernelcat.verify import code_record
from kernelcat.verify.carry import build, unchecked
from kernelcat.verify.code_record import Case, Record
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


def some(record: Record) -> list[Case]:
    """Cases of ``record``: all in a campaign, else a few, and others after each change."""
    cases = [case for case, _ in record.codes()]
    return random.Random(digest_of(*record.implementation.split("/"))).sample(
        cases, share(len(cases))
    )


@pytest.mark.campaign
def test_what_was_carried_since_the_last_full_check_is_the_same_machine_code() -> None:
    """Builds nothing where ``kernelcat receipts verify`` ran on these sources."""
    requests = [(record, some(record)) for record in unchecked(RECORDS)]
    for record, codes in build(requests):
        assert codes == {case: record.code(case) for case in codes}, record.implementation
