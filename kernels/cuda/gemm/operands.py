"""What the variants that load by TMA share: how A and B are described, and when they can be."""

from __future__ import annotations

from kernelcat.implementation import TensorMap
from kernelcat.spec import Problem

BLOCK_K = 64
"""Columns of A and B a stage: 128 bytes, the widest row the hardware swizzles."""


def operand_map(name: str, problem: Problem, rows: int, box_rows: int) -> TensorMap:
    """A (M, K) or B (N, K), in boxes of ``box_rows`` x ``BLOCK_K``."""
    k = problem["K"]
    return TensorMap(name, problem["dtype"], (k, rows), (2 * k,), (BLOCK_K, box_rows), 128)


def why_not_tma(problem: Problem) -> str | None:
    """Why no tensor map describes the operands, or None."""
    if problem["K"] == 0 or problem["K"] % 8:
        return f"TMA needs rows of 16, 32, 48 ... bytes, and K={problem['K']} is no multiple of 8"
    return None
