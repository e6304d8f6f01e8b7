"""Shares of the work, of which several may have parts of the same rows; and what merges them."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Int32, Pointer, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.flashmla.operands import row_tiles
from kernelcat.reference._mla_row import LATENT
from kernelcat.runtime.gpu import Gpu

NO_PARTS, ALL_PARTS = 1, 1 << 30
"""Of a row: so many the last block puts together, more a kernel that follows."""
FULL = 0.9
"""Of the blocks: so many are enough if then no tile of rows has to be split."""

TASK_BYTES = 16
COMBINE_THREADS = 512
COMBINE_BLOCKS_PER_SM = 2
COMBINE_US = 4.0
PART_US = 3.8
"""What the last block takes for a part of 64 rows."""

WORKSPACES = ("partials", "counters", "tasks")


def num_shares(problem: Problem, tile_rows: int, most: int) -> int:
    """For each of ``most`` blocks one, or a few less where that leaves tiles of rows whole."""
    tiles = max(row_tiles(problem, tile_rows), 1)
    whole = ceil(tiles / ceil(tiles / most)) if tiles > most else most // tiles * tiles
    return whole if whole >= FULL * most else most


def workspaces(shares: int, tile_rows: int, side: int) -> dict[str, int]:
    """Bytes; each share is of ``side`` blocks, that have ``tile_rows`` rows together."""
    return {
        "partials": 2 * shares * tile_rows * (LATENT + 2) * 4,
        "counters": shares * side * 4,
        "tasks": shares * TASK_BYTES,
    }


def combine_step(problem: Problem, tile_rows: int, shares: int, gpu: Gpu) -> Step:
    """Puts together what blocks have left of rows that they share."""
    name = f"kernelcat::flashmla_combine<kernelcat::{problem['dtype']}, {tile_rows}>"
    return Step(
        CudaSource("flashmla/combine.cu", name),
        (gpu.sms * COMBINE_BLOCKS_PER_SM, 1, 1),
        (*map(Pointer, ("partials", "tasks", "out", "lse")), Int32(shares)),
        COMBINE_THREADS,
        programmatic=True,
    )


def merge_us(problem: Problem, tile_rows: int, shares: int, combine: bool) -> float:
    """Microseconds that it takes to merge the parts of a row, in the mean."""
    parts = ceil(shares / max(row_tiles(problem, tile_rows), 1))
    if combine:
        return COMBINE_US
    return PART_US * parts if parts > 1 else 0.0
