"""A fixed sample of problems, configurations and GPUs, over which digests record the launches.

The sample depends only on the specification and the configuration space, so neither a cost model
nor the tuning database changes the sample. Configurations are drawn from the whole space: the
launches that a program builder makes for an illegal configuration characterize the code as well.
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
"""Problems drawn in addition to the named problems and the variations of the first one."""
FIRST_SKUS = ("h200", "b200")
"""SKUs of the sample; where an implementation serves neither, the sample has its first SKU."""


def gpus(implementation: Implementation) -> list[Gpu]:
    """The SKUs of the sample for ``implementation``."""
    served = [gpu for gpu in SKUS.values() if implementation.serves(gpu.arch)]
    return [gpu for gpu in served if gpu.sku in FIRST_SKUS] or served[:1]


def problems(entry: Entry) -> list[Problem]:
    """The named problems, variations of the first one in one choice each, and drawn problems."""
    named = list(entry.problems.values())
    variations = [_with_axis(entry, named[0], axis, value)
                  for axis in entry.axes for value in axis.values] if named else []  # fmt: skip
    drawn = [Problem.of(entry.name, **{a.name: _draw_value(a, n) for a in entry.axes})
             for n in range(NUM_DRAWN)]  # fmt: skip
    every = dict.fromkeys((*named, *variations, *drawn))
    return [problem for problem in every if entry.constraint(problem) is None]


def configs(implementation: Implementation, problem: Problem) -> list[Config]:
    """At most ``NUM_CONFIGS`` different configurations, drawn for ``problem``."""
    space = implementation.space
    return list(dict.fromkeys(
        Config({name: _pick(space[name], problem.key, draw, position)
                for position, name in enumerate(space)})
        for draw in range(NUM_CONFIGS)
    ))  # fmt: skip


def _with_axis(entry: Entry, problem: Problem, axis: Axis, value: AxisValue) -> Problem:
    return Problem.of(entry.name, **{**problem.values, axis.name: value})


def _draw_value(axis: Axis, draw: int) -> AxisValue:
    if axis.values:
        value: AxisValue = _pick(axis.values, axis.name, draw)
        return value
    size = axis.low + _hash(axis.name, draw) % (axis.high - axis.low + 1)
    return max(size // axis.step * axis.step, axis.low)


def _pick(values: Sequence[Any], *seed: object) -> Any:
    return values[_hash(*seed) % len(values)]


def _hash(*seed: object) -> int:
    """A 64-bit hash of ``seed``, the same in every process and every version of Python."""
    return int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:8], "big")


def cases(implementation: Implementation, entry: Entry) -> Iterator[tuple[Problem, Config, Gpu]]:
    """The whole sample: every problem with each of its configurations, on every GPU."""
    for gpu in gpus(implementation):
        for problem in problems(entry):
            for config in configs(implementation, problem):
                yield problem, config, gpu
