"""The product of few rows of activations and many rows of weights that stream through a ring.

`kernelcat/streamed_product.cuh` has the device code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from kernelcat.catalog.cost_model import L2_TO_DRAM
from kernelcat.catalog.implementation import Config
from kernelcat.runtime.gpu import KB, Gpu

GROUP_ROWS = 8
"""kGroupRows: rows of weights in a stage, the columns of mma.sync's right operand."""
CHUNK_COLS = 32
"""kChunkCols: columns that a warp multiplies at a time."""
VECTOR = 8
"""Elements in 16 bytes: bulk copies and loads of activations move whole 16 bytes."""
MAX_TOKENS = 64
ALIGNMENT = 128
"""Bytes; of the ring in shared memory."""
OPERAND_REGISTERS = {8: 112, 16: 56}
"""Warps that multiply -> registers at most of a thread for activations, and sums of a round."""

SPACE: Mapping[str, tuple[int, ...]] = {
    "stage_cols": (1024, 512, 256, 2048),
    "num_warps": (16, 8),
    "ring_kb": (128, 64, 96, 192),
}
"""
stage_cols : columns of the eight rows of a stage
num_warps : warps that multiply; each has every num_warps-th chunk of 32 columns
ring_kb : KB of weights in flight at most. Less than all shared memory leaves room for the next
    kernel, which begins to load its weights while this one runs.
"""

BANDWIDTH_SHARE = 0.905
"""Part of the peak DRAM bandwidth that the copies of rows reach. This and the numbers below are
fitted to 152 times of `gemm` on an H200."""
LATENCY_US = 0.85
"""From the start of a copy to its data, when all SMs copy; also of a load of activations."""
SUM_US = 0.245
"""Adding up the sums of all warps after a barrier, once a round."""
STAGE_US = 0.065
"""From the arrival of a stage to its products, where nothing hides it."""
CHUNK_US = 0.03
"""Two products of mma.sync that depend on each other."""
COPY_US = 0.023
"""The producer warp's time for the copy of one row."""
PORT_BYTES_PER_US = 47e3
"""Bytes of weights and activations that an SM takes in a microsecond."""
STAGE_ISSUES = 30
"""Instructions of a warp for each stage beside loads and products: waiting, and releasing."""
CHUNK_ISSUES = 6
"""Instructions of a warp that load 32 columns of eight rows."""
TILE_ISSUES = 6
"""Instructions of a warp for 32 columns of eight rows and 16 tokens."""
ISSUE_US = 1.15e-4
"""Time of an SM's four schedulers for an instruction."""


def stage_bytes(stage_cols: int) -> int:
    """Eight rows of a stage, padded against bank conflicts."""
    return GROUP_ROWS * (2 * stage_cols + 64)


