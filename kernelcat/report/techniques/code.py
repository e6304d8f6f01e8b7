"""Evidence in machine code: instructions of kernels, and attributes of their launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.digest import digest_of
from kernelcat.catalog.implementation import Implementation, Program, TensorMap
from kernelcat.errors import UnknownName
from kernelcat.report.techniques import measured
from kernelcat.report.techniques.evidence import COMPILED, GPU, PROVEN, Evidence, Link
from kernelcat.runtime import gpu
from kernelcat.verify import code_record, machine_code
from kernelcat.verify.code_record import Case, Record

_SHOWN = 3
"""Implementations that a line names; of more it gives the number."""


@dataclass(frozen=True)
class Instruction(Evidence):
    """An instruction in the machine code.

    Implementations claim instructions (:attr:`Implementation.techniques`), and `kernelcat inspect`
    and ``tests/test_compiles.py`` find them in code that is compiled anew. The code ran on a GPU if
    the committed record of machine code holds it.

    Attributes
    ----------
    pattern : prefix of the SASS opcode, in which ``*`` stands for any text
    names : implementations; default: all that claim the instruction. Named ones that do not claim
        the instruction are compiled by ``tests/test_techniques.py``
    """

    pattern: str
    names: tuple[str, ...] = ()

    @property
    def implementations(self) -> tuple[str, ...]:
        return self.names or tuple(each.name for each in _claiming(self.pattern))

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Names of implementations that have to be compiled to verify this."""
        claimed = {each.name for each in _claiming(self.pattern)}
        return tuple(name for name in self.names if name not in claimed)

    @property
    def level(self) -> str:
        return PROVEN if any(map(ran, self.implementations)) else COMPILED

    def faults(self) -> list[str]:
        if not self.implementations:
            return [f"no implementation claims {self.pattern}"]
        faults = []
        for name in self.names:
            try:
                if _needs_record(find(name)) and not ran(name):
                    faults.append(f"{name} has no record of machine code that runs today")
            except UnknownName as error:
                faults.append(str(error))
        return faults

    def text(self, link: Link) -> str:
        ran_names = [name for name in self.implementations if ran(name)]
        others = [name for name in self.implementations if name not in ran_names]
        parts = []
        if ran_names:
            parts.append(f"{_listed(ran_names, link)}, which ran on an {gpu.find(GPU).name}")
        if others:
            parts.append(f"{_listed(others, link)}, of which no record says that it ran")
        return f"instruction `{self.pattern}` in {'; and in '.join(parts)}"

    def data(self) -> dict[str, Any]:
        return super().data() | {
            "instruction": self.pattern,
            "implementations": {name: ran(name) for name in self.implementations},
        }


def _needs_record(implementation: Implementation) -> bool:
    """Whether a record must be there: the implementation is complete and meant to have run."""
    return not (implementation.unverified or catalog.entry(implementation.entry).work_in_progress)


