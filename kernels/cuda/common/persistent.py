"""Persistent matrix products: the work of their clusters, how many waves it makes, their launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Any, ClassVar

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    ConfigValue,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.ring_model import ROW_BYTES, RingModel, Tiles
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.runtime.gpu import Gpu

CLUSTERS: tuple[ConfigValue, ...] = ("1x1", "2x1", "1x2")
"""Thread blocks of a cluster: below each other x side by side. Multicast loads what they share."""

SPLITS: tuple[ConfigValue, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
"""Splits of a tile's k range: of every tile where tiles are fewer than clusters, else of the tiles
of the last wave."""

MAX_WAVES_WITH_TAIL = 6
NULL = Int64(0)

Maps = Callable[[str, int, int, int], tuple[TensorMap, ...]]
"""The maps of an operand, from its name, its rows, the rows of its tiles and how many thread blocks
share one."""


SHARE_OF_SMS = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.85}
"""Thread blocks of a cluster -> share of the SMs that such clusters fill. On an H200 30 clusters of
four and 14 of eight ran at once; cuBLAS launches 30 and 15 on an H100."""


@lru_cache
def clusters_at_once(thread_blocks: int, size: int) -> int:
    """Clusters of ``size`` that run at once where ``thread_blocks`` of one fit."""
    return max(int(thread_blocks * SHARE_OF_SMS[size] / size), 1)


@lru_cache
def two_numbers(text: str) -> tuple[int, int]:
    """``"128x64"`` -> 128, 64."""
    first, second = text.split("x")
    return int(first), int(second)


@lru_cache(1 << 14)  # more than the configurations of a space
def _numbers(config: Config) -> tuple[tuple[int, int], bool, tuple[int, int, int]]:
    """A tile's rows and columns, whether operands are swapped, and a cluster's thread blocks below
    each other and side by side, with the splits of k."""
    cluster = two_numbers(config.get("cluster", "1x1"))
    return two_numbers(config["tile"]), config["swap"], (*cluster, config["split_k"])


def loaded_rows(rows: int, sharers: int) -> int:
    """Rows that a thread block loads at a time of ``rows`` that ``sharers`` need; see
    loads_parts() in operand_ring.cuh."""
    return rows // sharers if rows % (8 * sharers) == 0 else rows


def sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    """The parameters m, n, k of a matrix product."""
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


@dataclass
class PersistentPlan(ABC):
    """A configuration in numbers, for one problem: the host's view of tile_order.cuh's work list.

    ``rows`` and ``cols`` are those of what is tiled: A @ B^T, or its transpose where ``swap``.

    Nobody changes a plan. It is not frozen because a choice makes many plans, and to make a frozen
    one takes six times as long.
    """

    rows: int
    cols: int
    k: int
    block_m: int
    block_n: int
    swap: bool
    cluster_m: int
    cluster_n: int
    split_k: int
    sms: int

    cluster_size: int = field(init=False)
    num_tiles: int = field(init=False)
    """Cluster tiles, each the tiles of all thread blocks of a cluster."""
    num_clusters: int = field(init=False)
    """Clusters that run at a time."""
    num_split_tiles: int = field(init=False)
    """Cluster tiles whose k range is split."""

    block_k: ClassVar[int]
    """Columns of A and B in a stage."""

    def __post_init__(self) -> None:
        """Works out once what a choice looks at several times."""
        self.cluster_size = self.cluster_m * self.cluster_n
        rows, cols = self.block_m * self.cluster_m, self.block_n * self.cluster_n
        self.num_tiles = (self.rows + rows - 1) // rows * ((self.cols + cols - 1) // cols)
        self.num_clusters = clusters_at_once(self.sms * self.blocks_per_sm, self.cluster_size)
        self.num_split_tiles = 0 if self.split_k == 1 else self.num_tiles - self.num_whole_tiles

    @staticmethod
    def fields(config: Config, problem: Problem, gpu: Gpu) -> tuple[Any, ...]:
        """The fields above, in order: to pass them by name takes longer."""
        values, (tile, swap, more) = problem.values, _numbers(config)
        rows, cols = (values["N"], values["M"]) if swap else (values["M"], values["N"])
        return rows, cols, values["K"], *tile, swap, *more, gpu.sms

    @property
    @abstractmethod
    def num_consumers(self) -> int:
        """Warpgroups that multiply."""

    @property
    @abstractmethod
    def num_threads(self) -> int: ...

    @property
    @abstractmethod
    def group_m(self) -> int:
        """Rows of cluster tiles that make a group in the order of tiles."""

    @abstractmethod
    def shared_bytes(self, gpu: Gpu) -> int: ...

    @property
    def consumers_per_tile(self) -> int:
        return self.num_consumers

    @property
    def blocks_per_sm(self) -> int:
        return 1

    @property
    def num_k_blocks(self) -> int:
        return -(-self.k // self.block_k)

    @property
    def outside(self) -> int:
        """Rows and columns outside of the product in the last tile of a row or column of tiles."""
        rows, cols = self.block_m * self.cluster_m, self.block_n * self.cluster_n
        return min(-self.rows % rows, self.block_m) + min(-self.cols % cols, self.block_n)

    @property
    def num_whole_tiles(self) -> int:
        """Cluster tiles whose k range is not split."""
        if self.split_k == 1:
            return self.num_tiles
        return self.num_tiles // self.num_clusters * self.num_clusters

    @property
    def num_work_items(self) -> int:
        """Whole tiles and splits of the others: clusters take one at a time."""
        return self.num_tiles + self.num_split_tiles * (self.split_k - 1)

    @property
    def num_thread_blocks(self) -> int:
        """Thread blocks that would have work if all ran at once."""
        return self.num_work_items * self.cluster_size

    @property
    def waves(self) -> float:
        """Time of the busiest cluster in whole tiles; a split counts as a part of a tile."""
        clusters, splits = self.num_clusters, self.num_split_tiles
        whole = -(-(self.num_tiles - splits) // clusters)
        return whole + -(-splits * self.split_k // clusters) / self.split_k

    @property
    def workspaces(self) -> dict[str, int]:
        num_block_tiles = self.num_split_tiles * self.cluster_size
        if num_block_tiles == 0:
            return {}
        return {
            "partials": num_block_tiles * self.split_k * 4 * self.block_m * self.block_n,
            "counters": num_block_tiles * self.consumers_per_tile * 4,
        }

    def sums_us(self, model: RingModel) -> float:
        """Microseconds to add up the partial sums of split tiles."""
        split_k = self.split_k if self.num_split_tiles else 1
        return model.sums_us(split_k, self.block_m * min(self.block_n, self.cols))

    def ring_tiles(self, waves: float, stored: float) -> Tiles:
        """The tiles as the time model sees them; operands have 64 or 128 columns in a stage."""
        return Tiles(
            self.rows, self.cols, self.k * ROW_BYTES // self.block_k, self.block_m, self.block_n,
            self.cluster_m, self.cluster_n, self.num_thread_blocks, waves, stored,
        )  # fmt: skip


def launch(
    plan: PersistentPlan,
    source: CudaSource,
    operands: tuple[Param, ...],
    problem: Problem,
    gpu: Gpu,
) -> Program:
    """The launch of ``source``: its ``operands``, workspaces, sizes, and the order of work."""
    workspaces = plan.workspaces
    params = (
        *operands,
        *(Pointer(name) if workspaces else NULL for name in ("partials", "counters")),
        *sizes(problem),
        *map(Int32, (plan.num_whole_tiles, plan.split_k, plan.group_m)),
    )
    step = Step(
        source,
        (min(plan.num_work_items, plan.num_clusters) * plan.cluster_size, 1, 1),
        params,
        plan.num_threads,
        plan.shared_bytes(gpu),
        (plan.cluster_size, 1, 1),
        programmatic=True,
    )
    return Program((step,), workspaces)


def illegal_split(plan: PersistentPlan) -> str | None:
    if plan.split_k > plan.num_k_blocks:
        return (
            f"K={plan.k} has {plan.num_k_blocks} k-blocks of {plan.block_k}, and each of "
            f"{plan.split_k} splits needs one"
        )
    return None


def unpromising_split(plan: PersistentPlan) -> str | None:
    split_k, num_split = plan.split_k, plan.num_split_tiles
    if split_k == 1:
        return None
    if split_k * 2 > plan.num_k_blocks:
        return f"{split_k} splits of {plan.num_k_blocks} k-blocks have fewer than two each"
    if num_split == 0:
        return "all tiles are in whole waves, and nothing is left to split"
    if num_split * split_k > plan.num_clusters:
        return f"{num_split} tiles of the last wave in {split_k} splits make more than one wave"
    if plan.waves > MAX_WAVES_WITH_TAIL:
        return f"the last of {ceil(plan.waves)} waves is not worth splitting"
    return None


def overlapped_us(busy_us: float, bytes_moved: int, gpu: Gpu) -> float:
    """The SMs' time or the memory's, whichever is longer, and a tenth of the shorter."""
    memory_us = copy_us(bytes_moved, gpu) - LAUNCH_US
    return LAUNCH_US + max(busy_us, memory_us) + 0.1 * min(busy_us, memory_us)
