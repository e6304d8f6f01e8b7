"""A fixed sample of problems, configurations and GPUs: over it the launches of a kernel are told.

The sample depends on nothing but the specification and the space, so that neither a cost model nor
the tuning database changes it. Configurations are drawn from the whole space: what a program says
of one that cannot serve is as good a witness of the code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from kernelcat.catalog.axes import Axis, AxisValue
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime.gpu import SKUS, Gpu

NUM_CONFIGS = 4
"""Configurations drawn for each problem."""
NUM_DRAWN = 8
"""Problems drawn besides the named ones and their neighbours."""
FIRST_SKUS = ("h200", "b200")
"""The SKUs a launch is told for, where the implementation serves them; else the first it serves."""


def gpus(implementation: Implementation) -> list[Gpu]:
    """The SKUs over which the launches of ``implementation`` are told."""
    served = [gpu for gpu in SKUS.values() if implementation.serves(gpu.arch)]
    return [gpu for gpu in served if gpu.sku in FIRST_SKUS] or served[:1]


def problems(entry: Entry) -> list[Problem]:
    """The named problems, the first one with each other choice, and some drawn ones."""
    named = list(entry.problems.values())
    near = [_with(entry, named[0], axis, value)
            for axis in entry.axes for value in axis.values] if named else []  # fmt: skip
    drawn = [Problem.of(entry.name, **{a.name: _drawn(a, n) for a in entry.axes})
             for n in range(NUM_DRAWN)]  # fmt: skip
    found = dict.fromkeys((*named, *near, *drawn))
    return [problem for problem in found if entry.constraint(problem) is None]


def configs(implementation: Implementation, problem: Problem) -> list[Config]:
    """Configurations drawn for ``problem``, each once."""
    space = implementation.space
    return list(dict.fromkeys(
        Config({name: _pick(space[name], problem.key, number, place)
                for place, name in enumerate(space)})
        for number in range(NUM_CONFIGS)
    ))  # fmt: skip


def _with(entry: Entry, problem: Problem, axis: Axis, value: AxisValue) -> Problem:
    return Problem.of(entry.name, **{**problem.values, axis.name: value})


def _drawn(axis: Axis, number: int) -> AxisValue:
    if axis.values:
        value: AxisValue = _pick(axis.values, axis.name, number)
        return value
    size = axis.low + _number(axis.name, number) % (axis.high - axis.low + 1)
    return max(size // axis.step * axis.step, axis.low)


def _pick(values: Sequence[Any], *of: object) -> Any:
    return values[_number(*of) % len(values)]


def _number(*of: object) -> int:
    """A number that depends on ``of`` alone, in every Python."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "big")


def cases(implementation: Implementation, entry: Entry) -> Iterator[tuple[Problem, Config, Gpu]]:
    """Every problem with its configurations on every GPU of the sample."""
    for gpu in gpus(implementation):
        for problem in problems(entry):
            for config in configs(implementation, problem):
                yield problem, config, gpu
