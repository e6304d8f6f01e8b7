"""Property-based checking: Hypothesis draws problems from an entry's axes, and configurations.

Sizes are drawn from an axis's whole range and, for each step in :data:`TILE_STEPS` as often, on
and next to multiples of that step: kernels fail most at the edges of tiles. Hypothesis shrinks a
failure to a small problem.

Values that are compiled into a kernel (choice axes and configuration) come from a few combinations
that are drawn first, so that thousands of sizes cost a few dozen compilations. On a GPU, several
processes compile the kernels of the first examples ahead.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from zlib import crc32

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation, Source
from kernelcat.catalog.spec import Axis, AxisValue, Entry, Problem
from kernelcat.errors import KernelcatError
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import build, find
from kernelcat.runtime.device import CudaDevice, Device, MirroredDevice
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.backend import CUDA
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.pool import CompilePool
from kernelcat.verify.gate import Verdict, check
from kernelcat.verify.inspect import disassemble
from kernelcat.verify.sanitizer import EXAMPLE, ORDERED
from kernelcat.verify.warp_roles import ordered

KERNELS = 16
"""Combinations of choice axes and configuration that a run draws from."""
DRAWN = 150
"""At most this many combinations are drawn for each one that is kept."""
TRIALS = 10
"""A combination is kept when at least one of this many random problems is served."""
DEFAULTS = 4
"""Every fourth combination has the implementation's default configuration."""
TILE_STEPS = (8, 16, 64, 128)
"""Sizes of tiles. Sizes of problems are drawn on and next to multiples of these."""
IDLE = 10
"""One in this many of the problems that move no bytes is kept."""
AHEAD = 100
"""Number of examples whose kernels are compiled before the first example runs."""
MAX_JOBS = 8
"""Most processes that compile ahead, by default."""


@dataclass(frozen=True)
class Failure:
    """The smallest known example for which an implementation failed or had a wrong result."""

    implementation: str
    problem: Problem
    config: Config
    detail: str

    def __str__(self) -> str:
        return f"{self.implementation} {self.problem} {self.config}: {self.detail}"


Judge = Callable[[Problem, Config, int], Verdict]
"""Checks an example; the last argument is the seed of its inputs."""


@dataclass(frozen=True)
class FuzzResult:
    """The number of examples that one implementation passed, and its failure or None."""

    implementation: str
    examples: int
    failure: Failure | None = None


@dataclass(frozen=True, eq=False)
class _Kernel:
    """Values of the choice axes, and how a configuration is chosen for a problem.

    Attributes
    ----------
    choices : choice axis -> value
    space : every configuration of the implementation
    first : index into ``space`` where the search for a configuration begins; None stands for the
        implementation's default configuration
    """

    choices: Mapping[str, AxisValue]
    space: tuple[Config, ...] = field(repr=False)
    first: int | None

    @staticmethod
    def draw(entry: Entry, space: tuple[Config, ...], seed: int, index: int) -> _Kernel:
        dice = random.Random(f"{seed} {index}")
        choices = {
            axis.name: dice.choice(axis.values + axis.extra) for axis in entry.axes if axis.values
        }
        return _Kernel(choices, space, dice.randrange(len(space)) if index % DEFAULTS else None)

    def problem(self, entry: Entry, dice: random.Random, limit: int | None) -> Problem:
        """A problem with the choices of this kernel and random sizes, which may be impossible."""
        sizes = {
            axis.name: dice.randrange(axis.low, _high(axis, limit) + 1) // axis.step * axis.step
            for axis in entry.axes
            if not axis.values
        }
        return Problem.of(entry.name, **self.choices, **sizes)

    def config(self, implementation: Implementation, problem: Problem, gpu: Gpu) -> Config | None:
        """The first configuration, from ``first`` on, that serves ``problem``; None without one."""

        def serves(config: Config) -> bool:
            return implementation.why_not(config, problem, gpu) is None

        start = self.first or 0
        if self.first is not None and serves(self.space[start]):
            return self.space[start]
        default = implementation.default(problem, gpu)
        if not serves(default):
            return None  # the default serves a problem if any configuration does
        if self.first is None:
            return default
        return next(filter(serves, (*self.space[start:], *self.space[:start])), None)


class _Wrong(AssertionError):
    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _high(axis: Axis, limit: int | None) -> int:
    """The largest size of an axis, where no size is larger than ``limit``."""
    return axis.high if limit is None else min(axis.high, max(axis.low, limit))


