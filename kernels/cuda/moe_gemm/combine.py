"""The last launch of products that are summed into tokens."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Int32, Pointer, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.moe_gemm.operands import SUM, d_cols

VECTOR = 8
"""Columns of D that a thread computes; rows that are summed are padded to a multiple."""
FINISH_VECTOR = 4
"""Columns of D that a thread computes from sums of its token."""
THREADS = 128


def sum_step(problem: Problem, pitch: int) -> Step:
    """Weighted sums, in the order of slots, of the rows of workspace ``rows``.

    Rows are in the problem's dtype, ``pitch`` elements apart. They are rounded before they are
    summed: half the bytes of float32, and an error below that of the operands.
    """
    cols = d_cols(problem)
    return Step(
        instance("moe_gemm/combine.cu", "moe_gemm_combine", problem["dtype"]),
        (problem["tokens"], ceil(cols / (VECTOR * THREADS)), 1),
        (Pointer("rows"), *SUM, *map(Int32, (problem["top_k"], cols, pitch))),
        THREADS,
        programmatic=True,
    )


def finish_step(problem: Problem, pitch: int) -> Step:
    """D from workspace ``sums``: float32, ``pitch`` elements from one token to the next."""
    cols = d_cols(problem)
    return Step(
        instance("moe_gemm/finish.cu", "moe_gemm_finish", problem["dtype"]),
        (problem["tokens"], ceil(cols / (FINISH_VECTOR * THREADS)), 1),
        (*map(Pointer, ("sums", "residual", "d")), Int32(cols), Int32(pitch)),
        THREADS,
        programmatic=True,
    )
