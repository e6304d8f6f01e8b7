"""The launch that adds up the rows of a token, weighted by gates."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Int32, Pointer, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource

THREADS, VECTOR = 128, 8
"""Threads of a thread block, and columns of a thread."""


def weighted_sum(problem: Problem, rows: str, out: str, row_dtype: str, cols: int) -> Step:
    """Sums of a token's rows, found by ``position``, times ``gates``, plus ``residual``.

    ``rows`` and ``out`` are names of tensors of ``cols`` columns. Rows are of ``row_dtype``, and
    their pitch is ``cols`` rounded up to a multiple of ``VECTOR``. ``problem`` has tokens, top_k,
    dtype and residual.
    """
    dtype, tokens = problem["dtype"], problem["tokens"]
    constants = {
        "dtype": dtype,
        "row_dtype": row_dtype,
        "residual": problem["residual"],
        "is_aligned": cols % VECTOR == 0,
    }
    element = f"*{dtype}"
    kinds = (f"*{row_dtype}", "*int32", "*float32", element, element, *["int32"] * 4)
    sizes = (tokens, problem["top_k"], cols, ceil(cols / VECTOR) * VECTOR)
    return Step(
        CuteSource("moe_gemm.combine:Combine", kinds, tuple(constants.items())),
        (tokens, ceil(cols / (VECTOR * THREADS)), 1),
        (*map(Pointer, (rows, "position", "gates", "residual", out)), *map(Int32, sizes)),
        block=THREADS,
        programmatic=True,
    )
