"""Tiles, and what kernels are launched with."""

from dataclasses import dataclass
from math import ceil
from typing import Self

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton

GROUP_M = 8
MIN_BYTES_IN_FLIGHT = 48 << 10
ACCUMULATOR_WARPS = 64 * 256  # accumulators that 4 warps hold without spilling, with room to spare


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N x BLOCK_K, and what follows from it for one problem."""

    m: int
    n: int
    k: int

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(*map(int, config["tile"].split("x")))

    @property
    def warps(self) -> int:
        return 4 if self.m * self.n < ACCUMULATOR_WARPS else 8

    @property
    def stage_bytes(self) -> int:
        return 2 * (self.m + self.n) * self.k

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}

    def count(self, problem: Problem) -> int:
        return ceil(problem["M"] / self.m) * ceil(problem["N"] / self.n)


def d_cols(problem: Problem, cols: int) -> int:
    """Columns of D that ``cols`` columns of the product become."""
    return cols // 2 if problem["activation"] == "swiglu" else cols


def by_descriptor(problem: Problem) -> bool:
    """Whether rows of D take a multiple of 16 bytes, as TMA asks for."""
    return d_cols(problem, problem["N"]) % 8 == 0


def is_empty(problem: Problem) -> bool:
    return problem["M"] == 0 or problem["N"] == 0


def operands(problem: Problem) -> dict[str, triton.Argument]:
    dtype = problem["dtype"]
    return {name: triton.pointer(name, dtype) for name in ("a", "b", "bias", "residual", "d")}


def described(problem: Problem, tile: Tile, store_cols: int) -> dict[str, triton.Argument]:
    """a and b as descriptors; d and residual too (``store_cols`` columns at once) unless 0."""
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    arguments = operands(problem) | {
        "a": triton.descriptor("a", dtype, (m, k), (tile.m, tile.k)),
        "b": triton.descriptor("b", dtype, (n, k), (tile.n, tile.k)),
    }
    if store_cols:
        shape, block = (m, d_cols(problem, n)), (tile.m, d_cols(problem, store_cols))
        arguments["d"] = triton.descriptor("d", dtype, shape, block)
        if problem["residual"]:
            arguments["residual"] = triton.descriptor("residual", dtype, shape, block)
    return arguments


def sizes(problem: Problem, k_divisor: int | None = None) -> dict[str, triton.Argument]:
    return {
        "M": triton.integer(problem["M"], divisor=1),
        "N": triton.integer(problem["N"]),
        "K": triton.integer(problem["K"], k_divisor),
    }


def flags(problem: Problem) -> dict[str, bool | str]:
    return {
        "HAS_BIAS": problem["bias"],
        "ACTIVATION": problem["activation"],
        "HAS_RESIDUAL": problem["residual"],
    }
