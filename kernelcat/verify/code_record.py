"""Which machine code an implementation ran: a record beside its receipts and measurements.

A digest (:mod:`kernelcat.catalog.digest`) changes with every token, so also when a variable is
renamed and the compiler makes the very same code of it. The record knows more: for each *case*, a
problem in a configuration, what was launched and a digest of the machine code, made by the
compilers that the receipt names. Digests whose cases came out alike are equal: what was checked or
measured under one of them holds under the others.

``tuning_db/machine_code/nvidia-SKU.jsonl`` has one line for every implementation with a receipt.
"""

from __future__ import annotations

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


RAN = "ran"
"""How the digest is known whose code the record is of: it ran, and receipts tell."""


@dataclass(frozen=True)
class Record:
    """The machine code of one implementation on one GPU.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    toolchain : compiler -> version, as the receipt's environment names them
    digests : digest -> how it is known to run this code: ``ran``, or ``carried 2026-11-23``
    checked : the digest that the last full check compiled every case of
    configs : the configurations of all cases, each once
    cases : name of a problem, or its JSON -> number of a configuration -> code
    """

    implementation: str
    gpu: str
    toolchain: Mapping[str, str]
    digests: Mapping[str, str]
    checked: str
    configs: tuple[Mapping[str, Any], ...]
    cases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        return self.gpu, self.implementation

    def to_json(self) -> str:
        return json.dumps({**vars(self)}, sort_keys=True, separators=(",", ":"))

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
        known = (n for n in codes if Config(self.configs[int(n)]) == case.config)
        return next((codes[n] for n in known), None)

    def with_cases(self, codes: Mapping[Case, str]) -> Record:
        """The same with more cases, or other codes of known ones."""
        entry = discovery.entry(self.implementation.partition("/")[0])
        every = {**dict(self.codes()), **codes}
        configs = sorted({case.config for case in every}, key=lambda config: config.key)
        numbers = {config: str(number) for number, config in enumerate(configs)}
        cases: dict[str, dict[str, str]] = {}
        for (problem, config), code in every.items():
            name = entry.problem_name(problem) or problem.key
            cases.setdefault(name, {})[numbers[config]] = code
        return replace(self, configs=tuple(map(dict, configs)), cases=cases)


def shipped_folder() -> Path:
    """Where the records that come with the package lie."""
    return ledger.shipped_folder("machine_code")


def local_folder() -> Path:
    """Where this user's own lie: ``$KERNELCAT_MACHINE_CODE``, else the user's data folder."""
    return ledger.local_folder("machine_code")


def read(folder: Path) -> list[Record]:
    """Every record in a folder."""
    return [Record.from_json(line) for line in ledger.lines(folder)]


def write(folder: Path, records: Sequence[Record]) -> None:
    """Merge ``records`` into the folder's files, one for each implementation and GPU."""
    ledger.write(folder, [*read(folder), *records])


@cache
def find(implementation: str, gpu: str) -> Record | None:
    """The shipped record of an implementation, else the user's own; parses no other line."""
    wanted = f'"implementation":"{implementation}"'
    lines = (*ledger.lines(shipped_folder()), *ledger.lines(local_folder()))
    found = (Record.from_json(line) for line in lines if wanted in line)
    return next((record for record in found if record.gpu == gpu), None)


def are_equal(implementation: str, gpu: str, then: str, now: str, case: Case | None = None) -> bool:
    """Whether what had the digest ``then`` runs the same code on ``gpu`` under the digest ``now``.

    Of a measurement ``case`` is what was timed: it must have been compared itself.
    """
    if then == now:
        return bool(now)
    record = find(implementation, gpu)
    if record is None or not {then, now} <= record.digests.keys():
        return False
    try:
        return case is None or record.code(case) is not None
    except UnknownName:
        return False


def is_current(row: Measurement) -> bool:
    """Whether a measurement of ours is of the code that runs today; a peer's always is."""
    name = f"{row.entry}/{row.language}/{row.variant}"
    case = Case(row.to_problem(), row.to_config())
    return row.is_peer or is_todays(name, row.gpu, row.source, case)


def is_todays(implementation: str, gpu: str, source: str, case: Case) -> bool:
    """Whether what ran ``case`` under the digest ``source`` is the code that runs today."""
    return are_equal(implementation, gpu, source, digest_of(*implementation.split("/")), case)
