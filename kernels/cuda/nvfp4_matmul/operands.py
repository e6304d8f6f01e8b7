"""What the variants of `nvfp4_matmul` share: pointers, template arguments, what they cannot do."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.nvfp4_matmul import FP4, FP8, OUT

WEIGHTS = tuple(map(Pointer, ("w", "w_scale")))
EPILOGUE = tuple(map(Pointer, ("global_scale", "a_scale", "bias", "d")))


def out_type(problem: Problem) -> str:
    """D's element type, as a template argument."""
    return str(OUT.where(problem.values))


def is_nvfp4(problem: Problem) -> bool:
    return bool(problem["format"] == "nvfp4")


def activation(problem: Problem) -> str:
    """The template argument ``kActivation``."""
    return f"Activation::k{problem['activation'].capitalize()}"


def is_empty(problem: Problem) -> bool:
    """Whether D has no elements."""
    return bool(problem["M"] == 0 or problem["N"] == 0)


def row_tiles(problem: Problem) -> int:
    """Tile rows of W."""
    return ceil(problem["N"] / TILE_ROWS)


def k_tiles(problem: Problem) -> int:
    """Tile columns of W."""
    return ceil(problem["K"] / TILE_COLS)


def why_not_decoded(problem: Problem) -> str | None:
    """Why no kernel here multiplies this A, or None."""
    if problem["dtype"] == FP4:
        return "A in 4 bits is not decoded here: it is for tensor cores that take it"
    return None


def why_not_tiles(problem: Problem) -> str | None:
    """Why tensor cores cannot multiply A by weights that are decoded in registers, or None."""
    if why := why_not_decoded(problem):
        return why
    if problem["packing"] != "tiles":
        return "weights in rows are not in the order of registers: kernelcat.fp4.prepack makes it"
    if problem["K"] == 0:
        return "there is nothing to multiply for K=0"
    return None


def math_dtype(problem: Problem) -> str:
    """The element type that is multiplied: float8 becomes bfloat16."""
    return "bfloat16" if problem["dtype"] == FP8 else str(problem["dtype"])
