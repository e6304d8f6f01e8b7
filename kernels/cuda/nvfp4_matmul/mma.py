"""`nvfp4_matmul` for few rows: weights from global memory to registers, mma.sync, k split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    WEIGHTS,
    activation,
    is_empty,
    is_nvfp4,
    k_tiles,
    row_tiles,
    sizes,
    types,
    why_not_tiles,
)
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS
from kernelcat.reference.nvfp4_matmul import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

WARPS = (16, 8)
"""Of a block: more where only one block fits an SM, for its loads in flight."""
MAX_ROWS = 64
"""Of A; with more wgmma reads them from shared memory less often."""
SUMS_PITCH = 20
"""Floats between rows of A in a warp's sums of a tile."""
FIT = {1: 1.0, 2: 1.0, 4: 0.9, 8: 0.84}
"""Share of an even division of SMs into clusters that runs at a time: a cluster is in one GPC, and
some have odd numbers of SMs."""

SPACE = {"row_tiles": (1, 2), "warp_rows": (1, 2, 4), "cluster": (1, 2, 4, 8)}
"""
row_tiles : tiles of 16 rows of W a warp has
warp_rows : warps below each other; the others split k
cluster : blocks that split k
"""


@dataclass(frozen=True)
class Plan:
    """A configuration in numbers, for one problem."""

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
        chosen = (config[name] for name in ("row_tiles", "warp_rows", "cluster"))
        sizes = (problem["M"], row_tiles(problem), k_tiles(problem))
        many, few = WARPS
        plan = Plan(*sizes, *chosen, gpu.sms, few)
        larger = replace(plan, warps=many)
        alone = plan.residents(gpu) == 1 and larger.residents(gpu) == 1
        return larger if alone and not plan.has_many_sums else plan

    @property
    def col_tiles(self) -> int:
        """Of 8 rows of A: a power of two."""
        return 1 << (ceil(self.m / 8) - 1).bit_length()

    @property
    def unit_tiles(self) -> int:
        return self.row_tiles * self.warp_rows

    @property
    def units(self) -> int:
        return ceil(self.rows / self.unit_tiles)

    @property
    def slices(self) -> int:
        """Of k, in a block."""
        return self.warps // self.warp_rows

    @property
    def slice_tiles(self) -> int:
        return ceil(self.k_tiles / (self.slices * self.cluster))

    @property
    def quads(self) -> int:
        """Sums of four rows of W that a cluster finishes of a unit."""
        return 4 * self.unit_tiles * self.m

    @property
    def shared_bytes(self) -> int:
        """A's columns, warps' sums, what blocks send each other, two barriers."""
        a = self.m * (2 * TILE_COLS * self.slices * self.slice_tiles + 16)
        partials = self.slices * self.unit_tiles * self.m * SUMS_PITCH * 4
        if self.cluster == 1:
            return a + partials
        return a + partials + 2 * self.cluster * ceil(self.quads / self.cluster) * 16 + 16

    @property
    def has_many_sums(self) -> bool:
        """More than 128 registers a thread have room for, beside what is in flight."""
        return self.col_tiles * self.row_tiles >= 8

    @property
    def registers_for(self) -> int:
        """Blocks an SM that registers are shared among."""
        if self.has_many_sums or self.warps == max(WARPS):
            return 1
        return 3 if self.row_tiles == 1 and self.col_tiles <= 2 else 2

    def residents(self, gpu: Gpu) -> int:
        """Blocks an SM; each also takes 1 KB that is the system's."""
        return min((gpu.shared_bytes + KB) // (self.shared_bytes + KB), self.registers_for)

    def clusters(self, gpu: Gpu) -> int:
        """That run at a time, or as many as there are units."""
        most = int(self.sms * self.residents(gpu) // self.cluster * FIT[self.cluster])
        return max(min(self.units, most), 1)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan = Plan.of(config, problem, gpu)
    arguments = (
        *types(problem), is_nvfp4(problem), activation(problem), plan.col_tiles, plan.row_tiles,
        plan.warp_rows, plan.warps, plan.cluster, plan.registers_for,
    )  # fmt: skip
    kernel = f"kernelcat::nvfp4_matmul_mma<{', '.join(map(str, arguments))}>"
    step = Step(
        CudaSource("nvfp4_matmul/mma.cu", kernel),
        (plan.clusters(gpu) * plan.cluster, 1, 1),
        (Pointer("a"), *WEIGHTS, *EPILOGUE, *sizes(problem), Int32(plan.slice_tiles)),
        plan.warps * 32,
        plan.shared_bytes,
        (plan.cluster, 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    why = why_not_tiles(problem)
    if why or is_empty(problem):
        return why
    if problem["M"] > MAX_ROWS:
        return f"{problem['M']} rows of A are more than {MAX_ROWS}"
    plan = Plan.of(config, problem, gpu)
    if plan.shared_bytes > gpu.shared_bytes:
        return f"A's columns take {plan.shared_bytes} bytes of {gpu.shared_bytes} of shared memory"
    if plan.cluster > plan.sms:
        return f"{plan.cluster} blocks of a cluster need as many SMs"
    if plan.quads < plan.cluster:
        return f"{plan.cluster} blocks have {plan.quads} quads of sums to finish"
    if plan.cluster > 1 and plan.slices * plan.cluster > plan.k_tiles:
        return f"{plan.slices * plan.cluster} slices of {plan.k_tiles} tiles of k"
    if plan.unit_tiles > 1 and plan.unit_tiles >= 2 * plan.rows:
        return f"units of {plan.unit_tiles * TILE_ROWS} rows are mostly empty"
    return None


LATENCY = 1.0e-6
"""Seconds from a load to its words, when all SMs ask."""
TILE_NS = 13.0
"""Nanoseconds of an SM's issue slots for decoding a tile of 16 x 64."""
PRODUCT_NS = 2.0
"""And for its products with 8 rows of A."""
UNIT_US = 0.5
"""A barrier, and adding up the sums of warps."""
CLUSTER_US = 1.2
"""The same of blocks; some of either is under other blocks' loads."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """An SM's weights by its issue slots or its share of bandwidth, then what is not overlapped."""
    if is_empty(problem):
        return LAUNCH_US
    plan = Plan.of(config, problem, gpu)
    clusters, residents = plan.clusters(gpu), max(plan.residents(gpu), 1)
    rounds = ceil(plan.units / clusters)
    groups = ceil(plan.slice_tiles / 4) * 4
    blocks = clusters * plan.cluster
    crowd = min(ceil(blocks / plan.sms), residents)  # blocks of the busiest SM
    tiles = rounds * plan.unit_tiles * plan.slices * plan.slice_tiles * crowd
    scale = 0.0625 if problem["format"] == "nvfp4" else 0.03125
    tile_bytes = TILE_ROWS * TILE_COLS * (0.5 + scale)
    in_flight = crowd * plan.warps * plan.row_tiles * 4 * 512 * plan.slice_tiles / groups
    fair = gpu.bandwidth * 0.92 / min(plan.sms, blocks)
    rate = min(fair, in_flight / LATENCY, 2 * gpu.bandwidth / plan.sms)
    issue_ns = TILE_NS + PRODUCT_NS * plan.col_tiles
    busy_us = tiles * max(tile_bytes / rate * 1e6, issue_ns * 1e-3)
    staged = blocks * plan.m * plan.slices * plan.slice_tiles * TILE_COLS * 2
    start_us = 1.0 + staged / (gpu.bandwidth * 1.2) * 1e6
    ends_us = UNIT_US + (CLUSTER_US if plan.cluster > 1 else 0.0)
    overlap = 1.0 if crowd == 1 else 0.5
    memory_us = copy_us(ENTRY.bytes_moved(problem), gpu, 0.92) - LAUNCH_US
    return LAUNCH_US + start_us + max(busy_us, memory_us) + ends_us * (1 + overlap * (rounds - 1))


def _default(problem: Problem, gpu: Gpu) -> Config:
    serving = IMPLEMENTATION.configs(problem, gpu)
    fallback = Config({name: values[0] for name, values in SPACE.items()})
    return min(serving, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="mma",
    summary="for few rows: packed weights stream to registers, warps and clusters split k",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_reject,
    default=_default,
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
