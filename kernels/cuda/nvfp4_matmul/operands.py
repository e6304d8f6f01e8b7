"""What the variants share: pointers, template arguments, and what a weight costs to decode."""

from __future__ import annotations

from kernelcat.catalog.implementation import Int32, Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.nvfp4_matmul import FP4, FP8, OUT

WEIGHTS = tuple(map(Pointer, ("w", "w_scale")))
EPILOGUE = tuple(map(Pointer, ("global_scale", "a_scale", "bias", "d")))


def sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


def cpp(flag: bool) -> str:
    """A boolean as a template argument."""
    return "true" if flag else "false"


def types(problem: Problem) -> tuple[str, str]:
    """Element types of A and D in C++."""
    return f"kernelcat::{problem['dtype']}", f"kernelcat::{OUT.where(problem.values)}"


def is_nvfp4(problem: Problem) -> str:
    return cpp(problem["format"] == "nvfp4")


def activation(problem: Problem) -> str:
    return f"kernelcat::Activation::k{problem['activation'].capitalize()}"


def is_empty(problem: Problem) -> bool:
    return bool(problem["M"] == 0 or problem["N"] == 0)


def row_tiles(problem: Problem) -> int:
    return -(-int(problem["N"]) // TILE_ROWS)


def k_tiles(problem: Problem) -> int:
    return -(-int(problem["K"]) // TILE_COLS)


def why_not_coded(problem: Problem) -> str | None:
    """Why A is not multiplied, or None: no kernel here reads codes of it and their block scales."""
    if problem["dtype"] == FP4:
        return "A in 4 bits is not decoded here: it is for tensor cores that take it"
    return None


def why_not_tiles(problem: Problem) -> str | None:
    """Why operands are not what tensor cores take, weights from registers, or None."""
    if why := why_not_coded(problem):
        return why
    if problem["packing"] != "tiles":
        return "weights in rows are not in the order of registers: kernelcat.fp4.prepack makes it"
    if problem["format"] == "mxfp4" and problem["dtype"] == "float16":
        return "scales of mxfp4 leave float16's range"
    if problem["K"] == 0:
        return "there is nothing to multiply for K=0"
    return None


def math_dtype(problem: Problem) -> str:
    """What is multiplied: float8 becomes bfloat16."""
    return "bfloat16" if problem["dtype"] == FP8 else str(problem["dtype"])
