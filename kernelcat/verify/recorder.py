"""What belongs into the records of machine code and is not there yet.

A record begins with a receipt: its code is that of what the receipt checked, and of everything that
was measured under the same digest. It can only be made while the sources are still those that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kernelcat.catalog import discovery
from kernelcat.catalog.digest import digest_of
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import gpu
from kernelcat.runtime.environment import COMPILERS
from kernelcat.verify.code_record import RAN, Case, Record
from kernelcat.verify.receipts import Receipt


class Result(Protocol):
    """Something measured of an implementation: a row of the database, or a profile."""

    @property
    def entry(self) -> str: ...

    @property
    def language(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def gpu(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def problem(self) -> Mapping[str, Any]: ...

    @property
    def config(self) -> Mapping[str, Any]: ...


def missing(
    receipts: Iterable[Receipt], results: Iterable[Result], records: Iterable[Record]
) -> list[tuple[Record, list[Case]]]:
    """Each record that lacks cases, with those; one that lacks all is new."""
    measured: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        measured[f"{result.entry}/{result.language}/{result.variant}"].append(result)
    known = {record.key: record for record in records}
    found = []
    for receipt in receipts:
        record = _record_of(receipt, known.get(receipt.key))
        if record is not None:
            cases = _cases(receipt, measured[receipt.implementation], record)
            lacking = [case for case in dict.fromkeys(cases) if record.code(case) is None]
            if lacking:
                found.append((record, lacking))
    return found


def _record_of(receipt: Receipt, known: Record | None) -> Record | None:
    """The record of the code that runs today, new where a receipt is; None of code long gone."""
    now = digest_of(*receipt.implementation.split("/"))
    if known is not None and now in known.digests:
        return known
    if receipt.source != now:
        return None
    compiler = COMPILERS[receipt.implementation.split("/")[1]]
    versions = {compiler: receipt.environment["compilers"][compiler]}
    return Record(receipt.implementation, receipt.gpu, versions, {now: RAN}, now, ())


def _cases(receipt: Receipt, results: Sequence[Result], record: Record) -> Iterator[Case]:
    if receipt.source in record.digests and not record.cases:
        implementation = discovery.implementation(*receipt.implementation.split("/"))
        entry, where = discovery.entry(implementation.entry), gpu.find(receipt.gpu)
        for problem in (entry.problems[n] for n in receipt.problems if n in entry.problems):
            yield Case(problem, implementation.default(problem, where))
    for result in results:
        if result.gpu == receipt.gpu and result.source in record.digests:
            problem = Problem.of(result.entry, **result.problem)
            yield Case(problem, Config(result.config))
