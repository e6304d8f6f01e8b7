"""`nvfp4_matmul` for many rows of A: wgmma multiplies weights that are decoded in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np

from kernelcat.catalog.cost_model import CLUSTER_FIT, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.packed_weights import (
    STAGE_COLS,
    STAGE_ROWS,
    stage_bytes,
    weight_maps,
)
from kernelcat.kernels.cuda.common.persistent import overlapped_us, sizes
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    activation,
    is_empty,
    is_nvfp4,
    k_tiles,
    math_dtype,
    out_type,
    row_tiles,
    why_not_tiles,
)
from kernelcat.reference.nvfp4_matmul import ENTRY, FP8
from kernelcat.runtime.gpu import KB, Gpu

MIN_STAGES, MAX_STAGES = 3, 12
CONSUMERS = 2
"""Warpgroups that multiply."""
GROUP_M = 16
"""Rows of tiles in a group of the order of tiles: many, because packed rows of W are few bytes."""
ROWS_OF_A = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)
"""Rows of A in a tile."""
SPACE = {
    "tile": tuple(f"128x{rows}" for rows in ROWS_OF_A),
    "split_k": (1, 2, 3, 4, 5, 6, 8),
}
"""
tile : rows of W x rows of A
split_k : thread blocks of a cluster, which split a tile's k range
"""


@dataclass(frozen=True)
class Plan:
    """A configuration in numbers, for one problem. What is tiled is D^T."""

    m: int
    n: int
    k: int
    block_n: int  # rows of A
    split_k: int
    is_paired: bool  # two rows of W make one column of D
    scale_block: int  # weights that share a scale
    sms: int

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        return Plan(
            m=problem["M"],
            n=problem["N"],
            k=problem["K"],
            block_n=int(config["tile"].split("x")[1]),
            split_k=config["split_k"],
            is_paired=problem["activation"] == "swiglu",
            scale_block=16 if is_nvfp4(problem) else 32,
            sms=gpu.sms,
        )

    @property
    def tiles(self) -> int:
        return ceil(self.n / STAGE_ROWS) * ceil(self.m / self.block_n)

    @property
    def k_blocks(self) -> int:
        return ceil(self.k / STAGE_COLS)

    @property
    def clusters(self) -> int:
        """Clusters that run at a time."""
        return self.sms // self.split_k

    @property
    def stage_bytes(self) -> int:
        return stage_bytes(self.block_n, self.scale_block)

    @property
    def group_rows(self) -> int:
        """Rows of A that are stored together."""
        return 32 if self.is_paired else 16

    @property
    def inbox_bytes(self) -> int:
        """Partial sums from the cluster's other thread blocks, and a barrier for each consumer.

        They are of the columns that this thread block finishes.
        """
        cols = ceil(self.block_n // self.group_rows / self.split_k) * self.group_rows
        return CONSUMERS * ((self.split_k - 1) * cols * STAGE_ROWS // CONSUMERS * 4 + 16)

    def _rest_bytes(self) -> int:
        """Shared memory beside the stages and their barriers, with room to align the stages."""
        return self.inbox_bytes + KB + 64

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit with their two barriers, at most ``MAX_STAGES``."""
        return min((gpu.shared_bytes - self._rest_bytes()) // (self.stage_bytes + 16), MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + self._rest_bytes()


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan = Plan.of(config, problem, gpu)
    m, k, dtype = problem["M"], problem["K"], math_dtype(problem)
    is_float8 = problem["dtype"] == FP8
    map_a = TensorMap(
        "wide" if is_float8 else "a", dtype, (k, m), (2 * k,), (64, plan.block_n), 128,
        l2_promotion=128,
    )  # fmt: skip
    source = instance(
        "nvfp4_matmul/wgmma.cu",
        "nvfp4_matmul_wgmma",
        *(dtype, out_type(problem), is_nvfp4(problem), activation(problem), is_float8),
        *(plan.block_n, plan.num_stages(gpu), plan.split_k),
    )
    step = Step(
        source,
        (min(plan.tiles, plan.clusters) * plan.split_k, 1, 1),
        (
            map_a,
            *weight_maps(row_tiles(problem), k_tiles(problem), plan.scale_block),
            *EPILOGUE,
            *sizes(problem),
            Int32(GROUP_M),
        ),
        (CONSUMERS + 1) * 128,
        plan.shared_bytes(gpu),
        (plan.split_k, 1, 1),
        programmatic=True,
    )
    if not is_float8:
        return Program((step,))
    return Program((_widen_rows(m * k // 16, gpu), step), {"wide": 2 * m * k})


def _widen_rows(num_vectors: int, gpu: Gpu) -> Step:
    """The launch that converts A, ``num_vectors`` of 16 float8, to bfloat16 in a workspace."""
    source = instance("nvfp4_matmul/widen_rows.cu", "nvfp4_matmul_widen_rows")
    num_blocks = min(ceil(num_vectors / 256), 8 * gpu.sms)
    params = (Pointer("a"), Pointer("wide"), Int64(num_vectors))
    return Step(source, (num_blocks, 1, 1), params, 256, programmatic=True)


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    why = why_not_tiles(problem)
    if why or is_empty(problem):
        return why
    plan = Plan.of(config, problem, gpu)
    if plan.block_n % plan.group_rows:
        return f"{plan.block_n} rows of A are no whole groups of {plan.group_rows}"
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if plan.split_k > plan.k_blocks:
        return (
            f"K={plan.k} has {plan.k_blocks} k-blocks of {STAGE_COLS}, and each of {plan.split_k} "
            "splits needs one"
        )
    if plan.split_k > 1 and plan.tiles > plan.clusters:
        return (
            f"{plan.tiles} tiles in {plan.split_k} splits make more than one wave, and a cluster "
            "adds up the splits of a single tile"
        )
    return None


def _narrower(plan: Plan) -> int:
    """Rows of A in the next narrower tile; 0 for the narrowest one."""
    found = (rows for rows in ROWS_OF_A if rows < plan.block_n and rows % plan.group_rows == 0)
    return max(found, default=0)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    plan = Plan.of(config, problem, gpu)
    if plan.block_n > 64 and plan.block_n >= 2 * plan.m:
        return f"tiles of {plan.block_n} rows of A are at least half empty at M={plan.m}"
    if plan.block_n < 192 and plan.m >= 32 * plan.block_n:
        return f"tiles of {plan.block_n} rows of A decode W more often than M={plan.m} needs"
    narrower = _narrower(plan)
    if narrower and ceil(plan.m / narrower) == ceil(plan.m / plan.block_n):
        return f"tiles of {narrower} rows of A are as few for M={plan.m}"
    if plan.split_k > 1 and plan.split_k * 2 > plan.k_blocks:
        return f"{plan.split_k} splits of {plan.k_blocks} k-blocks have fewer than two each"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_STAGE_US = ((64, 128, 192, 256), (0.56, 0.74, 0.96, 1.22))
"""Rows of A in a tile, and microseconds that a stage takes; with few rows, decoding bounds it."""

_END_US = 1.7
"""The end of the last tile, one of 128 x 256. This and the two numbers below are fitted to 207
times on an H200, from which estimates differ by 6 %; by 8 % with an end that all tiles share."""

_TILE_US = 2.8
"""Storing an earlier tile of 128 x 256, while nothing is multiplied."""

_EXCHANGE_US = 1.0
"""Time to send partial sums to the thread block that finishes them."""


@cache
def _stage_us(block_n: int) -> float:
    """Microseconds of a stage, on lines between the measured ones."""
    return float(np.interp(block_n, *_STAGE_US))


def estimate(problem: Problem, config: Config, gpu: Gpu, tile_us: float = _TILE_US) -> float:
    """Waves of tiles, each as long as its stages take; or the memory's time.

    ``tile_us`` is the time of the stores of a tile of 128 x 256, before the last one.
    """
    plan = Plan.of(config, problem, gpu)
    waves = ceil(plan.tiles / max(int(plan.clusters * CLUSTER_FIT[plan.split_k]), 1))
    busy_us = waves * ceil(plan.k_blocks / plan.split_k) * _stage_us(plan.block_n)
    busy_us += (_END_US + tile_us * (waves - 1)) * plan.block_n / 256
    busy_us += _EXCHANGE_US * (plan.split_k > 1)
    widen_us = 0.0
    if problem["dtype"] == FP8:
        widen_us = copy_us(3 * problem["M"] * problem["K"], gpu)
    return widen_us + overlapped_us(busy_us, ENTRY.bytes_moved(problem), gpu)


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="wgmma",
    summary="for many rows: packed weights in a ring are decoded to registers, which wgmma reads",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)
