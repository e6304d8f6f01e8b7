"""Property-based checking: Hypothesis draws problems from an entry's axes, and configurations.

Sizes are drawn anywhere in an axis's range and, just as often, on and around multiples of the
powers of two that tiles are made of, where kernels go wrong. A failure is shrunk to a small one.

What is compiled in (choices and configuration) comes from a drawn hand of kernels, so that
thousands of sizes cost a few dozen compilations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from kernelcat import catalog
from kernelcat.check import Verdict, check
from kernelcat.device import Device
from kernelcat.errors import KernelcatError
from kernelcat.implementation import Config, Implementation
from kernelcat.spec import Axis, AxisValue, Entry, Problem

KERNELS = 16
"""Combinations of choices and configuration a run draws from."""
DEFAULTS = 4
"""One in so many of them is the implementation's default configuration."""
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


@dataclass(frozen=True)
class _Kernel:
    """Values of the choice axes, and where in the space the search for a configuration begins;
    None asks for the default."""

    choices: Mapping[str, AxisValue]
    space: tuple[Config, ...]
    first: int | None

    @staticmethod
    def draw(entry: Entry, space: tuple[Config, ...], seed: int, index: int) -> _Kernel:
        dice = random.Random(f"{seed} {index}")
        choices = {axis.name: dice.choice(axis.values) for axis in entry.axes if axis.values}
        return _Kernel(choices, space, dice.randrange(len(space)) if index % DEFAULTS else None)

    def config(
        self, implementation: Implementation, problem: Problem, device: Device
    ) -> Config | None:
        """The first configuration that serves ``problem``, or None."""
        gpu, start = device.gpu, self.first or 0
        rest = itertools.chain(self.space[start:], self.space[:start])
        if self.first is None:
            rest = itertools.chain([implementation.default(problem, gpu)], rest)
        legal = (c for c in rest if implementation.why_not(c, problem, gpu) is None)
        return next(legal, None)


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


def problems(
    entry: Entry, limit: int | None = None, choices: Mapping[str, AxisValue] | None = None
) -> st.SearchStrategy[Problem]:
    """Legal problems of an entry, with ``choices`` where they are given."""
    fixed = {name: st.just(value) for name, value in (choices or {}).items()}
    axes = {axis.name: values(axis, limit) for axis in entry.axes} | fixed
    drawn = st.fixed_dictionaries(axes).map(lambda chosen: Problem.of(entry.name, **chosen))
    return drawn.filter(lambda problem: entry.constraint(problem) is None)


def fuzz(
    implementation: Implementation,
    device: Device,
    examples: int,
    random_seed: int = 0,
    limit: int | None = None,
    kernels: int = KERNELS,
) -> FuzzResult:
    """Check ``examples`` random problems and configurations of one implementation.

    The same ``random_seed`` draws the same examples. They share about ``kernels`` combinations of
    choices and configuration. ``limit`` caps every size.
    """
    entry, passed = catalog.entry(implementation.entry), 0
    space = tuple(implementation.whole_space())
    hand = [_Kernel.draw(entry, space, random_seed, i) for i in range(kernels)]
    examples_of = st.sampled_from(hand).flatmap(
        lambda kernel: st.tuples(st.just(kernel), problems(entry, limit, kernel.choices))
    )

    @seed(random_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(example=examples_of, draw=st.integers(0, 99))
    def run(example: tuple[_Kernel, Problem], draw: int) -> None:
        nonlocal passed
        kernel, problem = example
        config = kernel.config(implementation, problem, device)
        if config is None:
            reject()
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


def _attempt(
    implementation: Implementation, problem: Problem, config: Config, device: Device, draw: int
) -> Verdict:
    try:
        return check(implementation, problem, config, device, seeds=(draw,))
    except KernelcatError as error:
        return Verdict(False, float("nan"), f"{type(error).__name__}: {error}")
