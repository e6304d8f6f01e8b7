"""Property-based checking: Hypothesis draws problems from an entry's axes, and configurations.

Sizes are drawn anywhere in an axis's range and, just as often, on and around multiples of the
powers of two that tiles are made of, where kernels go wrong. A failure is shrunk to a small one.

What is compiled in (choices and configuration) comes from a drawn hand of kernels, so that
thousands of sizes cost a few dozen compilations. Where a GPU would wait for them, several
processes compile ahead what the first examples need.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
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
"""Combinations of choices and configuration a run draws from."""
DEFAULTS = 4
"""One in so many of them is the implementation's default configuration."""
TILE_STEPS = (8, 16, 64, 128)
IDLE = 10
"""One in so many problems that have nothing to do is drawn all the same."""
AHEAD = 100
"""Examples whose kernels are compiled before the first one runs."""
MAX_JOBS = 8


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


@dataclass(frozen=True, eq=False)
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

    def config(self, implementation: Implementation, problem: Problem, gpu: Gpu) -> Config | None:
        """The first configuration that serves ``problem``, or None."""

        def serves(config: Config) -> bool:
            return implementation.why_not(config, problem, gpu) is None

        start = self.first or 0
        if self.first is not None and serves(self.space[start]):
            return self.space[start]
        default = implementation.default(problem, gpu)
        if not serves(default):
            return None  # nor does anything else: that is what a default is
        if self.first is None:
            return default
        return next(filter(serves, (*self.space[start:], *self.space[:start])), None)


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
    return drawn.map(lambda n: min(max(n, axis.low), high) // axis.step * axis.step)


def problems(
    entry: Entry, limit: int | None = None, choices: Mapping[str, AxisValue] | None = None
) -> st.SearchStrategy[Problem]:
    """Legal problems of an entry, with ``choices`` where they are given."""
    fixed = {name: st.just(value) for name, value in (choices or {}).items()}
    axes = {axis.name: values(axis, limit) for axis in entry.axes} | fixed
    drawn = st.fixed_dictionaries(axes).map(lambda chosen: Problem.of(entry.name, **chosen))
    return drawn.filter(lambda problem: entry.constraint(problem) is None)


def worthwhile(
    entry: Entry, limit: int | None = None, choices: Mapping[str, AxisValue] | None = None
) -> st.SearchStrategy[Problem]:
    """The same, few of which have nothing to do.

    Hypothesis likes sizes of zero, and one is enough for that.
    """

    def is_worth_it(problem: Problem) -> bool:
        return entry.bytes_moved(problem) > 0 or crc32(str(problem).encode()) % IDLE == 0

    return problems(entry, limit, choices).filter(is_worth_it)


def fuzz(
    implementation: Implementation,
    device: Device,
    examples: int,
    random_seed: int = 0,
    limit: int | None = None,
    kernels: int = KERNELS,
    jobs: int | None = None,
) -> FuzzResult:
    """Check ``examples`` random problems and configurations of one implementation.

    The same ``random_seed`` draws the same examples. They share about ``kernels`` combinations of
    choices and configuration. ``limit`` caps every size. For a CUDA device ``jobs`` processes (by
    default one a CPU, at most ``MAX_JOBS``) compile ahead.
    """
    entry, passed = catalog.entry(implementation.entry), 0
    space = tuple(implementation.whole_space())
    hand = [_Kernel.draw(entry, space, random_seed, i) for i in range(kernels)]
    of_hand = [st.tuples(st.just(k), worthwhile(entry, limit, k.choices)) for k in hand]
    examples_of = st.sampled_from(of_hand).flatmap(lambda of_kernel: of_kernel)

    @cache
    def config_of(kernel: _Kernel, problem: Problem) -> Config | None:
        return kernel.config(implementation, problem, device.gpu)

    def each(body: Callable[[Problem, Config, int], None], count: int, *phases: Phase) -> None:
        """Call ``body`` with each example that the implementation serves, and a seed for inputs."""

        @seed(random_seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
            phases=phases,
        )
        @given(example=examples_of, draw=st.integers(0, 99))
        def run(example: tuple[_Kernel, Problem], draw: int) -> None:
            kernel, problem = example
            config = config_of(kernel, problem)
            if config is None:
                reject()
            body(problem, config, draw)

        with suppress(Unsatisfiable):  # it serves none of them
            run()

    def judge(problem: Problem, config: Config, draw: int) -> None:
        nonlocal passed
        verdict = _attempt(implementation, problem, config, device, draw)
        if not verdict.passed:
            raise _Wrong(Failure(implementation.name, problem, config, verdict.detail))
        passed += 1

    if isinstance(device, CudaDevice):
        first: list[tuple[Problem, Config]] = []
        each(lambda problem, config, _: first.append((problem, config)),
             min(examples, AHEAD), Phase.generate)  # fmt: skip
        todo = list(_uncompiled(implementation, first, device.gpu))
        _compile(implementation, todo, device.gpu, jobs or min(os.cpu_count() or 1, MAX_JOBS))
    try:
        each(judge, examples, Phase.generate, Phase.shrink)
    except _Wrong as wrong:
        return FuzzResult(implementation.name, passed, wrong.failure)
    return FuzzResult(implementation.name, passed)


def _uncompiled(
    implementation: Implementation, examples: Iterable[tuple[Problem, Config]], gpu: Gpu
) -> Iterator[tuple[Problem, Config]]:
    """Examples that between them need every kernel which nobody has compiled yet."""
    known: set[Source] = set()
    for problem, config in examples:
        with suppress(KernelcatError):  # the example's own check will tell
            steps = implementation.program(problem, config, gpu).steps
            new = {step.source for step in steps} - known
            known |= new
            if any(find(source, gpu.arch) is None for source in new):
                yield problem, config


def _compile(
    implementation: Implementation, todo: list[tuple[Problem, Config]], gpu: Gpu, jobs: int
) -> None:
    """Fill the disk cache; what does not compile is told by the example that needs it."""
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
    implementation: Implementation, problem: Problem, config: Config, device: Device, draw: int
) -> Verdict:
    try:
        if isinstance(device, MirroredDevice):
            _announce(implementation, problem, config, device.gpu)
        return check(implementation, problem, config, device, seeds=(draw,))
    except KernelcatError as error:
        return Verdict(False, float("nan"), f"{type(error).__name__}: {error}")


def _announce(implementation: Implementation, problem: Problem, config: Config, gpu: Gpu) -> None:
    """Tell the sanitizer's reader what runs next, and which of its accesses are ordered."""
    if implementation.language == "triton":
        steps = implementation.program(problem, config, gpu).steps
        pairs = [text for step in steps for text in _ordered(build(step.source, gpu.arch))]
        print(ORDERED, *pairs, file=sys.stderr)
    words = f"{EXAMPLE}{Candidate.of(implementation, config)} on {problem}"
    print(words, file=sys.stderr, flush=True)


def _ordered(artifact: Artifact) -> Iterator[str]:
    for write, read in sorted(ordered(disassemble(artifact.cubin))):
        yield f"{artifact.kernel}+{write:#x}>{artifact.kernel}+{read:#x}"
