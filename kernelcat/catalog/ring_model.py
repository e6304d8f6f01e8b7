"""Time of persistent matrix products whose operands TMA loads into a ring of stages.

One warp loads, warpgroups multiply, and the next tile is loaded while one is stored. The model has
few terms: what the tensor cores take for a k-block, what the port of an SM and L2 take to bring its
operands, the stores, and DRAM. What runs at once adds up by a norm, because no overlap is perfect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kernelcat.runtime.gpu import Gpu

ROW_BYTES = 128
"""Bytes of a row of an operand in a stage: 64 elements of 16 bits, or 128 of 8."""
SECTOR_BYTES = 32
OUTSIDE = 0.6
"""What TMA takes longer for a row of zeros outside of an operand than for one of the operand, over
the time of that one. A k-block of 64 x 64 alone says 1.3 (132 ns on an H200 with all rows inside,
202 with 56 outside); wide tiles hide a part, and 0.6 fits 163 raced times of `gemm/cuda/wgmma`."""


PAIR_BYTES_PER_US = 115e3
"""What two SMs that share a port take from memory. On an H200 it takes 40 thread blocks, each on a
pair of SMs of its own, to fill the bandwidth; 80 take as long as the second ones of 14 pairs, which
the first ones of all 66 pairs had delayed (4x5120x2048: 9.1 us, in tiles of 128 rows 7.4)."""


class Tiles(NamedTuple):
    """Tiles of a product of (rows, k) and (cols, k), and how they are dealt out.

    Attributes
    ----------
    row_bytes : bytes of a row of k elements
    cluster_m, cluster_n : thread blocks of a cluster below each other and side by side
    thread_blocks : those that have work
    waves : tiles of the busiest thread block
    stored : its tiles that are stored while nothing is multiplied
    outside : rows outside of the operands that are loaded with a tile, as zeros
    """

    rows: int
    cols: int
    row_bytes: int
    block_m: int
    block_n: int
    cluster_m: int
    cluster_n: int
    thread_blocks: int
    waves: float
    stored: float
    outside: float = 0.0


@dataclass(frozen=True, eq=False)
class RingModel:
    """Fitted numbers. A model is equal to itself only, so that hashing one takes no time.

    Attributes
    ----------
    start_us : from the launch to the first stage, and from the last store to the end
    tensor_share : rate of wide tiles over the peak rate of the tensor cores, if nothing else took
        time
    tile_rates : columns of a tile and the rate of wgmma over that of a wide one
    l2_bytes_per_us : what an SM gets from L2 when all SMs load
    l2_power : power of the share of SMs that load by which each gets more when fewer do
    port_bytes_per_us : what an SM takes, multicast included
    split_lines, split_sectors : L2's time for rows that do not begin at a line of 128 bytes, so
        that each part of a row lies in two, and for rows that do not begin at a sector of 32
    cluster : time of the tensor cores in a cluster, whose thread blocks wait for each other
    store_us : storing a tile of 128 x 256
    dram_share : share of the peak DRAM bandwidth
    order : of the norm that adds up what a k-block takes; an infinite one would be perfect overlap
    memory_order : of the norm that adds up the busiest thread block and the memory
    split_k_block : time of a k-block in a cluster whose thread blocks split k, over its time alone
    cluster_barrier_us : a barrier of a cluster, and the time until the first sums arrive
    cluster_bytes_per_us : what an SM gets from the other SMs of its cluster
    last_sums_us : until the thread block that arrives last sees the partial sums of all splits
    part_us : the latency of the partial sums of a further split
    partial_bytes_per_us : of partial sums that an SM writes and reads
    """

    start_us: float
    tensor_share: float
    tile_rates: tuple[tuple[int, float], ...]
    l2_bytes_per_us: float
    l2_power: float
    port_bytes_per_us: float
    split_lines: float
    split_sectors: float
    cluster: float
    store_us: float
    dram_share: float
    order: float
    memory_order: float
    split_k_block: float
    cluster_barrier_us: float
    cluster_bytes_per_us: float
    last_sums_us: float
    part_us: float
    partial_bytes_per_us: float

    def cluster_sums_us(self, split_k: int, area: int) -> float:
        """Microseconds to add up a tile's sums in a cluster: each thread block a slice of it."""
        if split_k == 1:
            return 0.0
        received_bytes = 4 * area * (split_k - 1) / split_k
        return self.cluster_barrier_us + received_bytes / self.cluster_bytes_per_us

    def sums_us(self, split_k: int, area: int) -> float:
        """Microseconds to add up a tile's partial sums through L2, in one thread block."""
        if split_k == 1:
            return 0.0
        parts_us = split_k * self.part_us
        return self.last_sums_us + parts_us + 4 * (1 + split_k) * area / self.partial_bytes_per_us

    def gemm_us(
        self,
        tiles: Tiles,
        gpu: Gpu,
        dtype: str,
        bytes_moved: int,
        *,
        slowdown: float = 1.0,
        splits_k: bool = False,
        extra_us: float = 0.0,
        end_us: float = 0.0,
    ) -> float:
        """Microseconds of the product, whose arrays have ``bytes_moved`` bytes.

        ``slowdown`` multiplies the time of the tensor cores; ``splits_k`` is whether the thread
        blocks of a cluster split k; ``extra_us`` is further time of the busiest thread block, and
        ``end_us`` is time after all loads, which overlaps with none of them.
        """
        area = tiles.block_m * tiles.block_n
        busy_us = tiles.waves * ceil(tiles.row_bytes / ROW_BYTES)
        busy_us *= self._k_block_us(tiles, gpu, dtype, slowdown)
        busy_us *= self.split_k_block if splits_k else 1.0
        busy_us += tiles.stored * self.store_us * area / (128 * 256) + extra_us
        dram = gpu.bandwidth * self.dram_share / 1e6  # bytes a microsecond
        memory_us = bytes_moved / dram + _unshared_us(tiles, gpu, dram)
        return self.start_us + _norm(self.memory_order, busy_us, memory_us) + end_us

    def _k_block_us(self, tiles: Tiles, gpu: Gpu, dtype: str, slowdown: float) -> float:
        """A k-block of a tile. Nothing is loaded for what is outside of the product."""
        operations = _operations(dtype) * tiles.block_m * tiles.block_n
        peak = gpu.flops.get(dtype, gpu.flops["float32"]) / gpu.sms
        rate = peak * self.tensor_share * self._tile_rate(tiles.block_n)
        inside_m, inside_n = min(tiles.block_m, tiles.rows), min(tiles.block_n, tiles.cols)
        port_us = (inside_m + inside_n) * ROW_BYTES / self.port_bytes_per_us
        l2_rows = inside_m / tiles.cluster_n + inside_n / tiles.cluster_m
        busy = min(tiles.thread_blocks / gpu.sms, 1.0)
        l2_us = l2_rows * ROW_BYTES / self.l2_bytes_per_us * busy**self.l2_power
        l2_us += tiles.outside * OUTSIDE * ROW_BYTES / self.l2_bytes_per_us
        if tiles.row_bytes % ROW_BYTES:
            is_split = tiles.row_bytes % SECTOR_BYTES
            l2_us *= self.split_sectors if is_split else self.split_lines
        if tiles.cluster_m * tiles.cluster_n > 1:
            slowdown *= self.cluster
        return _norm(self.order, operations / rate * 1e6 * slowdown, port_us, l2_us)

    @lru_cache(maxsize=64)  # noqa: B019  (models are few, and live as long as the process)
    def _tile_rate(self, block_n: int) -> float:
        """The rate of tiles with ``block_n`` columns, on a line between the fitted ones."""
        narrow, low = next((each for each in reversed(self.tile_rates) if each[0] <= block_n),
                           self.tile_rates[0])  # fmt: skip
        wide, high = next((each for each in self.tile_rates if each[0] >= block_n),
                          self.tile_rates[-1])  # fmt: skip
        return low + (high - low) * (block_n - narrow) / max(wide - narrow, 1)


