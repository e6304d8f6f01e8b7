"""What the host sides of `gemm`'s kernels share: parameters, programs, what TMA asks for."""

from __future__ import annotations

from collections.abc import Callable

from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.runtime.gpu import Gpu

TENSORS = ("a", "b", "bias", "residual", "d")
EPILOGUE = ("bias", "activation", "residual")


def source(kernel: str, problem: Problem, ints: int, **constants: int | bool) -> CuteSource:
    """``ints`` is how many int32 follow the tensors."""
    params = ("*" + problem["dtype"],) * len(TENSORS) + ("int32",) * ints
    axes = {name: problem[name] for name in ("dtype", *EPILOGUE)}
    return CuteSource(f"gemm.{kernel}", params, tuple({**axes, **constants}.items()))


def params(problem: Problem, *extra: int) -> tuple[Param, ...]:
    """The tensors, M, N, K and what else a kernel is told."""
    sizes = (problem["M"], problem["N"], problem["K"], *extra)
    return (*map(Pointer, TENSORS), *map(Int32, sizes))


def span(problem: Problem) -> int:
    """Columns of A @ B^T that make one of D."""
    return 2 if problem["activation"] == "swiglu" else 1


def is_empty(problem: Problem) -> bool:
    return problem["M"] == 0 or problem["N"] == 0


def why_not_tma(problem: Problem) -> str | None:
    n, k = problem["N"], problem["K"]
    unit = 8 * span(problem)
    if is_empty(problem):
        return "an empty matrix has no tiles"
    if k == 0 or k % 8 or n % unit:
        return (
            f"TMA needs whole 16-byte units: K={k} must be a multiple of 8 and not 0, "
            f"N={n} one of {unit}"
        )
    return None


def why_not_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """A ``reject`` for grids that have a row of blocks for 16 rows of D."""
    if problem["M"] > 65535 * 16:
        return "M is beyond the grid's 65535 blocks of 16 rows"
    return None


def persistent(
    kernel: CuteSource, problem: Problem, num_ctas: int, *, block: int, cluster: int
) -> Program:
    """CTAs that walk over tiles, ``cluster`` of them together, and are told how many they are."""
    grid, shape = (num_ctas, 1, 1), (cluster, 1, 1)
    step = Step(kernel, grid, params(problem, num_ctas), block=block, cluster=shape)
    return Program((step,))


def fastest(find: Callable[[], Implementation]) -> Callable[[Problem, Gpu], Config]:
    """A ``default``: the configuration that the analytic model of ``find()`` ranks first."""

    def default(problem: Problem, gpu: Gpu) -> Config:
        found = find()
        first = Config({name: values[0] for name, values in found.space.items()})
        configs = found.configs(problem, gpu)
        # None serves: the caller learns why from `why_not`.
        return min(configs, key=lambda c: found.estimate(problem, c, gpu), default=first)

    return default
