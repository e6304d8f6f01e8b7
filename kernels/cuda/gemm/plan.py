"""What a configuration of the wgmma kernel means for one problem, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.gemm.operands import BLOCK_K
from kernelcat.kernels.cuda.gemm.persistent import PersistentPlan
from kernelcat.runtime.gpu import KB, Gpu

MAX_STAGES = 24
SKINNY_COLS = 128
"""Products of so few rows are only swapped for wgmma's 64 rows, not for the waves they make."""


@dataclass(frozen=True)
class Plan(PersistentPlan):
    """A configuration in numbers, for one problem.

    What is tiled is Z = A @ B^T, or Z^T where ``swap``; ``pair`` columns of Z make one of D.
    """

    pingpong: bool
    pair: int

    block_k = BLOCK_K

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        return Plan(
            **Plan.fields(config, problem, gpu),
            pingpong=config["schedule"] == "pingpong",
            pair=2 if problem["activation"] == "swiglu" else 1,
        )

    @property
    def skinny(self) -> bool:
        """Swapped because A has few rows, and not because the tiles then fit better."""
        return self.swap and self.cols <= SKINNY_COLS

    @property
    def unswapped(self) -> Plan:
        """The same tiles the other way round."""
        return replace(self, rows=self.cols, cols=self.rows, swap=False)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of one consumer are small enough for two."""
        return 2 if self.consumers == 1 else 1

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 2 if self.pingpong or self.block_m > 64 else 1

    @property
    def threads(self) -> int:
        """One consumer comes with a warp that loads, two with a warpgroup."""
        return 160 if self.consumers == 1 else 384

    @property
    def consumers_per_tile(self) -> int:
        return 1 if self.pingpong else self.consumers

    @property
    def sums(self) -> int:
        """Accumulators a thread holds."""
        return self.block_m // self.consumers_per_tile * self.block_n // 128

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of D that leave through shared memory at a time."""
        if self.swap:
            return _widest(self.block_n), 64 // self.pair
        return 64, _widest(self.block_n // self.pair)

    @property
    def group_m(self) -> int:
        """Cluster rows in a group of the order: a wave of tiles is then about square."""
        return (16 if self.block_n > self.block_m else 8) // self.cluster_m

    @property
    def last_depth(self) -> int:
        """Columns of the last block of k that are multiplied, 16 a wgmma; pieces do not differ."""
        left = self.k % BLOCK_K
        return ceil(left / 16) * 16 if left and self.split_k == 1 else BLOCK_K

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * BLOCK_K * 2

    @property
    def fixed_bytes(self) -> int:
        """Output chunks, bias, what consumers tell each other (under 64 bytes) and alignment."""
        rows, cols = self.chunk
        bias = self.block_m // self.consumers_per_tile if self.swap else self.block_n
        return self.consumers * 2 * (2 * rows * cols + bias) + KB + 64

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit, two barriers with each; a block also takes 1 KB that is the system's.

        A block alone on its SM has it all: few SMs then draw as much as their ports let in.
        """
        residents = self.blocks_per_sm if self.units > self.sms else 1
        budget = (gpu.shared_bytes + KB) // residents - KB
        return min((budget - self.fixed_bytes) // (self.stage_bytes + 16), MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + self.fixed_bytes


def _widest(count: int) -> int:
    return next(cols for cols in (64, 32, 16) if count % cols == 0 or cols == 16)
