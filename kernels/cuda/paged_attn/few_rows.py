"""What the decode kernels of `paged_attn` share whose warps keep all rows: limits, tiles, costs."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.paged_cache import mean_context, num_slots
from kernelcat.kernels.cuda.common.persistent import clusters_at_once
from kernelcat.kernels.cuda.paged_attn.operands import group
from kernelcat.reference.paged_attn import most_visible
from kernelcat.runtime.gpu import Gpu

MAX_ROWS = 16
"""Rows that a warp keeps in registers."""
TABLE_LOADS = 4
"""Entries of the block table that a thread copies where there is a window."""
TILE_US = 0.15
"""Microseconds of a warp for scores, softmax and products of 32 tokens of 64 elements."""
CAPPED_US = 0.1
"""Microseconds of a warp that bounds 32 scores of eight rows by a softcap, with up to
``CAPPED_WARPS`` on an SM. Fitted to 376 times of `staged` for 26 problems on an H200."""
CAPPED_WARPS = 8
"""Warps of an SM above which they take turns at that."""
GPC_SMS = 14
"""SMs of the smallest graphics processing cluster (GPC); a cluster lies within one GPC."""
NO_OVERLAP_US = 1.0
"""Microseconds that it costs if the next launch finds no room before this one ends."""


def why_not_few_rows(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why neither kernel serves the problem in a configuration, or None."""
    if reason := _why_not_problem(problem):
        return reason
    if config["cluster"] > 8 and gpu.mig:
        return "a slice of a GPU may have no room for a cluster of 16"
    return None


@lru_cache(16)  # each configuration of a choice asks for the same problem
def _why_not_problem(problem: Problem) -> str | None:
    """Why neither kernel serves the problem, or None."""
    rows = problem["max_q"] * group(problem)
    if rows > MAX_ROWS:
        return f"{rows} rows are more than the {MAX_ROWS} that registers hold"
    if problem["has_scales"] and problem["page_scales"]:
        return "the kernel does not load scales of pages"
    if num_slots(problem) >= 1 << 31:
        return f"{num_slots(problem)} slots are more than 32-bit indices reach"
    if max(problem["batch"], problem["kv_heads"]) > 65535:
        return "batch and kv_heads must be at most 65535, a grid's size in y and z"
    return None


def row_tiles(problem: Problem) -> int:
    """Row tiles of eight rows, the columns of mma.sync, of the sequence with the most queries."""
    return ceil(problem["max_q"] * group(problem) / 8)


def passes(problem: Problem, config: Config) -> int:
    """Tiles of the busiest warp."""
    tiles = ceil(most_visible(problem) / config["tokens"])
    return ceil(tiles / (config["num_warps"] * config["cluster"]))


def longest_waves(problem: Problem, waves: int) -> float:
    """Waves of sequences with the mean length, counted in waves of the longest; at least one."""
    longest = max(most_visible(problem), 1)
    return max(1.0, waves * min(mean_context(problem), longest) / longest)


def tile_us(problem: Problem, config: Config, blocks: int, gpu: Gpu) -> float:
    """Microseconds of a warp for a tile: warps of an SM take turns at products and scores."""
    warps = min(ceil(blocks / gpu.sms), config["blocks_per_sm"]) * config["num_warps"]
    us = TILE_US * problem["head_dim"] / 64 * max(1.0, warps / 12)
    if problem["softcap"]:
        us += CAPPED_US * row_tiles(problem) * max(1.0, warps / CAPPED_WARPS)
    return us * config["tokens"] / 32


def resident_clusters(thread_blocks: int, cluster: int) -> int:
    """Clusters that run at once where ``thread_blocks`` of one fit: of 16 half as many as of eight.

    An H200 has seven of 16, one in each GPC: eight, for so many heads of one long sequence, take
    1.2 times as long as their bytes.
    """
    size = min(cluster, 8)
    return max(clusters_at_once(thread_blocks, size) * size // cluster, 1)


def next_launch_fits(clusters: int, cluster: int, blocks_per_sm: int, gpu: Gpu) -> bool:
    """Whether the ``clusters`` of the next launch find room beside those of this one.

    ``cluster`` is the size of each, and an SM has room for ``blocks_per_sm`` thread blocks.
    """
    if cluster == 1:
        return 2 * clusters <= gpu.sms * blocks_per_sm
    per_gpc = GPC_SMS * blocks_per_sm // cluster
    return 2 * clusters <= gpu.sms // GPC_SMS * per_gpc
