"""Which cases the records of machine code lack.

A record starts from a receipt. Its cases are those that the receipt checked and those that were
measured under the same digest. A record can only be made before the sources change, because the
cases are built from the sources.
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
    """A measurement of an implementation: a row of the database, or a profile."""

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
    """Each record that lacks cases, with these cases; a record without any case is new."""
    measured: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        measured[f"{result.entry}/{result.language}/{result.variant}"].append(result)
    by_key = {record.key: record for record in records}
    incomplete = []
    for receipt in receipts:
        record = _record_of(receipt, by_key.get(receipt.key))
        if record is not None:
            cases = _cases(receipt, measured[receipt.implementation], record)
            unrecorded = [case for case in dict.fromkeys(cases) if record.code(case) is None]
            if unrecorded:
                incomplete.append((record, unrecorded))
    return incomplete


def _record_of(receipt: Receipt, known: Record | None) -> Record | None:
    """The record of today's code: ``known``, or a new one if the receipt is of today's sources.

    None if there is neither: the code that ran cannot be built any more.
    """
    now = digest_of(*receipt.implementation.split("/"))
    if known is not None and now in known.digests:
        return known
    if receipt.source != now:
        return None
    compiler = COMPILERS[receipt.implementation.split("/")[1]]
    versions = {compiler: receipt.environment["compilers"][compiler]}
    return Record(receipt.implementation, receipt.gpu, versions, {now: RAN}, now, ())


def _cases(receipt: Receipt, results: Sequence[Result], record: Record) -> Iterator[Case]:
    """The cases that belong into ``record``: default configurations of the receipt's problems (for
    a new record), and every result that was measured under one of the record's digests."""
    if receipt.source in record.digests and not record.cases:
        implementation = discovery.implementation(*receipt.implementation.split("/"))
        entry, target = discovery.entry(implementation.entry), gpu.find(receipt.gpu)
        for problem in (entry.problems[n] for n in receipt.problems if n in entry.problems):
            yield Case(problem, implementation.default(problem, target))
    for result in results:
        if result.gpu == receipt.gpu and result.source in record.digests:
            problem = Problem.of(result.entry, **result.problem)
            yield Case(problem, Config(result.config))
