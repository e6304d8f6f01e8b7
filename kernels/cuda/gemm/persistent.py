"""What persistent kernels share: units of work, how many waves they make, and their launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.operands import sizes
from kernelcat.runtime.gpu import Gpu

CLUSTERS: tuple[ConfigValue, ...] = ("1x1", "2x1", "1x2")
"""Blocks below each other x side by side; what they share is multicast."""

SPLITS: tuple[ConfigValue, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
"""Pieces of every tile's k range where tiles are too few for all SMs, else of those of the last
wave."""

MAX_WAVES_WITH_TAIL = 6
NULL = Int64(0)

_REDUCTION_US = 1.2
"""Handing partial sums to the block that arrives last."""

_PIECE_BYTES = 20e9
"""Bytes a second at which one SM writes and reads partial sums."""


@dataclass(frozen=True)
class PersistentPlan(ABC):
    """A configuration in numbers, for one problem: the host's view of tile_order.cuh's work list.

    ``rows`` and ``cols`` are those of what is tiled: A @ B^T, or its transpose where ``swap``.
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

    block_k: ClassVar[int]
    """Columns of A and B a stage."""

    @staticmethod
    def fields(config: Config, problem: Problem, gpu: Gpu) -> dict[str, Any]:
        """The fields above, by name."""
        block_m, block_n = map(int, config["tile"].split("x"))
        cluster_m, cluster_n = map(int, config["cluster"].split("x"))
        m, n = problem["M"], problem["N"]
        rows, cols = (n, m) if config["swap"] else (m, n)
        return {
            "rows": rows,
            "cols": cols,
            "k": problem["K"],
            "block_m": block_m,
            "block_n": block_n,
            "swap": config["swap"],
            "cluster_m": cluster_m,
            "cluster_n": cluster_n,
            "split_k": config["split_k"],
            "sms": gpu.sms,
        }

    @property
    @abstractmethod
    def consumers(self) -> int:
        """Warpgroups that multiply."""

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @property
    @abstractmethod
    def group_m(self) -> int:
        """Cluster rows in a group of the order."""

    @abstractmethod
    def shared_bytes(self, gpu: Gpu) -> int: ...

    @property
    def consumers_per_tile(self) -> int:
        return self.consumers

    @property
    def blocks_per_sm(self) -> int:
        return 1

    @property
    def k_blocks(self) -> int:
        return ceil(self.k / self.block_k)

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def clusters(self) -> int:
        """That run at a time."""
        return self.sms * self.blocks_per_sm // self.cluster_size

    @property
    def tiles(self) -> int:
        """Of all blocks of a cluster together."""
        return ceil(self.rows / (self.block_m * self.cluster_m)) * ceil(
            self.cols / (self.block_n * self.cluster_n)
        )

    @property
    def whole_tiles(self) -> int:
        if self.split_k == 1:
            return self.tiles
        return self.tiles // self.clusters * self.clusters

    @property
    def units(self) -> int:
        """What clusters work on one at a time: whole tiles, then pieces of the others."""
        return self.whole_tiles + (self.tiles - self.whole_tiles) * self.split_k

    @property
    def waves(self) -> float:
        """How many whole tiles the busiest block computes, pieces in proportion."""
        pieces = self.units - self.whole_tiles
        whole = ceil(self.whole_tiles / self.clusters)
        return whole + ceil(pieces / self.clusters) / self.split_k

    @property
    def workspaces(self) -> dict[str, int]:
        parts = (self.tiles - self.whole_tiles) * self.cluster_size
        if parts == 0:
            return {}
        return {
            "partials": parts * self.split_k * 4 * self.block_m * self.block_n,
            "counters": parts * self.consumers_per_tile * 4,
        }

    @property
    def reduction_us(self) -> float:
        """Time to add up the pieces of split tiles."""
        if self.tiles == self.whole_tiles:
            return 0.0
        live = min(self.block_n, self.cols) * self.block_m * 4
        return _REDUCTION_US + (1 + self.split_k) * live / _PIECE_BYTES * 1e6


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
        *map(Int32, (plan.whole_tiles, plan.split_k, plan.group_m)),
    )
    step = Step(
        source,
        (min(plan.units, plan.clusters) * plan.cluster_size, 1, 1),
        params,
        plan.threads,
        plan.shared_bytes(gpu),
        (plan.cluster_size, 1, 1),
        programmatic=True,
    )
    return Program((step,), workspaces)


def reject_split(plan: PersistentPlan) -> str | None:
    split_k, tail = plan.split_k, plan.tiles - plan.whole_tiles
    if split_k == 1:
        return None
    if split_k * 2 > plan.k_blocks:
        return f"{plan.k_blocks} blocks of {plan.block_k} are too few for {split_k} splits"
    if tail == 0 or tail * split_k > plan.clusters:
        return f"{tail} tiles of the last wave in {split_k} pieces are no single wave"
    if plan.waves > MAX_WAVES_WITH_TAIL:
        return f"the last of {ceil(plan.waves)} waves is not worth splitting"
    return None


def overlapped_us(busy_us: float, bytes_moved: int, gpu: Gpu) -> float:
    """The SMs' time or the memory's, whichever is longer, and a tenth of the other."""
    memory_us = copy_us(bytes_moved, gpu) - LAUNCH_US
    return LAUNCH_US + max(busy_us, memory_us) + 0.1 * min(busy_us, memory_us)
