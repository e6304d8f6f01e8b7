"""What the kernels of `gemm` are launched with."""

from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.product import Tile


def d_cols(problem: Problem, cols: int) -> int:
    """Columns of D that come of ``cols`` columns of the product."""
    return cols // 2 if problem["activation"] == "swiglu" else cols


def can_store_by_tma(problem: Problem) -> bool:
    """Whether rows of D take a multiple of 16 bytes, as TMA needs."""
    return d_cols(problem, problem["N"]) % 8 == 0


def illegal_depth(problem: Problem) -> str | None:
    """Why TMA cannot load the operands."""
    k = problem["K"]
    if k == 0 or k % 8:
        return f"K={k} must be a positive multiple of 8: TMA needs rows of a multiple of 16 bytes"
    return None


def pointers(problem: Problem) -> dict[str, triton.Argument]:
    """The arguments with a pointer for every tensor."""
    dtype = problem["dtype"]
    return {name: triton.pointer(name, dtype) for name in ("a", "b", "bias", "residual", "d")}


def descriptors(problem: Problem, tile: Tile, store_cols: int) -> dict[str, triton.Argument]:
    """The arguments with TMA descriptors of a and b.

    Unless ``store_cols`` is 0, d and residual are TMA descriptors too, for tiles that are computed
    from ``store_cols`` columns of the product.
    """
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    arguments = pointers(problem) | {
        "a": triton.descriptor("a", dtype, (m, k), (tile.m, tile.k)),
        "b": triton.descriptor("b", dtype, (n, k), (tile.n, tile.k)),
    }
    if store_cols:
        shape, block = (m, d_cols(problem, n)), (tile.m, d_cols(problem, store_cols))
        arguments["d"] = triton.descriptor("d", dtype, shape, block)
        if problem["residual"]:
            arguments["residual"] = triton.descriptor("residual", dtype, shape, block)
    return arguments


def flags(problem: Problem) -> dict[str, bool | str]:
    """The epilogue as constants."""
    return {
        "HAS_BIAS": problem["bias"],
        "ACTIVATION": problem["activation"],
        "HAS_RESIDUAL": problem["residual"],
    }
