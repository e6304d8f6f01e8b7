"""Tiles of `tiled`: their sizes and numbers."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Self

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common import streamed

MAX_ROUTE_BLOCK_T = 32
"""Tokens of a program of the second kernel, at most."""
BLOCK_E = 16
"""Experts of a program."""


@dataclass(frozen=True)
class Tiles:
    """Sizes and numbers of the tiles of `tiled`.

    Attributes
    ----------
    block_n, block_k : rows and columns of wo that are loaded at a time
    block_t, groups : tokens of a tile of the first kernel, and groups of as many tokens
    route_block_t, route_groups : the same of the second kernel
    columns : tiles of columns of h
    parts : parts of the columns of x
    experts : tiles of experts, one where there are none
    """

    block_n: int
    block_k: int
    block_t: int
    groups: int
    route_block_t: int
    route_groups: int
    columns: int
    parts: int
    experts: int

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage of the first kernel takes."""
        return 2 * (self.block_n + self.block_t) * self.block_k

    @property
    def warps(self) -> int:
        """Warps of a program of the first kernel."""
        return 8 if self.block_n == 128 else 4

    @property
    def route_warps(self) -> int:
        """Warps of a program of the second kernel: twice as many for twice as many tokens."""
        return 4 * self.route_block_t // streamed.MIN_BLOCK_T

    @classmethod
    @lru_cache(256)  # limits and both launches ask for the same tiles
    def of(cls, problem: Problem, config: Config) -> Self:
        """The tiles of a problem in a configuration."""
        tokens, hidden = problem["tokens"], problem["hidden"]
        block_n, block_k = map(int, config["tile"].split("x"))
        block_t = streamed.block_t(tokens)
        route_block_t = min(block_t, MAX_ROUTE_BLOCK_T)
        return cls(
            block_n=block_n,
            block_k=block_k,
            block_t=block_t,
            groups=ceil(tokens / block_t),
            route_block_t=route_block_t,
            route_groups=ceil(tokens / route_block_t),
            columns=ceil(hidden / block_n),
            parts=max(ceil(hidden / config["depth"]), 1),
            experts=max(ceil(problem["experts"] / BLOCK_E), 1),
        )