def _listed(names: list[str], link: Link) -> str:
    shown = [link(f"`{name}`", entry_page(name)) for name in names[:_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def entry_page(name: str) -> str:
    """Path of the page of an entry or of an implementation's entry."""
    return f"docs/entries/{name.partition('/')[0]}.md"


def find(name: str) -> Implementation:
    """The implementation of that name; raises ``UnknownName`` and ``MissingDependency``."""
    entry, language, variant = name.split("/")
    return catalog.implementation(entry, language, variant)


@cache
def _claiming(pattern: str) -> tuple[Implementation, ...]:
    every = (each for name in catalog.names() for each in catalog.implementations(name))
    return tuple(
        each
        for each in every
        if any(fnmatchcase(claim, f"{pattern}*") for claim in each.techniques.values())
    )


@cache
def _records() -> dict[str, Record]:
    """Implementation -> its committed record of machine code on the GPU of the measurements."""
    folder = code_record.shipped_folder()
    return {each.implementation: each for each in code_record.read(folder) if each.gpu == GPU}


@cache
def ran(name: str) -> bool:
    """Whether the committed record says that today's machine code of an implementation ran."""
    record = _records().get(name)
    return record is not None and digest_of(*name.split("/")) in record.digests


@dataclass(frozen=True)
class Launch(Evidence):
    """An attribute of a launch, in the configuration that was measured for a problem.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    problem : name of the problem
    attribute : a key of :data:`ATTRIBUTES`
    """

    implementation: str
    problem: str
    attribute: str

    @property
    def implementations(self) -> tuple[str, ...]:
        return (self.implementation,)

    @property
    def level(self) -> str:
        return PROVEN if ran(self.implementation) else COMPILED

    def _case(self) -> Case:
        """The problem in its newest measured configuration, else in the default one."""
        each = find(self.implementation)
        problem = catalog.entry(each.entry).named(self.problem)
        row = measured.newest_row(each.entry, self.problem, f"{each.language}/{each.variant}")
        config = row.to_config() if row else each.default(problem, gpu.find(GPU))
        return Case(problem, config)

    def value(self) -> str:
        """What the launch has, in words; empty where it lacks the attribute."""
        case = self._case()
        each, target = find(self.implementation), gpu.find(GPU)
        program = each.program(case.problem, case.config, target)
        return ATTRIBUTES[self.attribute](program)

    def faults(self) -> list[str]:
        try:
            each, case = find(self.implementation), self._case()
        except UnknownName as error:
            return [str(error)]
        faults = [] if self.value() else [f"{self.implementation} has no {self.attribute}"]
        record = _records().get(self.implementation)
        code = record.code(case) if record else None
        if code is None:
            if _needs_record(each):
                faults.append(f"{self.implementation} {self.problem} is not recorded")
        elif code.partition(".")[0] != machine_code.launched(each, case, gpu.find(GPU)):
            faults.append(f"{self.implementation} {self.problem} launched something else")
        return faults

    def text(self, link: Link) -> str:
        name = link(f"`{self.implementation}`", entry_page(self.implementation))
        return f"launches of {name} for {self.problem} have {self.value()}"


def _maps(program: Program) -> Iterator[TensorMap]:
    for step in program.steps:
        yield from (param for param in step.params if isinstance(param, TensorMap))


def _programmatic(program: Program) -> str:
    count = sum(step.programmatic for step in program.steps)
    return f"programmatic dependent launch ({count} of {len(program.steps)})" if count else ""


def _cluster(program: Program) -> str:
    sizes = [step.cluster for step in program.steps if prod(step.cluster) > 1]
    return f"clusters of {'x'.join(map(str, sizes[0]))} thread blocks" if sizes else ""


def _swizzle(program: Program) -> str:
    count = sum(each.swizzle == 128 for each in _maps(program))
    return f"{count} tensor map{'s' * (count > 1)} with a swizzle of 128 bytes" if count else ""


def _promotion(program: Program) -> str:
    sizes = sorted({each.promoted_bytes for each in _maps(program)} - {0})
    return f"tensor maps that promote misses to {' and '.join(map(str, sizes))} bytes of L2" * (
        len(sizes) > 0
    )


def _persistent(program: Program) -> str:
    sms = gpu.find(GPU).sms
    grids = [prod(s.grid) for s in program.steps if sms // 2 <= prod(s.grid) <= sms]
    return f"a grid of {grids[0]} thread blocks on {sms} SMs" if grids else ""


def _shared(program: Program) -> str:
    most = max((step.shared_bytes for step in program.steps), default=0)
    return f"{most:,} bytes of dynamic shared memory a thread block" if most > 48 << 10 else ""


def _workspace(program: Program) -> str:
    total = sum(program.workspaces.values())
    return f"{total:,} bytes of workspace" if total else ""


def _few(program: Program) -> str:
    count = len(program.steps)
    return f"{count} kernel{'s' * (count > 1)} in all" if count else ""


ATTRIBUTES: dict[str, Callable[[Program], str]] = {
    "dependent launch": _programmatic,
    "cluster": _cluster,
    "swizzle": _swizzle,
    "L2 promotion": _promotion,
    "persistent grid": _persistent,
    "shared memory": _shared,
    "workspace": _workspace,
    "few launches": _few,
}
"""Attribute -> what a program has of it, in words; empty where the program lacks it."""
