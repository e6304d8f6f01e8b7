"""Compilation of many problems at once: what calls would choose, by all cores, into the cache."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from kernelcat import catalog, store
from kernelcat.call.choice import Decision, Pin, choose
from kernelcat.call.locking import ruling
from kernelcat.catalog.implementation import Source
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError
from kernelcat.jit.cache import find
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.backend import CUDA
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
    known, seen = store.snapshot(), set[Source]()
    todo, num_missing = list[tuple[Problem, Decision]](), 0
    for problem in problems:
        entry = catalog.entry(problem.entry)
        rows, refuted = known.choices(entry.name), known.refuted(entry.name)
        with suppress(KernelcatError):
            says = ruling(problem, gpu, Pin())
            chosen = choose(entry, problem, gpu, rows, refuted=refuted, ruling=says)
            steps = chosen.implementation.program(problem, chosen.config, gpu).steps
            new = {step.source for step in steps} - seen
            seen |= new
            missing = [source for source in new if find(source, gpu.arch) is None]
            num_missing += len(missing)
            if missing:
                todo.append((problem, chosen))
    count = min(processes or default_processes(1), len(todo))
    if not count:
        return 0
    with ThreadPoolExecutor(count) as threads, closing(CompilePool(CUDA, gpu, count)) as pool:

        def build(problem: Problem, chosen: Decision) -> None:
            candidate = Candidate.of(chosen.implementation, chosen.config)
            for _ in pool.build(problem, [candidate]):
                pass

        list(threads.map(build, *zip(*todo, strict=True)))
    return num_missing
