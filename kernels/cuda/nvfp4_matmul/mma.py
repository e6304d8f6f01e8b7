"""`nvfp4_matmul` for few rows of A: weights go from global memory to registers, then mma.sync."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kernelcat.catalog.cost_model import CLUSTER_FIT, LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    WEIGHTS,
    activation,
    is_empty,
    is_nvfp4,
    k_tiles,
    out_type,
    row_tiles,
    why_not_tiles,
)
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.nvfp4_matmul import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

WARPS = (16, 8)
"""Warps of a thread block: 16 where an SM holds only one thread block, for more loads in flight."""
MAX_ROWS = 64
"""Rows of A at most; for more rows, wgmma reads A from shared memory less often."""
SUMS_PITCH = 20
"""kSumsPitch: floats from one row of A to the next, in a warp's sums of a tile."""

SPACE = {"row_tiles": (1, 2), "warp_rows": (1, 2, 4), "cluster": (1, 2, 4, 8)}
"""
row_tiles : tile rows of W, 16 rows each, that a warp multiplies at a time
warp_rows : warps with different tile rows; a thread block's other warps split k
cluster : thread blocks of a cluster, which split k
"""


@dataclass(frozen=True)
class Plan:
    """A configuration in numbers, for one problem.

    A work item of a cluster is ``unit_tiles`` tile rows of W: see ``mma.cu``.
    """

    m: int
    rows: int  # tile rows of W
    k_tiles: int
    row_tiles: int
    warp_rows: int
    cluster: int
    sms: int
    warps: int

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        max_warps, min_warps = WARPS
        plan = Plan(
            m=problem["M"],
            rows=row_tiles(problem),
            k_tiles=k_tiles(problem),
            row_tiles=config["row_tiles"],
            warp_rows=config["warp_rows"],
            cluster=config["cluster"],
            sms=gpu.sms,
            warps=min_warps,
        )
        larger = replace(plan, warps=max_warps)
        is_single = plan.residents(gpu) == 1 and larger.residents(gpu) == 1
        return larger if is_single and not plan.has_many_sums else plan

    @property
    def col_tiles(self) -> int:
        """Tiles of 8 rows that cover A, rounded up to a power of two."""
        return 1 << (ceil(self.m / 8) - 1).bit_length()

    @property
    def unit_tiles(self) -> int:
        """Tile rows of W in a work item."""
        return self.row_tiles * self.warp_rows

    @property
    def units(self) -> int:
        """Work items."""
        return ceil(self.rows / self.unit_tiles)

    @property
    def slices(self) -> int:
        """Splits of k in a thread block."""
        return self.warps // self.warp_rows

    @property
    def slice_tiles(self) -> int:
        """Tile columns of W in a split."""
        return ceil(self.k_tiles / (self.slices * self.cluster))

    @property
    def quads(self) -> int:
        """Groups of four sums, of four rows of W, in a cluster's work item."""
        return 4 * self.unit_tiles * self.m

    @property
    def shared_bytes(self) -> int:
        """A's columns, the warps' partial sums, what other thread blocks send, two barriers."""
        a = self.m * (2 * TILE_COLS * self.slices * self.slice_tiles + 16)
        partials = self.slices * self.unit_tiles * self.m * SUMS_PITCH * 4
        if self.cluster == 1:
            return a + partials
        return a + partials + 2 * self.cluster * ceil(self.quads / self.cluster) * 16 + 16

    @property
    def has_many_sums(self) -> bool:
        """Whether sums and loads in flight need more than 128 registers of a thread."""
        return self.col_tiles * self.row_tiles >= 8

    @property
    def registers_for(self) -> int:
        """Thread blocks of an SM for which the compiler must leave registers: kBlocksPerSm."""
        if self.has_many_sums or self.warps == max(WARPS):
            return 1
        return 3 if self.row_tiles == 1 and self.col_tiles <= 2 else 2

    def residents(self, gpu: Gpu) -> int:
        """Resident thread blocks of an SM; the system takes 1 KB of shared memory for each."""
        return min((gpu.shared_bytes + KB) // (self.shared_bytes + KB), self.registers_for)

    def clusters(self, gpu: Gpu) -> int:
        """Clusters to launch: as many as run at a time, but no more than there are work items."""
        clusters = self.sms * self.residents(gpu) // self.cluster
        max_clusters = int(clusters * CLUSTER_FIT[self.cluster])
        return max(min(self.units, max_clusters), 1)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan = Plan.of(config, problem, gpu)
    source = instance(
        "nvfp4_matmul/mma.cu",
        "nvfp4_matmul_mma",
        *(problem["dtype"], out_type(problem), is_nvfp4(problem), activation(problem)),
        *(plan.col_tiles, plan.row_tiles, plan.warp_rows),
        *(plan.warps, plan.cluster, plan.registers_for),
    )
    step = Step(
        source,
        (plan.clusters(gpu) * plan.cluster, 1, 1),
        (Pointer("a"), *WEIGHTS, *EPILOGUE, *sizes(problem), Int32(plan.slice_tiles)),
        plan.warps * 32,
        plan.shared_bytes,
        (plan.cluster, 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    why = why_not_tiles(problem)
    if why or is_empty(problem):
        return why
    if problem["M"] > MAX_ROWS:
        return f"{problem['M']} rows of A are more than the kernel's {MAX_ROWS}"
    plan = Plan.of(config, problem, gpu)
    if plan.shared_bytes > gpu.shared_bytes:
        return (
            f"A's columns and the sums take {plan.shared_bytes} bytes, more than the "
            f"{gpu.shared_bytes} bytes of shared memory"
        )
    if plan.cluster > plan.sms:
        return f"clusters of {plan.cluster} thread blocks do not fit on {plan.sms} SMs"
    if plan.quads < plan.cluster:
        return (
            f"work items have {4 * plan.quads} sums, and each of a cluster's {plan.cluster} "
            "thread blocks must finish four"
        )
    if plan.cluster > 1 and plan.slices * plan.cluster > plan.k_tiles:
        return (
            f"K={problem['K']} has {plan.k_tiles} tiles of {TILE_COLS} columns, too few for "
            f"{plan.slices * plan.cluster} splits"
        )
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    plan = Plan.of(config, problem, gpu)
    if plan.unit_tiles > 1 and plan.unit_tiles >= 2 * plan.rows:
        unit_rows = plan.unit_tiles * TILE_ROWS
        return f"work items of {unit_rows} rows of W are mostly empty at N={problem['N']}"
    return None


GROUP_US = 0.89
"""What a warp waits for four tiles of W, which it loads at a time. With the numbers below fitted to
146 times of this kernel on an H200, which differ from the estimate by 1.11."""
TILE_NS = 17.8
"""Nanoseconds of an SM's issue slots for decoding a tile of 16 x 64."""
PRODUCT_NS = 0.75
"""Nanoseconds of an SM's issue slots for the products of a tile of 16 x 64 and 8 rows of A."""
SUMS_NS = 3.1
"""Adding up the sums of a thread block's warps: for each tile row of W, row of A and split of k."""
CLUSTER_US = {1: 0.0, 2: 0.33, 4: 1.0, 8: 0.8}
"""Thread blocks of a cluster -> microseconds of adding up their sums, for each work item."""
STAGED_SHARE = 0.6
"""What the SMs get of A, which each thread block copies first, over the bandwidth of DRAM."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of an SM's weights by issue slots or by bandwidth, and what is not overlapped."""
    if is_empty(problem):
        return LAUNCH_US
    plan = Plan.of(config, problem, gpu)
    clusters, residents = plan.clusters(gpu), max(plan.residents(gpu), 1)
    rounds = ceil(plan.units / clusters)
    blocks = clusters * plan.cluster
    busiest = min(ceil(blocks / plan.sms), residents)  # thread blocks of the busiest SM
    tiles = rounds * plan.unit_tiles * plan.slices * plan.slice_tiles * busiest
    scale = 0.0625 if problem["format"] == "nvfp4" else 0.03125
    tile_bytes = TILE_ROWS * TILE_COLS * (0.5 + scale)
    rate = gpu.bandwidth * min(0.92 / min(plan.sms, blocks), 2 / plan.sms)
    issue_ns = TILE_NS + PRODUCT_NS * plan.col_tiles
    busy_us = tiles * max(tile_bytes / rate * 1e6, issue_ns * 1e-3)
    staged = blocks * plan.m * plan.slices * plan.slice_tiles * TILE_COLS * 2
    staged_us = staged / (gpu.bandwidth * STAGED_SHARE) * 1e6
    memory_us = copy_us(ENTRY.bytes_moved(problem), gpu, 0.92) - LAUNCH_US
    sums_us = SUMS_NS * 1e-3 * plan.unit_tiles * plan.m * plan.slices
    sums_us += CLUSTER_US[plan.cluster]
    waits_us = GROUP_US * ceil(plan.slice_tiles / 4) + sums_us
    return LAUNCH_US + staged_us + max(busy_us, memory_us) + rounds * waits_us


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="mma",
    summary="for few rows: packed weights go straight to registers; warps and clusters split k",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "ldmatrix": "LDSM",
        "16-byte loads": "LDG*128",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)
