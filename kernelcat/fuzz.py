"""Property-based checking: Hypothesis draws problems from an entry's axes, and configurations.

Sizes are drawn anywhere in an axis's range and, just as often, on and around multiples of the
powers of two that tiles are made of, where kernels go wrong. A failure is shrunk to a small one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from kernelcat import catalog
from kernelcat.check import Verdict, check
from kernelcat.device import Device
from kernelcat.errors import KernelcatError
from kernelcat.implementation import Config, Implementation
from kernelcat.spec import Axis, Entry, Problem

MAX_CONFIGS = 64
TILE_STEPS = (8, 16, 64, 128)


@dataclass(frozen=True)
class Failure:
    """The smallest example found on which an implementation was wrong or failed."""

    implementation: str
    problem: Problem
    config: Config
    detail: str

    def __str__(self) -> str:
        return f"{self.implementation} {self.problem} {self.config}: {self.detail}"


@dataclass(frozen=True)
class FuzzResult:
    """How many examples one implementation passed, and the failure if there was one."""

    implementation: str
    examples: int
    failure: Failure | None = None


class _Wrong(AssertionError):
    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def values(axis: Axis, limit: int | None = None) -> st.SearchStrategy:
    """Values of one axis; ``limit`` caps sizes (the interpreter is slow)."""
    if axis.values:
        return st.sampled_from(axis.values)
    high = axis.high if limit is None else min(axis.high, max(axis.low, limit))

    def near(step: int) -> st.SearchStrategy[int]:
        multiples = st.integers(axis.low // step, high // step).map(lambda n: n * step)
        return st.one_of(multiples, multiples.map(lambda n: n + 1), multiples.map(lambda n: n - 1))

    steps = [near(step) for step in TILE_STEPS if step <= high]
    drawn = st.one_of(st.integers(axis.low, high), *steps)
    return drawn.map(lambda n: min(max(n, axis.low), high))


def problems(entry: Entry, limit: int | None = None) -> st.SearchStrategy[Problem]:
    """Legal problems of an entry."""
    axes = {axis.name: values(axis, limit) for axis in entry.axes}
    drawn = st.fixed_dictionaries(axes).map(lambda chosen: Problem.of(entry.name, **chosen))
    return drawn.filter(lambda problem: entry.constraint(problem) is None)


def fuzz(
    implementation: Implementation,
    device: Device,
    examples: int,
    random_seed: int = 0,
    limit: int | None = None,
    configs: int = MAX_CONFIGS,
) -> FuzzResult:
    """Check ``examples`` random problems and configurations of one implementation.

    The same ``random_seed`` draws the same examples. At most the first ``configs`` legal
    configurations of a problem are drawn from, after its default. ``limit`` caps every size.
    """
    entry, passed = catalog.entry(implementation.entry), 0

    @seed(random_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(problem=problems(entry, limit), pick=st.integers(0, configs), draw=st.integers(0, 99))
    def run(problem: Problem, pick: int, draw: int) -> None:
        nonlocal passed
        assume(implementation.serves(device.gpu.arch))
        legal = _legal(implementation, problem, device, configs)
        assume(legal)
        config = legal[pick % len(legal)]
        verdict = _attempt(implementation, problem, config, device, draw)
        if not verdict.passed:
            raise _Wrong(Failure(implementation.name, problem, config, verdict.detail))
        passed += 1

    try:
        run()
    except _Wrong as wrong:
        return FuzzResult(implementation.name, passed, wrong.failure)
    except Unsatisfiable:  # it serves none of them
        return FuzzResult(implementation.name, passed)
    return FuzzResult(implementation.name, passed)


def _legal(
    implementation: Implementation, problem: Problem, device: Device, most: int
) -> Sequence[Config]:
    default = implementation.default(problem, device.gpu)
    first = [default] if implementation.why_not(default, problem, device.gpu) is None else []
    rest = implementation.configs(problem, device.gpu)
    return list(dict.fromkeys(itertools.chain(first, itertools.islice(rest, most))))


def _attempt(
    implementation: Implementation, problem: Problem, config: Config, device: Device, draw: int
) -> Verdict:
    try:
        return check(implementation, problem, config, device, seeds=(draw,))
    except KernelcatError as error:
        return Verdict(False, float("nan"), f"{type(error).__name__}: {error}")
