"""Compilation of many kernels at once, by all cores, into the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress

from kernelcat import catalog
from kernelcat.catalog.implementation import Source
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError
from kernelcat.jit.cache import find
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.backend import CUDA, Cuda
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.pool import CompilePool, default_processes


def compile_ahead(problems: Iterable[Problem], gpu: Gpu, processes: int | None = None) -> int:
    """Compiles what calls of ``problems`` on ``gpu`` choose; returns the number of new kernels.

    Kernels that are in the cache or in a prepared folder are not compiled again. What nothing
    serves, and what does not compile, is left to the call, which raises or takes another kernel.

    Parameters
    ----------
    processes : that compile; None for one for each core
    """
    backend, seen = Cuda(), set[Source]()
    todo, num_missing = list[tuple[Problem, Candidate]](), 0
    for problem in problems:
        with suppress(KernelcatError):
            chosen = backend.decide(catalog.entry(problem.entry), problem, gpu, {})
            steps = chosen.implementation.program(problem, chosen.config, gpu).steps
            new = {step.source for step in steps} - seen
            seen |= new
            missing = [source for source in new if find(source, gpu.arch) is None]
            num_missing += len(missing)
            if missing:
                todo.append((problem, Candidate.of(chosen.implementation, chosen.config)))
    compile_candidates(todo, gpu, processes)
    return num_missing


def compile_candidates(
    todo: Sequence[tuple[Problem, Candidate]], gpu: Gpu, processes: int | None = None
) -> None:
    """Compiles candidates for ``gpu`` into the cache; what does not compile is left out."""
    count = min(processes or default_processes(1), len(todo))
    if not count:
        return
    with closing(CompilePool(CUDA, gpu, count)) as pool:
        for _ in pool.build_each(todo):
            pass
