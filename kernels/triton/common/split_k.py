"""Split-K: several programs compute a tile, each from a part of K (device/split_k.py)."""

from math import ceil

from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.product import Tile
from kernelcat.runtime.gpu import Gpu


def arguments() -> dict[str, triton.Argument]:
    """The workspaces as arguments.

    partials (tiles, splits, elements of a tile) are float32, arrivals (tiles,) int32.
    """
    return {
        "partials": triton.pointer("partials", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
    }


def workspaces(tile: Tile, problem: Problem, splits: int) -> dict[str, int]:
    """Bytes of each workspace; there are no partial sums where K is not split."""
    num_tiles = tile.count(problem)
    partials = num_tiles * splits * tile.m * tile.n if splits > 1 else 0
    return {"partials": 4 * partials, "arrivals": 4 * num_tiles}


def depth(tile: Tile, problem: Problem, splits: int) -> int:
    """Columns of A and B of one split, a multiple of a k-block."""
    return ceil(problem["K"] / splits / tile.k) * tile.k


def unpromising_splits(
    tile: Tile, problem: Problem, splits: int, gpu: Gpu, *, max_waves: int, min_k_blocks: int
) -> str | None:
    """Why splitting K is not worth a try: enough programs without it, or too little work in each.

    ``max_waves`` bounds the programs, ``min_k_blocks`` are the fewest k-blocks of a split.
    """
    num_tiles, k = tile.count(problem), problem["K"]
    if splits > 1 and num_tiles * splits > max_waves * gpu.sms:
        return f"{num_tiles} tiles fill {gpu.sms} SMs without split_k={splits}"
    if splits > 1 and k < min_k_blocks * tile.k * splits:
        return f"K={k} is too short for split_k={splits}"
    return None
