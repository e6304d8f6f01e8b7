"""Records of the machine code that implementations ran, kept beside receipts and measurements.

The digest of an implementation (:mod:`kernelcat.catalog.digest`) changes with every token, even
when a variable is renamed and the compiler makes identical machine code. A record therefore holds,
for each *case* (a problem in a configuration), a digest of the launch and a digest of the machine
code made by the compilers that the receipt or the measurement names. Two digests of an
implementation are equal if all cases have the same code: what was checked or measured under one
digest holds under the other. If only some cases have other code, a receipt no longer holds, and
neither do the measurements of these cases; measurements of the remaining cases do.

``tuning_db/machine_code/nvidia-SKU.jsonl`` has one line for every implementation with a receipt or
measurements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kernelcat.catalog import discovery
from kernelcat.catalog.digest import digest_of
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.errors import UnknownName
from kernelcat.store import ledger
from kernelcat.store.measurement import Measurement


class Case(NamedTuple):
    """A problem in a configuration."""

    problem: Problem
    config: Config

    @property
    def key(self) -> str:
        """8 hex digits over problem and configuration."""
        return hashlib.sha256(f"{self.problem.key}{self.config.key}".encode()).hexdigest()[:8]


RAN = "ran"
"""Value in :attr:`Record.digests` of a digest whose code ran on the GPU, as a receipt or a
measurement shows."""

DIFFERENT, NOT_COMPARED = "different", "not compared"
"""Values in :attr:`Record.exceptions`: the code of a case was other code, or was never compared."""


@dataclass(frozen=True)
class Record:
    """The machine code of one implementation on one GPU.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    gpu : SKU
    toolchain : compiler -> version, as the receipt's environment names them
    digests : digest -> how we know that it runs this code: ``ran``, or ``carried 2026-11-23``
    checked : the digest for which the last full check compiled every case
    configs : the configurations of all cases, without duplicates
    cases : name of a problem, or its JSON -> index into ``configs`` -> code
    exceptions : digest -> key of a case -> why ``cases`` does not hold for it under this digest
    """

    implementation: str
    gpu: str
    toolchain: Mapping[str, str]
    digests: Mapping[str, str]
    checked: str
    configs: tuple[Mapping[str, Any], ...]
    cases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    exceptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """GPU and implementation; a newer record replaces the one with the same key."""
        return self.gpu, self.implementation

    def to_json(self) -> str:
        values = {
            name: value for name, value in vars(self).items() if name != "exceptions" or value
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Record:
        values = json.loads(line)
        return Record(**{**values, "configs": tuple(values["configs"])})

    def codes(self) -> Iterator[tuple[Case, str]]:
        """Every case with its code."""
        entry = discovery.entry(self.implementation.partition("/")[0])
        for name, codes in self.cases.items():
            problem = entry.problems.get(name) or Problem.of(entry.name, **json.loads(name))
            for number, code in codes.items():
                yield Case(problem, Config(self.configs[int(number)])), code

    def code(self, case: Case) -> str | None:
        """The code of ``case``; None where it is not in the record."""
        entry = discovery.entry(self.implementation.partition("/")[0])
        codes = self.cases.get(entry.problem_name(case.problem) or case.problem.key, {})
        matches = (n for n in codes if Config(self.configs[int(n)]) == case.config)
        return next((codes[n] for n in matches), None)

    def with_cases(self, codes: Mapping[Case, str], digest: str) -> Record:
        """A record with the ``codes`` that were built from the sources of ``digest``.

        A known case gets its new code, or is dropped if it does not compile any more. Under the
        other digests, cases with new codes become exceptions.
        """
        entry = discovery.entry(self.implementation.partition("/")[0])
        reasons = {
            case.key: NOT_COMPARED if self.code(case) is None else DIFFERENT
            for case, code in codes.items()
            if code != self.code(case)
        }
        exceptions = {
            known: {**reasons, **self.exceptions.get(known, {})} if known != digest else {}
            for known in self.digests
        }
        all_codes = {**dict(self.codes()), **codes}
        all_codes = {case: code for case, code in all_codes.items() if not code.startswith("!")}
        configs = sorted({case.config for case in all_codes}, key=lambda config: config.key)
        numbers = {config: str(number) for number, config in enumerate(configs)}
        cases: dict[str, dict[str, str]] = {}
        for (problem, config), code in all_codes.items():
            name = entry.problem_name(problem) or problem.key
            cases.setdefault(name, {})[numbers[config]] = code
        return replace(
            self,
            configs=tuple(map(dict, configs)),
            cases=cases,
            exceptions={known: value for known, value in exceptions.items() if value},
        )

    def runs_same_code(self, then: str, now: str, case: Case | None) -> bool:
        """Whether two digests have the same code for ``case``; without a case, for all compared."""
        if not {then, now} <= self.digests.keys():
            return False
        exceptions = {**self.exceptions.get(then, {}), **self.exceptions.get(now, {})}
        if case is None:
            return DIFFERENT not in exceptions.values()
        return self.code(case) is not None and case.key not in exceptions


def shipped_folder() -> Path:
    """Folder of the records that come with the package."""
    return ledger.shipped_folder("machine_code")


def local_folder() -> Path:
    """Folder of this user's records: ``$KERNELCAT_MACHINE_CODE``, else the user's data folder."""
    return ledger.local_folder("machine_code")


def read(folder: Path) -> list[Record]:
    """Every record in a folder."""
    return ledger.read(folder, Record.from_json)


def write(folder: Path, records: Sequence[Record]) -> None:
    """Merge ``records`` into the folder's files; the last record of each key stays."""
    ledger.merge(folder, records, Record.from_json)


@cache
def find(implementation: str, gpu: str) -> Record | None:
    """The shipped record of an implementation on a GPU, else the user's own, else None.

    Only lines of this implementation are parsed.
    """
    pattern = f'"implementation":"{implementation}"'
    folders = shipped_folder(), local_folder()
    records = (r for folder in folders for r in ledger.read(folder, Record.from_json, pattern))
    return next((record for record in records if record.gpu == gpu), None)


def are_equal(implementation: str, gpu: str, then: str, now: str, case: Case | None = None) -> bool:
    """Whether an implementation runs the same code on ``gpu`` under two of its digests.

    For a measurement, ``case`` is the case that was timed: the record must contain that case.
    """
    if then == now:
        return bool(now)
    record = find(implementation, gpu)
    try:
        return record is not None and record.runs_same_code(then, now, case)
    except UnknownName:
        return False


def is_current(row: Measurement) -> bool:
    """Whether a measurement timed the code that runs today; always true for a peer's."""
    name = f"{row.entry}/{row.language}/{row.variant}"
    case = Case(row.to_problem(), row.to_config())
    return row.is_peer or is_todays(name, row.gpu, row.source, case)


def is_todays(implementation: str, gpu: str, source: str, case: Case) -> bool:
    """Whether the code that ran ``case`` under the digest ``source`` is the code of today."""
    return are_equal(implementation, gpu, source, digest_of(*implementation.split("/")), case)
