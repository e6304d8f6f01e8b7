"""Carrying receipts and measurements over a change of the source that keeps the machine code.

Every case of an implementation's record is built from today's sources, on a CPU, by the compilers
that the implementation's receipt names. Where no launch and no machine code changed, today's digest
joins the record, and the receipts and measurements still hold.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from kernelcat.catalog.digest import digest_of
from kernelcat.errors import KernelcatError
from kernelcat.runtime import children
from kernelcat.verify.code_record import NOT_COMPARED, Case, Record
from kernelcat.verify.toolchain import python_with

Cases = Sequence[Case]


@dataclass(frozen=True)
class Comparison:
    """The cases of one implementation as they are built today, compared with their record.

    Attributes
    ----------
    record : the record before the comparison
    digest : the implementation's digest today
    compared : number of cases that were built
    different : case -> its code today, for each case whose launch or machine code changed
    """

    record: Record
    digest: str
    compared: int
    different: Mapping[Case, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return not self.different

    def __str__(self) -> str:
        name = self.record.implementation
        if self.same:
            return f"same   {name}: {self.compared} cases"
        case, code = next(iter(self.different.items()))
        count = f"{len(self.different)} of {self.compared} cases differ"
        where = f"{dict(case.config)} for {case.problem}"
        return f"other  {name}: {count}; the first, {where}: {self._difference(case, code)}"

    def _difference(self, case: Case, code: str) -> str:
        """What changed in ``case``: the launch, the machine code, or the compiler's error."""
        if code.startswith("!"):
            return code[1:]
        before = self.record.code(case)
        assert before is not None
        kinds = zip(("launches", "machine code"), before.split("."), code.split("."), strict=True)
        return f"other {' and '.join(kind for kind, then, now in kinds if then != now)}"

    def carried(self) -> Record:
        """The record with today's digest added to the digests that run the recorded code.

        No case is an exception under today's digest any more: all have just been compared.
        """
        assert self.same
        today = f"carried {datetime.now(UTC):%Y-%m-%d}"
        exceptions = {name: why for name, why in self.record.exceptions.items()
                      if name != self.digest}  # fmt: skip
        return replace(
            self.record,
            digests={self.digest: today, **self.record.digests},
            exceptions=exceptions,
        )

    def checked(self) -> Record:
        """The record, marked as checked in full with today's digest."""
        assert self.same
        return replace(self.record, checked=self.digest)


def uncarried(records: Iterable[Record]) -> list[Record]:
    """The records of which not all cases were compared with today's sources.

    They do not have their implementation's digest of today, or it is one of an earlier source, and
    cases joined the record since then.
    """

    def is_compared(record: Record) -> bool:
        today = _digest_today(record)
        exceptions = record.exceptions.get(today, {})
        return today in record.digests and NOT_COMPARED not in exceptions.values()

    return [record for record in records if not is_compared(record)]


def unchecked(records: Iterable[Record]) -> list[Record]:
    """The records that were carried to today's digest after their last full check."""
    carried = (record for record in records if _digest_today(record) in record.digests)
    return [record for record in carried if record.checked != _digest_today(record)]


def compare(records: Sequence[Record], jobs: int | None = None) -> Iterator[Comparison]:
    """Build every case of ``records`` and compare its code with the recorded code.

    Yields in the order of ``records``; ``jobs`` implementations are built at a time. Raises what
    :func:`build` raises.
    """
    requests = [(record, [case for case, _ in record.codes()]) for record in records]
    for record, codes in build(requests, jobs):
        recorded = dict(record.codes())
        different = {case: code for case, code in codes.items() if code != recorded[case]}
        yield Comparison(record, _digest_today(record), len(codes), different)


def build(
    requests: Sequence[tuple[Record, Cases]], jobs: int | None = None
) -> Iterator[tuple[Record, dict[Case, str]]]:
    """Build cases by the compilers that their record names.

    Yields each record with the code of each of its cases (:class:`machine_code.Code` as text, or
    ``"!"`` and the error), in the order of ``requests``; ``jobs`` records are built at a time
    (default: one for each CPU).

    Raises
    ------
    MissingDependency
        The compilers that a record names cannot be installed.
    KernelcatError
        A building process failed.
    """
    install_lock = Lock()

    def work(record: Record, cases: Cases) -> tuple[Record, dict[Case, str]]:
        with install_lock:
            python = python_with(record.toolchain)
        return record, _build(python, record, cases)

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as threads:
        yield from threads.map(lambda request: work(*request), requests)


def _build(python: Path, record: Record, cases: Cases) -> dict[Case, str]:
    request = {
        "implementation": record.implementation,
        "gpu": record.gpu,
        "cases": [[case.problem.values, dict(case.config)] for case in cases],
    }
    done = children.run(
        children.python("kernelcat.verify.machine_code", executable=python),
        input=json.dumps(request) + "\n",
        env={**os.environ, "PYTHONPATH": _search_path(python)},
    )
    if done.returncode:
        errors = done.stderr.strip().splitlines() or ["no error message"]
        raise KernelcatError(f"{record.implementation}: building its cases failed: {errors[-1]}")
    return dict(zip(cases, json.loads(done.stdout)["codes"], strict=True))


def _search_path(python: Path) -> str:
    """PYTHONPATH of a building process: this process's own.

    Another Python (an environment with other compilers) must not find this process's packages.
    """
    return os.environ.get("PYTHONPATH", "") if str(python) == sys.executable else ""


def _digest_today(record: Record) -> str:
    return digest_of(*record.implementation.split("/"))
