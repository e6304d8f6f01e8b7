"""Matrix products D = A @ B^T, A (M, K) and B (N, K): what all of their launches share."""

from dataclasses import dataclass
from math import ceil
from typing import Self

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.runtime.gpu import Gpu

GROUP_M = 8
"""Tiles of D in a column of a group (device/tile_order.py)."""
MIN_BYTES_IN_FLIGHT = 48 << 10
"""Bytes of operands in flight on an SM that cover the latency of memory."""
WARPGROUP_ACCUMULATORS = 64 * 256
"""Accumulators that the registers of four warps hold without spilling."""


@dataclass(frozen=True)
class Tile:
    """A tile of D, ``m`` rows and ``n`` columns; a stage holds ``k`` columns of A and B."""

    m: int
    n: int
    k: int

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(*map(int, config["tile"].split("x")))

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4 if self.m * self.n < WARPGROUP_ACCUMULATORS else 8

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage takes; elements have 16 bits."""
        return 2 * (self.m + self.n) * self.k

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}

    def count(self, problem: Problem) -> int:
        """Tiles of D."""
        return ceil(problem["M"] / self.m) * ceil(problem["N"] / self.n)


def is_empty(problem: Problem) -> bool:
    """Whether D has no element."""
    return problem["M"] == 0 or problem["N"] == 0


def sizes(problem: Problem, k_divisor: int | None = None) -> dict[str, triton.Argument]:
    """M, N and K as arguments; code is specialized for ``k_divisor`` (default: K's own)."""
    return {
        "M": triton.integer(problem["M"], divisor=1),
        "N": triton.integer(problem["N"]),
        "K": triton.integer(problem["K"], k_divisor),
    }


def illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why a naive kernel, whose grid is (tiles along M, tiles along N), cannot run."""
    block_n = int(config["tile"].split("x")[1])
    if problem["N"] > MAX_GRID_Y * block_n:
        return f"N={problem['N']} takes more than {MAX_GRID_Y} tiles, the most on a second axis"
    return None


def illegal_stages(stages: int, program_bytes: int, gpu: Gpu) -> str | None:
    """Why the ``stages`` of a program that takes ``program_bytes`` of shared memory do not fit."""
    if program_bytes > gpu.shared_bytes:
        return (
            f"{stages} stages take {program_bytes} bytes of shared memory, "
            f"a program on {gpu.sku} has {gpu.shared_bytes} at most"
        )
    return None


def unpromising_rows(tile: Tile, problem: Problem, min_m: int, weights: str = "B") -> str | None:
    """Why tiles of other heights suit M better; ``min_m`` is the least height there is."""
    m = problem["M"]
    if tile.m > min_m and tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    if tile.m <= 64 and m > (128 if tile.m == 64 else tile.m):
        return f"tiles of {tile.m} rows read {weights} more often than M={m} needs"
    return None
