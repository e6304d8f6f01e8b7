"""What the variants of `gemm` share: pointers, the epilogue's template arguments, maps for TMA."""

from __future__ import annotations

from kernelcat.catalog.implementation import Pointer, TensorMap
from kernelcat.catalog.spec import Problem

BLOCK_K = 64
"""Columns of A and B in a stage: 128 bytes, the widest row that the hardware swizzles."""

EPILOGUE = tuple(map(Pointer, ("bias", "residual", "d")))


def epilogue(problem: Problem) -> tuple[str, bool]:
    """The template arguments ``kActivation, kResidual``."""
    return f"Activation::k{problem['activation'].capitalize()}", problem["residual"]


def d_cols(problem: Problem) -> int:
    """Columns of D."""
    return int(problem["N"]) // (2 if problem["activation"] == "swiglu" else 1)


def operand_map(name: str, problem: Problem, rows: int, box_rows: int) -> TensorMap:
    """A (M, K) or B (N, K), in boxes of ``box_rows`` x ``BLOCK_K``.

    A miss brings 128 bytes into L2, one row of a box. 256 bytes were measured to be slower: the
    second half is needed only a stage later, or never where rows do not begin at cache lines.
    """
    k = problem["K"]
    return TensorMap(
        name, problem["dtype"], (k, rows), (2 * k,), (BLOCK_K, box_rows), 128, l2_promotion=128
    )


def d_map(problem: Problem, chunk: tuple[int, int]) -> TensorMap | None:
    """D (M, columns), in boxes of ``chunk`` rows x columns; None where no map describes D."""
    columns, (rows, cols) = d_cols(problem), chunk
    if columns % 8:
        return None
    shape, box = (columns, problem["M"]), (cols, rows)
    return TensorMap("d", problem["dtype"], shape, (2 * columns,), box, 2 * cols)


def why_not_tma(problem: Problem) -> str | None:
    """Why no tensor map describes the operands, or None."""
    k = problem["K"]
    if k == 0 or k % 8:
        return f"K={k} must be a positive multiple of 8: TMA needs rows of a multiple of 16 bytes"
    return None
