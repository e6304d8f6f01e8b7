"""Which cases the records of machine code lack.

A record starts from a receipt. Its cases are those that the receipt checked and those that were
measured under the same digest. A record can only be made before the sources change, because the
cases are built from the sources.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    """Each record that has to be completed, with the cases to build for it.

    These are cases that were checked or measured and are not in the record yet. If the receipt is
    newer than the record, every case is built again, so that old measurements can be compared.
    """
    measured: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        measured[f"{result.entry}/{result.language}/{result.variant}"].append(result)
    by_key = {record.key: record for record in records}
    incomplete = []
    for receipt in receipts:
        now = digest_of(*receipt.implementation.split("/"))
        record, rows = by_key.get(receipt.key), measured[receipt.implementation]
        if record is not None and now in record.digests:
            found = _measured(receipt, rows, record)
            cases = [case for case in found if record.code(case) is None]
        elif receipt.source == now:
            record = _newer(receipt, record)
            known = (case for case, _ in record.codes())
            cases = [*_checked(receipt), *known, *_measured(receipt, rows, record)]
        else:
            continue  # the code that ran cannot be built any more
        if cases:
            incomplete.append((record, list(dict.fromkeys(cases))))
    return incomplete


def _newer(receipt: Receipt, known: Record | None) -> Record:
    """The record that ``receipt`` begins: ``known`` with one more digest, if the compilers are the
    same ones, so that codes can be compared."""
    compiler = COMPILERS[receipt.implementation.split("/")[1]]
    versions = {compiler: receipt.environment["compilers"][compiler]}
    if known is None or known.toolchain != versions:
        known = Record(receipt.implementation, receipt.gpu, versions, {}, "", ())
    digests = {receipt.source: RAN, **known.digests}
    return replace(known, digests=digests, checked=receipt.source)


def _checked(receipt: Receipt) -> Iterator[Case]:
    """The cases that ``receipt`` proves: default configurations of its problems."""
    implementation = discovery.implementation(*receipt.implementation.split("/"))
    entry, target = discovery.entry(implementation.entry), gpu.find(receipt.gpu)
    for problem in (entry.problems[n] for n in receipt.problems if n in entry.problems):
        yield Case(problem, implementation.default(problem, target))


def _measured(receipt: Receipt, results: Sequence[Result], record: Record) -> Iterator[Case]:
    """The cases that were measured under one of the digests of ``record``."""
    for result in results:
        if result.gpu == receipt.gpu and result.source in record.digests:
            problem = Problem.of(result.entry, **result.problem)
            yield Case(problem, Config(result.config))
