"""What the host sides of `gemm`'s kernels share: sources, parameters, what TMA needs."""

from __future__ import annotations

from kernelcat.catalog.implementation import Int32, Param, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.common.matmul import is_empty, sizes, span

TENSORS = ("a", "b", "bias", "residual", "d")
EPILOGUE = ("bias", "activation", "residual")


def source(kernel: str, problem: Problem, num_ints: int, **constants: int | bool) -> CuteSource:
    """The kernel ``module:Class``, which takes ``num_ints`` int32 behind the tensors."""
    params = ("*" + problem["dtype"],) * len(TENSORS) + ("int32",) * num_ints
    axes = {name: problem[name] for name in ("dtype", *EPILOGUE)}
    return CuteSource(f"gemm.{kernel}", params, tuple({**axes, **constants}.items()))


def params(problem: Problem, *more: int) -> tuple[Param, ...]:
    """The tensors, M, N, K, and ``more`` int32."""
    return (*map(Pointer, TENSORS), *sizes(problem), *map(Int32, more))


def illegal_tma(problem: Problem) -> str | None:
    """Why TMA cannot read A and B, or D cannot be written in vectors."""
    n, k = problem["N"], problem["K"]
    unit = 8 * span(problem)
    if is_empty(problem):
        return "an empty matrix has no tiles"
    if k == 0 or k % 8 or n % unit:
        return (
            f"TMA needs whole 16-byte units: K={k} must be a multiple of 8 and not 0, "
            f"N={n} a multiple of {unit}"
        )
    return None


def persistent(
    kernel: CuteSource, problem: Problem, num_ctas: int, *, block: int, cluster: int
) -> Program:
    """``num_ctas`` thread blocks in clusters of ``cluster``; their number is the last parameter."""
    grid, shape = (num_ctas, 1, 1), (cluster, 1, 1)
    step = Step(kernel, grid, params(problem, num_ctas), block=block, cluster=shape)
    return Program((step,))
