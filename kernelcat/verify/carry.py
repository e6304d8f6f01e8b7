"""Receipts and measurements over a change of the source that leaves the machine code as it was.

Every case of an implementation's record is built from today's sources, on a CPU, by the compilers
that its receipt names. Where all launches and all machine code are the same, today's digest joins
the record, and receipts hold as before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from kernelcat.catalog.digest import digest_of
from kernelcat.errors import KernelcatError
from kernelcat.verify.code_record import Case, Record
from kernelcat.verify.toolchain import python_with

Cases = Sequence[Case]


@dataclass(frozen=True)
class Comparison:
    """One implementation's cases, built today, beside its record.

    Attributes
    ----------
    digest : today's
    compared : how many cases
    different : those whose launches or machine code are others, with what they are now
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
        lost = f"{len(self.different)} of {self.compared} cases differ"
        where = f"{dict(case.config)} for {case.problem}"
        return f"other  {name}: {lost}; the first, {where}: {self._how(case, code)}"

    def _how(self, case: Case, code: str) -> str:
        if code.startswith("!"):
            return code[1:]
        before = self.record.code(case)
        assert before is not None
        kinds = zip(("launches", "machine code"), before.split("."), code.split("."), strict=True)
        return f"other {' and '.join(kind for kind, then, now in kinds if then != now)}"

    def carried(self) -> Record:
        """The record with today's digest among those that run its code."""
        assert self.same
        today = f"carried {datetime.now(UTC):%Y-%m-%d}"
        return replace(self.record, digests={self.digest: today, **self.record.digests})

    def checked(self) -> Record:
        """The record after a full check that found every case the same."""
        assert self.same
        return replace(self.record, checked=self.digest)


def uncarried(records: Iterable[Record]) -> list[Record]:
    """The records of implementations that have another digest today."""
    return [record for record in records if _now(record) not in record.digests]


def unchecked(records: Iterable[Record]) -> list[Record]:
    """Those that were carried to today's digest since the last full check."""
    return [r for r in records if _now(r) in r.digests and r.checked != _now(r)]


def compare(records: Sequence[Record], jobs: int | None = None) -> Iterator[Comparison]:
    """Build every case of ``records`` anew, ``jobs`` implementations at a time; raises as `build`.

    In the order of ``records``.
    """
    wanted = [(record, [case for case, _ in record.codes()]) for record in records]
    for record, codes in build(wanted, jobs):
        known = dict(record.codes())
        different = {case: code for case, code in codes.items() if code != known[case]}
        yield Comparison(record, _now(record), len(codes), different)


def build(
    wanted: Sequence[tuple[Record, Cases]], jobs: int | None = None
) -> Iterator[tuple[Record, dict[Case, str]]]:
    """The codes of cases, built by the compilers that each record names.

    Raises
    ------
    MissingDependency
        The compilers that a record names cannot be installed.
    KernelcatError
        A building process ended before it answered.
    """
    one_at_a_time = Lock()

    def work(record: Record, cases: Cases) -> tuple[Record, dict[Case, str]]:
        with one_at_a_time:
            python = python_with(record.toolchain)
        return record, _build(python, record, cases)

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as threads:
        yield from threads.map(lambda pair: work(*pair), wanted)


def _build(python: Path, record: Record, cases: Cases) -> dict[Case, str]:
    asked = {
        "implementation": record.implementation,
        "gpu": record.gpu,
        "cases": [[case.problem.values, dict(case.config)] for case in cases],
    }
    done = subprocess.run(
        [str(python), "-m", "kernelcat.verify.machine_code"],
        input=json.dumps(asked) + "\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": _search_path(python)},
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise KernelcatError(f"{record.implementation}: building its cases failed: {said[-1]}")
    return dict(zip(cases, json.loads(done.stdout)["codes"], strict=True))


def _search_path(python: Path) -> str:
    """Where a building process finds this package, and what this process finds if it is one."""
    mine = os.environ.get("PYTHONPATH", "") if str(python) == sys.executable else ""
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), mine)))


def _now(record: Record) -> str:
    return digest_of(*record.implementation.split("/"))