def _norm(order: float, *times: float) -> float:
    """The time of what runs at once: between the longest of ``times`` and their sum."""
    return float(sum([time**order for time in times]) ** (1 / order))


def _unshared_us(tiles: Tiles, gpu: Gpu, dram: float) -> float:
    """How much longer an operand takes that thread blocks stream once, a part each, than at the
    ``dram`` bytes a microsecond of the memory: pairs of SMs get equal shares of it, so pairs with a
    part more than others have it left in the end."""
    if tiles.cols <= tiles.block_n * tiles.cluster_n:
        streamed = tiles.rows
    elif tiles.rows <= tiles.block_m * tiles.cluster_m:
        streamed = tiles.cols
    else:
        return 0.0
    part_bytes = streamed * tiles.row_bytes / max(tiles.thread_blocks, 1)
    late = tiles.thread_blocks % (gpu.sms // 2)
    return part_bytes * max(1 / PAIR_BYTES_PER_US - late / dram, 0.0) if late else 0.0


def _operations(dtype: str) -> int:
    """Operations of a k-block for each element of a tile."""
    return 2 * ROW_BYTES if dtype.startswith("float8") else ROW_BYTES


BITS_16 = RingModel(
    start_us=2.4,
    tensor_share=1.08,
    tile_rates=((16, 0.25), (32, 0.45), (48, 0.6), (64, 0.76), (96, 0.85), (128, 0.93), (256, 1.0)),
    l2_bytes_per_us=125e3,
    l2_power=1.0,
    port_bytes_per_us=190e3,
    split_lines=1.3,
    split_sectors=2.4,
    cluster=1.14,
    store_us=1.23,
    dram_share=0.875,
    order=2.5,
    memory_order=2.5,
    split_k_block=1.3,
    cluster_barrier_us=0.8,
    cluster_bytes_per_us=28e3,
    last_sums_us=1.2,
    part_us=0.0,
    partial_bytes_per_us=20e3,
)
"""Operands of 16 bits, fitted to 1,543 times of 44 random problems with 17 to 7,241 rows, screened
on an H100. Kernels of CUDA and CuTe differ from the model by 1.10, one standard deviation, and
those within 30 % of a problem's fastest by 1.07; Triton's by 1.13 and 1.07."""

BITS_8 = RingModel(
    start_us=2.4,
    tensor_share=1.34,
    tile_rates=((16, 0.89), (64, 0.78), (128, 0.87), (256, 1.0)),
    l2_bytes_per_us=92e3,
    l2_power=1.0,
    port_bytes_per_us=221e3,
    split_lines=1.3,
    split_sectors=1.3,
    cluster=1.1,
    store_us=0.31,
    dram_share=0.926,
    order=1.96,
    memory_order=1.96,
    split_k_block=1.3,
    cluster_barrier_us=0.8,
    cluster_bytes_per_us=28e3,
    last_sums_us=3.0,
    part_us=0.0,
    partial_bytes_per_us=45e3,
)
"""Operands of 8 bits with block scales, fitted to 434 times of 15 random problems with 8 to 7,128
rows, screened on an H100: kernels of CUDA and CuTe differ from the model by 1.07. All their rows
began at a line; of others only 4097x5000x2064 was raced (on an H200). Kernels whose promotion of
sums slows the tensor cores have a ``slowdown``."""

ONE_CONSUMER = 1.6
"""Slowdown of float8 tiles of 64 rows: one warpgroup multiplies, and promotes sums in between."""
