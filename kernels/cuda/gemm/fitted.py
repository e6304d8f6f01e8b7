"""`gemm` by wgmma on Hopper where tiles end outside of the product: no rows are loaded there.

TMA fills what a box has outside of its tensor with zeros, and takes more than twice the time of a
row for each such row: 136 x 2048 x 4096 in tiles of 64 x 64 takes 15.4 us on an H200, 192 x 2048 x
4096 takes 10.9. Here the last tiles have maps with boxes of their own height.
"""

from __future__ import annotations

from functools import partial

from kernelcat.catalog.implementation import Config, Implementation, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.persistent import loaded_rows
from kernelcat.kernels.cuda.gemm import wgmma
from kernelcat.kernels.cuda.gemm.operands import operand_map
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.runtime.gpu import Gpu

ATOM = 8
"""Rows that the swizzle takes together: boxes have whole atoms."""


def edge_rows(rows: int, block: int, part: int) -> int:
    """Rows of the last box of an operand of ``rows``, in whole atoms: of the ``part`` rows that a
    thread block loads of a tile of ``block``, those that exist; ``part`` if no box is shorter."""
    inside = -(-(rows % block) // ATOM) * ATOM
    return inside % part or part


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    def maps(name: str, rows: int, block: int, sharers: int) -> tuple[TensorMap, ...]:
        part = loaded_rows(block, sharers)
        heights = part, edge_rows(rows, block, part)
        return tuple(operand_map(name, problem, rows, height) for height in heights)

    return wgmma.program(problem, config, gpu, "fitted", maps)


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if Plan.of(config, problem, gpu).outside < ATOM:
        return "no tile has rows or columns outside of the product: wgmma takes as long"
    return wgmma.slower(config, problem, gpu, is_fitted=True)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="fitted",
    summary="wgmma's kernel, whose last tiles load no rows outside of the product",
    archs=("sm_90a",),
    space=wgmma.SPACE,
    illegal=wgmma.illegal,
    unpromising=wgmma.unpromising,
    too_slow=_too_slow,
    default=partial(wgmma.default, is_fitted=True),
    program=_program,
    estimate=partial(wgmma.estimate, is_fitted=True),
    techniques=wgmma.TECHNIQUES,
    rank=3,
)
