"""What a configuration of the wgmma kernel means for one problem, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.persistent import PersistentPlan, clusters_at_once
from kernelcat.kernels.cuda.gemm.operands import BLOCK_K
from kernelcat.runtime.gpu import KB, Gpu

MAX_STAGES = 24
SM_BYTES = 228 * KB
"""Shared memory of an SM; each thread block takes 1 KB of it for the system."""
SKINNY_COLS = 128
"""Rows of A up to which operands are swapped only to fill wgmma's 64 rows, not for fewer waves."""


@dataclass
class Plan(PersistentPlan):
    """A configuration in numbers, for one problem.

    What is tiled is Z = A @ B^T, or Z^T where ``swap``; ``pair`` columns of Z make one of D.
    """

    pingpong: bool
    pair: int
    has_residual: bool

    block_k = BLOCK_K

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        is_pingpong = config["schedule"] == "pingpong"
        pair = 2 if problem.values["activation"] == "swiglu" else 1
        fields = Plan.fields(config, problem, gpu)
        return Plan(*fields, is_pingpong, pair, problem.values["residual"])

    @property
    def is_skinny(self) -> bool:
        """Whether operands are swapped because A has few rows, and not for fewer waves."""
        return self.swap and self.cols <= SKINNY_COLS

    @property
    def unswapped(self) -> Plan:
        """The plan of a swapped product with its tiles as tiles of Z, not of Z^T."""
        return Plan(
            self.cols, self.rows, self.k, self.block_m, self.block_n, False, self.cluster_m,
            self.cluster_n, self.split_k, self.sms, self.pingpong, self.pair,
            self.has_residual,
        )  # fmt: skip

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks with one consumer are small enough for two on an SM."""
        return 2 if self.num_consumers == 1 else 1

    @property
    def is_alone(self) -> bool:
        """Whether all thread blocks run at once with an SM for each."""
        return self.num_work_items <= clusters_at_once(self.sms, self.cluster_size)

    @property
    def is_one_small_tile(self) -> bool:
        """Whether each thread block has an SM and one tile, which one consumer multiplies."""
        return self.is_alone and self.num_consumers == 1

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply: of 192 rows each takes 64, of 128 and 256 half."""
        if self.block_m == 192:
            return 3
        return 2 if self.pingpong or self.block_m > 64 else 1

    @property
    def num_threads(self) -> int:
        """Beside one consumer a warp loads, beside more a warpgroup."""
        return 160 if self.num_consumers == 1 else 128 * (self.num_consumers + 1)

    @property
    def consumers_per_tile(self) -> int:
        return 1 if self.pingpong else self.num_consumers

    @property
    def num_accumulators(self) -> int:
        """Registers of sums that a thread holds."""
        return self.block_m // self.consumers_per_tile * self.block_n // 128

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of D that leave through shared memory at a time."""
        return _chunk(
            self.block_m, self.block_n, self.swap, self.pair, self.num_consumers,
            self.consumers_per_tile, self.has_residual,
        )  # fmt: skip

    @property
    def group_m(self) -> int:
        """So many that the tiles of a wave cover about a square."""
        return (16 if self.block_n > self.block_m else 8) // self.cluster_m

    @property
    def last_depth(self) -> int:
        """Columns of the last k-block that are multiplied: whole wgmmas of 16; in splits all."""
        left = self.k % BLOCK_K
        return ceil(left / 16) * 16 if left and self.split_k == 1 else BLOCK_K

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * BLOCK_K * 2

    @property
    def fixed_bytes(self) -> int:
        """Chunks of D, bias, alignment to 1 KB, and under 64 bytes for turns and flags."""
        rows, cols = self.chunk
        bias = self.block_m // self.consumers_per_tile if self.swap else self.block_n
        return self.num_consumers * 2 * (2 * rows * cols + bias) + KB + 64

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit, two barriers with each; a thread block also takes 1 KB for the system.

        A thread block that is alone on its SM takes all shared memory: a grid of few thread blocks
        then draws as much from memory as their SMs can take.
        """
        residents = self.blocks_per_sm
        if residents > 1 and self.is_alone:
            residents = 1
        budget = (gpu.shared_bytes + KB) // residents - KB
        return min((budget - self.fixed_bytes) // (self.stage_bytes + 16), MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + self.fixed_bytes


@lru_cache(maxsize=1 << 10)
def _chunk(
    block_m: int, block_n: int, swap: bool, pair: int, num_consumers: int, per_tile: int,
    has_residual: bool,
) -> tuple[int, int]:  # fmt: skip
    """The widest chunk beside which enough stages fit; see WgmmaTile."""
    bias = block_m // per_tile if swap else block_n
    stage_bytes = (block_m + block_n) * BLOCK_K * 2
    budget = SM_BYTES - 2 * KB - 64 - num_consumers * 2 * bias

    def chunk(limit: int) -> tuple[int, int]:
        if swap:
            return (
                _widest(block_n, limit) if has_residual else _overlapping(block_n, limit, 8 * pair),
                64 // pair,
            )
        count = block_n // pair
        return 64, _widest(count, limit) if has_residual else _power(count, limit)

    def num_stages(limit: int) -> int:
        rows, cols = chunk(limit)
        return (budget - num_consumers * 4 * rows * cols) // (stage_bytes + 16)

    enough = min(num_stages(16), 8 if num_consumers == 1 else 6)
    return chunk(next(each for each in (64, 32, 16) if num_stages(each) >= enough))


def _power(count: int, limit: int) -> int:
    """The widest of 64, 32 and 16 within ``limit`` and ``count``."""
    return next((width for width in (64, 32, 16) if width <= min(limit, count)), 8)


def _overlapping(count: int, limit: int, step: int) -> int:
    """The width of the fewest parts within ``limit``, a multiple of ``step``, that cover ``count``
    where the last part may overlap the one before."""
    num_parts = -(-count // limit)
    return -(-count // (step * num_parts)) * step


@lru_cache
def _widest(count: int, limit: int) -> int:
    """The widest of 64, 32 and 16 that divides ``count`` and is within ``limit``; of other
    multiples of 8 the widest part within ``limit`` that is one, too; else 8."""
    powers = [width for width in (64, 32, 16) if count % width == 0 and width <= limit]
    parts = [width for width in range(limit, 0, -8) if count % width == 0]
    return next(iter([*powers, *parts]), 8)
