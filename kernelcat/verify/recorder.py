"""Which cases the records of machine code lack.

A record starts from a receipt, or on a GPU without one from a measurement. Its cases are those that
the receipt checked and those that were measured under the same digest. A record can only be made
before the sources change, because the cases are built from the sources.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kernelcat.catalog import discovery
from kernelcat.catalog.digest import digest_of
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import gpu
from kernelcat.runtime.environment import COMPILERS
from kernelcat.store.measurement import Measurement
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


@dataclass(frozen=True)
class _Run:
    """Code that ran on a GPU, as a receipt or a measurement shows.

    Attributes
    ----------
    implementation, gpu, source : as in :class:`kernelcat.verify.receipts.Receipt`
    compilers : compiler -> version
    problems : names of the problems that a receipt proves
    """

    implementation: str
    gpu: str
    source: str
    compilers: Mapping[str, str]
    problems: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """The key of its record."""
        return self.gpu, self.implementation


def missing(
    receipts: Iterable[Receipt], results: Iterable[Result], records: Iterable[Record]
) -> list[tuple[Record, list[Case]]]:
    """Each record that has to be completed, with the cases to build for it.

    These are cases that were checked or measured and are not in the record yet. If the code ran
    after the record was made, every case is built again, so that old measurements can be compared.
    """
    measured: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        name = f"{result.entry}/{result.language}/{result.variant}"
        measured[result.gpu, name].append(result)
    by_key = {record.key: record for record in records}
    incomplete: dict[tuple[str, ...], tuple[Record, list[Case]]] = {}
    for run in _runs(receipts, measured):
        if run.key in incomplete:
            continue
        now = digest_of(*run.implementation.split("/"))
        record, rows = by_key.get(run.key), measured[run.gpu, run.implementation]
        if record is not None and now in record.digests:
            found = _measured(rows, record)
            cases = [case for case in found if record.code(case) is None]
        elif run.source == now:
            record = _newer(run, record)
            known = (case for case, _ in record.codes())
            cases = [*_checked(run), *known, *_measured(rows, record)]
        else:
            continue  # the code that ran cannot be built any more
        if cases:
            incomplete[run.key] = record, list(dict.fromkeys(cases))
    return list(incomplete.values())


def _runs(
    receipts: Iterable[Receipt], measured: Mapping[tuple[str, str], Sequence[Result]]
) -> Iterator[_Run]:
    """What ran: the receipts, and where there is none for its source the newest measurement."""
    proven = set()
    for receipt in receipts:
        proven.add((*receipt.key, receipt.source))
        compilers = receipt.environment["compilers"]
        yield _Run(receipt.implementation, receipt.gpu, receipt.source, compilers, receipt.problems)
    for (sku, name), results in measured.items():
        timed = [r for r in results if isinstance(r, Measurement) and r.kind == "measured"]
        newest = max(timed, key=lambda row: row.created_at, default=None)
        if newest is not None and (sku, name, newest.source) not in proven:
            yield _Run(name, sku, newest.source, newest.environment["compilers"])


def _newer(run: _Run, known: Record | None) -> Record:
    """The record that ``run`` begins: ``known`` with one more digest, if the compilers are the
    same ones, so that codes can be compared."""
    compiler = COMPILERS[run.implementation.split("/")[1]]
    versions = {compiler: run.compilers[compiler]}
    if known is None or known.toolchain != versions:
        known = Record(run.implementation, run.gpu, versions, {}, "", ())
    digests = {run.source: RAN, **known.digests}
    return replace(known, digests=digests, checked=run.source)


def _checked(run: _Run) -> Iterator[Case]:
    """The cases that a receipt proves: default configurations of its problems."""
    implementation = discovery.implementation(*run.implementation.split("/"))
    entry, target = discovery.entry(implementation.entry), gpu.find(run.gpu)
    for problem in (entry.problems[n] for n in run.problems if n in entry.problems):
        yield Case(problem, implementation.default(problem, target))


def _measured(results: Sequence[Result], record: Record) -> Iterator[Case]:
    """The cases that were measured under one of the digests of ``record``."""
    for result in results:
        if result.source in record.digests:
            problem = Problem.of(result.entry, **result.problem)
            yield Case(problem, Config(result.config))