def values(axis: Axis, limit: int | None = None) -> st.SearchStrategy:
    """Values of one axis; ``limit`` is the largest size (Triton's interpreter is slow)."""
    if axis.values:
        return st.sampled_from(axis.values + axis.extra)
    high = _high(axis, limit)

    def near(step: int) -> st.SearchStrategy[int]:
        multiples = st.integers(axis.low // step, high // step).map(lambda n: n * step)
        return st.one_of(multiples, multiples.map(lambda n: n + 1), multiples.map(lambda n: n - 1))

    steps = [near(step) for step in TILE_STEPS if step <= high]
    drawn = st.one_of(st.integers(axis.low, high), *steps)
    return drawn.map(lambda n: min(max(n, axis.low), high) // axis.step * axis.step)


def problems(
    entry: Entry, limit: int | None = None, choices: Mapping[str, AxisValue] | None = None
) -> st.SearchStrategy[Problem]:
    """Problems that the entry's constraint allows; ``choices`` fixes the values of some axes."""
    fixed = {name: st.just(value) for name, value in (choices or {}).items()}
    axes = {axis.name: values(axis, limit) for axis in entry.axes} | fixed
    drawn = st.fixed_dictionaries(axes).map(lambda chosen: Problem.of(entry.name, **chosen))
    return drawn.filter(lambda problem: entry.constraint(problem) is None)


def worthwhile(
    entry: Entry, limit: int | None = None, choices: Mapping[str, AxisValue] | None = None
) -> st.SearchStrategy[Problem]:
    """:func:`problems` with only one in :data:`IDLE` of those that move no bytes.

    Hypothesis draws sizes of zero very often, and a few such problems are enough.
    """

    def is_worthwhile(problem: Problem) -> bool:
        return entry.bytes_moved(problem) > 0 or crc32(str(problem).encode()) % IDLE == 0

    return problems(entry, limit, choices).filter(is_worthwhile)


def fuzz(
    implementation: Implementation,
    device: Device,
    examples: int,
    random_seed: int = 0,
    limit: int | None = None,
    kernels: int = KERNELS,
    jobs: int | None = None,
    fixed: Mapping[str, AxisValue] | None = None,
    judge: Judge | None = None,
) -> FuzzResult:
    """Check ``examples`` random problems and configurations of one implementation.

    Parameters
    ----------
    random_seed : one seed always draws the same examples
    limit : largest size
    kernels : number of combinations of choice axes and configuration that the examples share
    jobs : processes that compile ahead for a CUDA device; default: one for each CPU, at most
        :data:`MAX_JOBS`
    fixed : choice axis -> its value in all examples
    judge : checks an example in place of the gate on ``device``; ``jobs`` compile ahead where given
    """
    entry, num_passed = catalog.entry(implementation.entry), 0
    drawn = _served_kernels(implementation, device.gpu, random_seed, kernels, limit, fixed)
    by_kernel = [st.tuples(st.just(k), worthwhile(entry, limit, k.choices)) for k in drawn]
    all_examples = st.sampled_from(by_kernel).flatmap(lambda strategy: strategy)

    @cache
    def config_of(kernel: _Kernel, problem: Problem) -> Config | None:
        return kernel.config(implementation, problem, device.gpu)

    def for_each(body: Callable[[Problem, Config, int], None], count: int, *phases: Phase) -> None:
        """Call ``body(problem, config, seed)`` with each example that the implementation serves.

        The seed is for the inputs.
        """

        @seed(random_seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
            phases=phases,
        )
        @given(example=all_examples, draw=st.integers(0, 99))
        def run(example: tuple[_Kernel, Problem], draw: int) -> None:
            kernel, problem = example
            config = config_of(kernel, problem)
            if config is None:
                reject()
            body(problem, config, draw)

        with suppress(Unsatisfiable):  # the implementation serves no example
            run()

    attempt = judge or partial(_attempt, implementation, device)

    def check_example(problem: Problem, config: Config, draw: int) -> None:
        nonlocal num_passed
        verdict = attempt(problem, config, draw)
        if not verdict.passed:
            raise _Wrong(Failure(implementation.name, problem, config, verdict.detail))
        num_passed += 1

    if isinstance(device, CudaDevice) if judge is None else jobs is not None:
        first: list[tuple[Problem, Config]] = []
        for_each(lambda problem, config, _: first.append((problem, config)),
                 min(examples, AHEAD), Phase.generate)  # fmt: skip
        todo = list(_uncompiled(implementation, first, device.gpu))
        _compile(implementation, todo, device.gpu, jobs or min(os.cpu_count() or 1, MAX_JOBS))
    try:
        for_each(check_example, examples, Phase.generate, Phase.shrink)
    except _Wrong as wrong:
        return FuzzResult(implementation.name, num_passed, wrong.failure)
    return FuzzResult(implementation.name, num_passed)


def _served_kernels(
    implementation: Implementation,
    gpu: Gpu,
    random_seed: int,
    count: int,
    limit: int | None,
    fixed: Mapping[str, AxisValue] | None = None,
) -> list[_Kernel]:
    """The first ``count`` combinations that serve a problem; where none does, those drawn first.

    Many combinations serve nothing: an implementation may take a few of many types and formats.
    """
    entry, space = catalog.entry(implementation.entry), tuple(implementation.whole_space())

    def draw(index: int) -> _Kernel:
        kernel = _Kernel.draw(entry, space, random_seed, index)
        return replace(kernel, choices={**kernel.choices, **fixed}) if fixed else kernel

    def serves(index: int) -> bool:
        dice, kernel = random.Random(f"{random_seed} {index} sizes"), draw(index)
        tried = (kernel.problem(entry, dice, limit) for _ in range(TRIALS))
        return any(
            entry.constraint(problem) is None
            and kernel.config(implementation, problem, gpu) is not None
            for problem in tried
        )

    served = list(itertools.islice(filter(serves, range(DRAWN * count)), count))
    return [draw(index) for index in served or range(count)]


def _uncompiled(
    implementation: Implementation, examples: Iterable[tuple[Problem, Config]], gpu: Gpu
) -> Iterator[tuple[Problem, Config]]:
    """Examples that together need every kernel that is not yet in the disk cache."""
    known: set[Source] = set()
    for problem, config in examples:
        with suppress(KernelcatError):  # checking the example reports the error
            steps = implementation.program(problem, config, gpu).steps
            new = {step.source for step in steps} - known
            known |= new
            if any(find(source, gpu.arch) is None for source in new):
                yield problem, config


def _compile(
    implementation: Implementation, todo: list[tuple[Problem, Config]], gpu: Gpu, jobs: int
) -> None:
    """Compile ``todo`` into the disk cache by ``jobs`` processes.

    Errors are dropped: checking the example that needs the kernel reports them.
    """
    jobs = min(jobs, len(todo))
    if jobs < 2:
        return
    with ThreadPoolExecutor(jobs) as threads, closing(CompilePool(CUDA, gpu, jobs)) as pool:

        def build(example: tuple[Problem, Config]) -> None:
            problem, config = example
            for _ in pool.build(problem, [Candidate.of(implementation, config)]):
                pass

        for _ in threads.map(build, todo):
            pass


def _attempt(
    implementation: Implementation, device: Device, problem: Problem, config: Config, draw: int
) -> Verdict:
    """The gate's verdict on one example, with ``draw`` as the seed; an error is a failure."""
    try:
        if isinstance(device, MirroredDevice):
            announce(implementation, problem, config, device.gpu)
        return check(implementation, problem, config, device, seeds=(draw,))
    except KernelcatError as error:
        return Verdict(False, float("nan"), f"{type(error).__name__}: {error}")


def announce(implementation: Implementation, problem: Problem, config: Config, gpu: Gpu) -> None:
    """Print the next example and its ordered accesses for :mod:`.sanitizer`, which reads them."""
    if implementation.language == "triton":
        steps = implementation.program(problem, config, gpu).steps
        pairs = [pair for step in steps for pair in _ordered_pairs(build(step.source, gpu.arch))]
        print(ORDERED, *pairs, file=sys.stderr)
    line = f"{EXAMPLE}{Candidate.of(implementation, config)} on {problem}"
    print(line, file=sys.stderr, flush=True)


def _ordered_pairs(artifact: Artifact) -> Iterator[str]:
    """Ordered writes and reads of a kernel as the sanitizer names them: ``gemm+0x40>gemm+0x90``."""
    for write, read in sorted(ordered(disassemble(artifact.cubin))):
        yield f"{artifact.kernel}+{write:#x}>{artifact.kernel}+{read:#x}"
