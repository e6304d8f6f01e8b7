"""What configurations of `moe_gemm` mean for one problem, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from kernelcat import dtypes
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS
from kernelcat.kernels.cuda.moe_gemm.operands import num_rows
from kernelcat.reference._assignments import active, row_blocks
from kernelcat.runtime.gpu import KB, Gpu

ROW_BYTES = 128
"""Bytes of a row of a stage: the widest row that the hardware swizzles."""
MAX_STAGES = 12
GROUP_ROWS = 1024
"""Rows of A that make a group in the order of an expert's tiles."""
WIDE_GROUP_ROWS = 3072
"""Rows of A that make a group where consumers take turns or thread blocks share weights: an expert
of 2048 rows on average is then one group, whose weights are read once, and the tiles of a wave read
21 MB instead of 24 (gpt-oss, 16 bits)."""
PAIR = "-pair"
"""Ends the name of a tile of which a cluster of two thread blocks computes two at a time."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of a grouped product, for one configuration and problem."""

    block_m: int
    """Rows of an expert in a tile."""
    block_n: int
    """Rows of the expert's weights in a tile."""
    experts: int
    n: int
    k: int
    rows: int
    problem: Problem

    @staticmethod
    def fields(config: Config, problem: Problem) -> dict[str, Any]:
        """The fields by name, for the plans of kernels, which add their own."""
        block_m, block_n = map(int, config["tile"].removesuffix(PAIR).split("x")[-2:])
        return {
            "block_m": block_m,
            "block_n": block_n,
            "experts": problem["experts"],
            "n": problem["N"],
            "k": problem["K"],
            "rows": num_rows(problem),
            "problem": problem,
        }

    @property
    def active(self) -> int:
        """Experts that serve a token, estimated; counting them takes longer than a program."""
        return active(self.problem)

    @property
    def row_blocks(self) -> float:
        """Blocks of rows of all experts, estimated."""
        return row_blocks(self.problem, self.block_m)

    @property
    def group_m(self) -> int:
        """Blocks of rows that make a group in the order of an expert's tiles."""
        return max(GROUP_ROWS // self.block_m, 1)

    @property
    def num_col_blocks(self) -> int:
        return ceil(self.n / self.block_n)

    @property
    def max_tiles(self) -> int:
        """The most tiles that any offsets make."""
        row_blocks = self.rows // self.block_m + min(self.experts, self.rows)
        return row_blocks * self.num_col_blocks

    @property
    def num_tiles(self) -> float:
        """Tiles, estimated."""
        return self.row_blocks * self.num_col_blocks

    @property
    def expert_rows(self) -> float:
        """Rows of an expert that serves a token, on average."""
        return self.rows / max(self.active, 1)

    def why_too_large(self) -> str | None:
        """Why 32-bit indices do not reach all rows of weights and all tiles, or None."""
        if self.experts * self.n >= 1 << 31 or self.max_tiles > MAX_BLOCKS:
            return f"{self.experts} x {self.n} rows of weights are more than 32-bit indices reach"
        return None

    def why_unpromising(self) -> str | None:
        """Why blocks of so many rows are not worth a try, or None."""
        expert_rows = self.expert_rows
        if self.block_m > 64 and self.block_m >= 4 * expert_rows:
            return f"blocks of {self.block_m} rows are mostly empty at {expert_rows:.3g} an expert"
        if self.block_m <= 64 and expert_rows > 4 * self.block_m:
            return (
                f"blocks of {self.block_m} rows read weights too often at {expert_rows:.3g} rows "
                "an expert"
            )
        return None


@dataclass(frozen=True)
class Plan(Tiling):
    """A configuration of the wgmma kernel in numbers, for one problem."""

    element_bytes: int
    """Bytes of an element of A and of the weights."""
    takes_turns: bool
    """Whether two consumers take turns, a tile each, and do not share one."""
    makes_pairs: bool
    """Whether a cluster of two thread blocks computes two tiles at a time."""

    @staticmethod
    def of(config: Config, problem: Problem) -> Plan:
        return Plan(
            **Tiling.fields(config, problem),
            element_bytes=dtypes.itemsize(problem["act_dtype"]),
            takes_turns=config["tile"].startswith("2x"),
            makes_pairs=config["tile"].endswith(PAIR),
        )

    @property
    def group_m(self) -> int:
        is_wide = self.takes_turns or self.makes_pairs
        return WIDE_GROUP_ROWS // self.block_m if is_wide else super().group_m

    @property
    def cluster_size(self) -> int:
        return 2 if self.makes_pairs else 1

    def num_blocks(self, gpu: Gpu) -> int:
        """Thread blocks: as many as run at a time, or one for each tile, in whole clusters."""
        return min(self.max_tiles, gpu.sms // self.cluster_size) * self.cluster_size

    @property
    def block_k(self) -> int:
        """Columns of A and of weights in a stage."""
        return ROW_BYTES // self.element_bytes

    @property
    def num_k_blocks(self) -> int:
        return ceil(self.k / self.block_k)

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return 2 if self.block_m > 64 else 1

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)

    @property
    def stage_bytes(self) -> int:
        """Both operands, scales of float8, and two barriers."""
        scale_bytes = 4 * (self.block_m + 2) if self.element_bytes == 1 else 0
        return (self.block_m + self.block_n) * ROW_BYTES + scale_bytes + 16

    @property
    def fixed_bytes(self) -> int:
        """Biases of each consumer, turns, lists of tiles, alignment to 1 KB, unused scales."""
        turn_bytes = 16 if self.takes_turns else 0
        return 4 * self.num_consumers * self.block_n + turn_bytes + 8 * (self.experts + 1) + KB + 16

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit."""
        return min((gpu.shared_bytes - self.fixed_bytes) // self.stage_bytes, MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * self.stage_bytes + self.fixed_bytes