def _aligned(size: int) -> int:
    return ceil(size / ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StreamedProduct:
    """Z = X W^T in numbers: ``rows`` rows of W with ``k`` columns, ``tokens`` rows of X.

    ``extra_bytes`` is what a pair of results needs in shared memory beside its sums, ``sms`` the
    number of thread blocks that share the rows.
    """

    rows: int
    k: int
    tokens: int
    extra_bytes: int
    sms: int
    stage_cols: int
    num_warps: int
    num_stages: int

    @staticmethod
    def of(
        rows: int, k: int, tokens: int, extra_bytes: int, config: Config, gpu: Gpu
    ) -> StreamedProduct:
        stage_cols, num_warps = config["stage_cols"], config["num_warps"]
        num_stages = config["ring_kb"] * KB // stage_bytes(stage_cols)
        return StreamedProduct(
            rows, k, tokens, extra_bytes, gpu.sms, stage_cols, num_warps, num_stages
        )

    @property
    def padded_tokens(self) -> int:
        """kTokens: 8, or a multiple of the 16 rows of a product."""
        return next(tokens for tokens in (8, 16, 32, MAX_TOKENS) if tokens >= self.tokens)

    @property
    def num_tiles(self) -> int:
        """Products of a warp for 16 columns of eight rows."""
        return ceil(self.padded_tokens / 16)

    @property
    def num_groups(self) -> int:
        return ceil(self.rows / GROUP_ROWS)

    @property
    def grid(self) -> int:
        return min(self.sms, self.num_groups)

    @property
    def _block_groups(self) -> int:
        """Groups of the thread block that has the most."""
        return max(1, ceil(self.num_groups / self.sms))

    @property
    def num_rounds(self) -> int:
        """How often a thread block reads the activations: sums of a round fit into registers."""
        sums = OPERAND_REGISTERS[self.num_warps] - self._left_registers
        return ceil(self._block_groups / max(sums // (4 * self.num_tiles), 1))

    @property
    def operand_registers(self) -> int:
        """Registers of a thread for activations and sums."""
        return self._left_registers + 4 * self.num_tiles * self.round_groups

    @property
    def _left_registers(self) -> int:
        """Registers of a thread for activations of a stage's columns."""
        return self.num_chunks * self.padded_tokens // 2

    @property
    def round_groups(self) -> int:
        """kGroups."""
        return ceil(self._block_groups / self.num_rounds)

    @property
    def num_chunks(self) -> int:
        """kChunks: chunks of a stage for each warp."""
        return self.stage_cols // (CHUNK_COLS * self.num_warps)

    @property
    def num_threads(self) -> int:
        """The warps that multiply, one that copies weights, and one that loads what else results
        need.
        """
        return 32 * (self.num_warps + 2)

    @property
    def num_pairs(self) -> int:
        """Pairs of results of a round."""
        return self.round_groups * self.padded_tokens * GROUP_ROWS // 2

    @property
    def shared_bytes(self) -> int:
        """sizeof(ProductShared), and room to align it: stages with two barriers each, the sums of
        all warps, and what else results need.
        """
        ring = _aligned(self.num_stages * (stage_bytes(self.stage_cols) + 16))
        sums = self.num_warps * (8 * self.num_pairs + 4 * self.padded_tokens)
        return _aligned(ring + sums + self.extra_bytes * self.num_pairs) + ALIGNMENT

    @property
    def constants(self) -> tuple[int, ...]:
        """kTokens, kGroups, kNumWarps, kChunks and kNumStages."""
        sizes = (self.padded_tokens, self.round_groups, self.num_warps, self.num_chunks)
        return (*sizes, self.num_stages)

    # ---- cost model -----------------------------------------------------------------------------

    def us(self, gpu: Gpu) -> float:
        """Microseconds from the first copy to the last result: of memory, L2 or issue slots."""
        if not self.rows:
            return 0.0
        weight_bytes, x_bytes = 2 * self.rows * self.k, 2 * self.tokens * self.k
        rate = min(
            BANDWIDTH_SHARE * gpu.bandwidth * 1e-6,
            self.grid * self.num_stages * stage_bytes(self.stage_cols) / LATENCY_US,
        )
        l2_bytes = weight_bytes + self.grid * self.num_rounds * x_bytes
        l2_us = l2_bytes / (0.6 * L2_TO_DRAM * gpu.bandwidth) * 1e6
        num_stages = self._block_groups * ceil(self.k / self.stage_cols)
        issue_us = num_stages * max(self._stage_issues * ISSUE_US, GROUP_ROWS * COPY_US)
        block_bytes = 2 * self.k * (GROUP_ROWS * self._block_groups + self.num_rounds * self.tokens)
        port_us = block_bytes / PORT_BYTES_PER_US
        stream_us = max(weight_bytes / rate, l2_us, issue_us, port_us) + num_stages * STAGE_US
        last_us = self._stage_issues * ISSUE_US + self.num_chunks * CHUNK_US
        return LATENCY_US + stream_us + last_us + self.num_rounds * (LATENCY_US + SUM_US)

    @property
    def _stage_issues(self) -> int:
        """Instructions of all warps for a stage."""
        chunk = CHUNK_ISSUES + TILE_ISSUES * self.num_tiles
        return self.num_warps * (STAGE_ISSUES + self.num_chunks * chunk)


def why_not_streamed(tokens: int, config: Config, **columns: int) -> str | None:
    """Why a product of ``tokens`` rows, whose number of columns is ``columns``, is not served.

    ``columns`` are one or more by the names of their axes.
    """
    stage_cols, num_warps = config["stage_cols"], config["num_warps"]
    if stage_cols < CHUNK_COLS * num_warps:
        return f"stage_cols={stage_cols} are less than {CHUNK_COLS} for each of {num_warps} warps"
    if tokens > MAX_TOKENS:
        return f"tokens={tokens} are more than the {MAX_TOKENS} of which an SM holds sums"
    for name, count in columns.items():
        if count % VECTOR:
            return f"{name}={count} must be a multiple of {VECTOR}: copies move whole 16 bytes"
    return None


def why_no_room(product: StreamedProduct, gpu: Gpu, more_bytes: int = 0) -> str | None:
    """Why the product's ring and sums, and ``more_bytes``, do not fit in shared memory, or None."""
    size = product.shared_bytes + more_bytes
    if size <= gpu.shared_bytes:
        return None
    return f"weights in flight and sums take {size} bytes of shared memory; {gpu.shared_bytes} fit"


def unpromising_product(product: StreamedProduct) -> str | None:
    """Why a configuration is not worth a try, or None."""
    if product.stage_cols > 512 and product.stage_cols >= 2 * product.k:
        return f"half of a stage of {product.stage_cols} columns is empty for {product.k} columns"
    limit = OPERAND_REGISTERS[product.num_warps]
    if product.operand_registers > limit:
        return (
            f"activations of {product.stage_cols} columns and sums take "
            f"{product.operand_registers} registers of a thread; {limit} fit"
        )
    return None
