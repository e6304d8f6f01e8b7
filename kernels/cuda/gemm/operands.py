"""What the variants share: pointers, the epilogue's template arguments, and maps for TMA."""

from __future__ import annotations

from kernelcat.catalog.implementation import Int32, Pointer, TensorMap
from kernelcat.catalog.spec import Problem

BLOCK_K = 64
"""Columns of A and B a stage: 128 bytes, the widest row the hardware swizzles."""

EPILOGUE = tuple(map(Pointer, ("bias", "residual", "d")))


def sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


def cpp(flag: bool) -> str:
    """A boolean as a template argument."""
    return "true" if flag else "false"


def epilogue(problem: Problem) -> str:
    """The template arguments ``kActivation, kResidual``."""
    activation = problem["activation"].capitalize()
    return f"kernelcat::Activation::k{activation}, {cpp(problem['residual'])}"


def d_cols(problem: Problem) -> int:
    """Columns of D."""
    return int(problem["N"]) // (2 if problem["activation"] == "swiglu" else 1)


def operand_map(name: str, problem: Problem, rows: int, box_rows: int) -> TensorMap:
    """A (M, K) or B (N, K), in boxes of ``box_rows`` x ``BLOCK_K``.

    A miss brings 128 bytes into L2, a row of a box: 256 were measured to be slower, for what comes
    along is wanted only a stage later, or by nobody where rows do not begin at cache lines.
    """
    k = problem["K"]
    return TensorMap(
        name, problem["dtype"], (k, rows), (2 * k,), (BLOCK_K, box_rows), 128, l2_promotion=128
    )


def why_not_tma(problem: Problem) -> str | None:
    """Why no tensor map describes the operands, or None."""
    if problem["K"] == 0 or problem["K"] % 8:
        return f"TMA needs rows of 16, 32, 48 ... bytes, and K={problem['K']} is no multiple of 8"
    return None
