"""What the variants of `moe_gemm` share: pointers, template arguments, sizes."""

from __future__ import annotations

from kernelcat.catalog.implementation import Int32, Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.reference._experts import DTYPES
from kernelcat.reference.moe_gemm import out_cols

GROUPS = tuple(map(Pointer, ("offsets", "order")))
SUM = tuple(map(Pointer, ("position", "gates", "residual", "d")))

FORMATS = {**dict.fromkeys(DTYPES, "SixteenBits"), "fp8": "Fp8", "mxfp4": "Mxfp4", "nvfp4": "Nvfp4"}
GATINGS = {"none": "None", "swiglu": "Swiglu", "swiglu_oai": "SwigluOai"}


def weight_format(problem: Problem) -> str:
    """The template argument ``kFormat``."""
    return f"WeightFormat::k{FORMATS[problem['format']]}"


def gating(problem: Problem) -> str:
    """The template argument ``kGating``."""
    return f"Gating::k{GATINGS[problem['activation']]}"


def sizes(problem: Problem) -> tuple[Int32, ...]:
    """The parameters tokens, top_k, experts, n, k."""
    return tuple(Int32(problem[axis]) for axis in ("tokens", "top_k", "experts", "N", "K"))


def num_rows(problem: Problem) -> int:
    """Rows that are grouped by expert, those of dropped assignments included."""
    return int(problem["tokens"] * problem["top_k"])


def d_cols(problem: Problem) -> int:
    """Columns of D."""
    return int(out_cols(problem.values))


def d_rows(problem: Problem) -> int:
    """Rows of D."""
    return int(problem["tokens"]) if problem["combine"] else num_rows(problem)


def is_empty(problem: Problem) -> bool:
    """Whether D has no elements."""
    return d_rows(problem) * d_cols(problem) == 0
