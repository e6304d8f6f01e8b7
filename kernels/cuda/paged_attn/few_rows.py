"""What the decode kernels of `paged_attn` share whose warps keep all rows: tiles, room, costs."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.paged_cache import context
from kernelcat.kernels.cuda.paged_attn.operands import group
from kernelcat.runtime.gpu import Gpu

MAX_ROWS = 16
"""Rows that a warp keeps in registers."""
SM_BANDWIDTH = 60e9
"""Bytes per second that reach one SM while others have nothing to read."""
GPC_SMS = 14
"""SMs of the smallest graphics processing cluster (GPC); a cluster lies within one GPC."""
NO_OVERLAP_US = 1.0
"""Microseconds that it costs if the next launch finds no room before this one ends."""


def row_tiles(problem: Problem) -> int:
    """Row tiles of eight rows, the columns of mma.sync, of the sequence with the most queries."""
    return ceil(problem["max_q"] * group(problem) / 8)


def visible(problem: Problem) -> int:
    """Tokens that some query of a sequence whose table is full sees."""
    if not problem["window"]:
        return context(problem)
    return min(context(problem), int(problem["window"] + problem["max_q"] - 1))


def passes(problem: Problem, config: Config) -> int:
    """Tiles of the busiest warp."""
    tiles = ceil(visible(problem) / config["tokens"])
    return ceil(tiles / (config["num_warps"] * config["cluster"]))


def next_launch_fits(clusters: int, config: Config, gpu: Gpu) -> bool:
    """Whether the ``clusters`` of the next launch find room beside those of this one."""
    if config["cluster"] == 1:
        return 2 * clusters <= gpu.sms * config["blocks_per_sm"]
    per_gpc = GPC_SMS * config["blocks_per_sm"] // config["cluster"]
    return 2 * clusters <= gpu.sms // GPC_SMS * per_gpc
