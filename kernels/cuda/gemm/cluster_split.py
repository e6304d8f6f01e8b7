"""`gemm` by split-K in clusters on Hopper: for products of few tiles.

The thread blocks of a cluster split a tile's k range and add up their sums in distributed shared
memory, each in a slice of the tile; `wgmma` and `stream_k` take sums through L2 to one thread
block. The mainloop and the stores are those of `wgmma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from kernelcat.catalog import ring_model
from kernelcat.catalog.cost_model import least_estimate, resident_clusters
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance, why_no_grid
from kernelcat.kernels.cuda.common.persistent import illegal_split, sizes
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, d_map, epilogue, operand_map, why_not_tma
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.kernels.cuda.gemm.wgmma import illegal_tiles
from kernelcat.reference.gemm import ENTRY
from kernelcat.runtime.gpu import Gpu

SLACK = 1.3
"""Estimate of the slowest configuration that is tried over the best one's: wider than that of
`wgmma` until estimates have been compared with a GPU."""

MAX_WAVES = 2
"""Waves of clusters: more tiles are for persistent thread blocks, which store one tile while they
load the next."""

SPACE = {
    "tile": (
        *("64x64", "64x96", "64x128", "64x192", "64x256"),
        *("128x64", "128x96", "128x128", "128x160", "128x192", "128x256"),
    ),
    "swap": (False, True),
    "split_k": (2, 3, 4, 6, 8),
}
"""
tile : BLOCK_M x BLOCK_N of Z = A @ B^T, or of Z^T where ``swap``
split_k : thread blocks of a cluster, which split a tile's k range
"""


@dataclass
class SplitPlan(Plan):
    """A configuration in numbers, for one problem: all tiles are split.

    ``sms`` are those that clusters fill with one thread block each.
    """

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> SplitPlan:
        split_k = config["split_k"]
        filled = resident_clusters(gpu.sms, split_k) * split_k
        *numbers, _ = Plan.fields(config, problem, gpu)
        pair = 2 if problem["activation"] == "swiglu" else 1
        return SplitPlan(*numbers, filled, False, pair, problem["residual"])

    @property
    def slice_cols(self) -> int:
        """Columns of the tile that a thread block finishes."""
        return self.block_n // self.split_k

    @property
    def slice(self) -> Plan:
        """What a thread block finishes, as a tile of its own."""
        return Plan(
            self.rows, self.cols, self.k, self.block_m, self.slice_cols, self.swap, self.cluster_m,
            self.cluster_n, self.split_k, self.sms, self.pingpong, self.pair,
            self.has_residual,
        )  # fmt: skip

    @property
    def chunk(self) -> tuple[int, int]:
        return self.slice.chunk

    @property
    def fixed_bytes(self) -> int:
        """As of a slice's; the count of arrived sums is among the 64 bytes."""
        return self.slice.fixed_bytes

    @property
    def num_whole_tiles(self) -> int:
        return 0

    @property
    def residents(self) -> int:
        """Thread blocks on the busiest SM."""
        return min(ceil(self.num_work_items / self.sms), self.blocks_per_sm)

    @property
    def num_waves(self) -> int:
        return ceil(self.num_work_items / (self.sms * self.blocks_per_sm))


@lru_cache(maxsize=256)
def _plan(config: Config, problem: Problem, gpu: Gpu) -> SplitPlan:
    """A call asks for the same plan in each of the following steps."""
    return SplitPlan.of(config, problem, gpu)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    plan = _plan(config, problem, gpu)
    if plan.num_tiles == 0:
        return Program(())
    a, b = ("b", "a") if plan.swap else ("a", "b")
    map_a = operand_map(a, problem, plan.rows, plan.block_m)
    map_b = operand_map(b, problem, plan.cols, plan.block_n)
    map_d = d_map(problem, plan.chunk)
    source = instance(
        "gemm/cluster_split.cu",
        "gemm_cluster_split",
        *(problem["dtype"], plan.block_m, plan.block_n, plan.num_stages(gpu), plan.swap),
        *(plan.split_k, map_d is not None, *epilogue(problem)),
    )
    step = Step(
        source,
        (plan.num_work_items, 1, 1),
        (map_a, map_b, map_d or map_a, *EPILOGUE, *sizes(problem), Int32(plan.group_m)),
        plan.num_threads,
        plan.shared_bytes(gpu),
        (plan.split_k, 1, 1),
        programmatic=True,
    )
    return Program((step,))


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = _plan(config, problem, gpu)
    return (
        why_not_tma(problem)
        or _illegal_slice(plan)
        or illegal_tiles(plan, problem, gpu)
        or illegal_split(plan)
        or why_no_grid(plan.num_work_items)
    )


def _illegal_slice(plan: SplitPlan) -> str | None:
    multiple = 16 if plan.swap else 16 * plan.pair
    if plan.block_n % plan.split_k or plan.slice_cols % multiple:
        return (
            f"{plan.block_n} columns in {plan.split_k} slices: each must be a multiple of "
            f"{multiple}"
        )
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = _plan(config, problem, gpu)
    if plan.num_waves > MAX_WAVES:
        return f"{plan.num_waves} waves of clusters, whose stores overlap with nothing"
    if plan.num_tiles and (plan.block_m >= 2 * plan.rows or plan.block_n >= 2 * plan.cols > 64):
        return f"tiles of {plan.block_m} x {plan.block_n} are mostly empty"
    if plan.split_k * 2 > plan.num_k_blocks:
        return f"{plan.split_k} splits of {plan.num_k_blocks} k-blocks have fewer than two each"
    return None


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    best = _best(problem, gpu)
    if best is not None and _estimate(problem, config, gpu) > SLACK * best[0]:
        return f"estimated to be more than {SLACK} times slower than {best[1]['tile']}"
    return None


# ---- which one without measuring ---------------------------------------------------------------


def _plan_us(plan: SplitPlan, problem: Problem, gpu: Gpu) -> float:
    """Waves of clusters: k-blocks, the exchange of sums, a slice's stores; or the memory's time."""
    turns = plan.residents * plan.num_waves
    sums_us = ring_model.BITS_16.cluster_sums_us(plan.split_k, plan.block_m * plan.block_n)
    tiles = plan.ring_tiles(turns / plan.split_k, turns / plan.split_k)
    return ring_model.BITS_16.gemm_us(
        tiles, gpu, problem["dtype"], ENTRY.bytes_moved(problem), splits_k=True,
        extra_us=sums_us * turns,
    )  # fmt: skip


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _plan_us(_plan(config, problem, gpu), problem, gpu)


@lru_cache(maxsize=1024)
def _best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    return least_estimate(IMPLEMENTATION, problem, gpu)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="cluster_split",
    summary="few tiles: a cluster splits k and adds up its sums in distributed shared memory",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    too_slow=_too_slow,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "distributed shared memory": "STAS",
        "stmatrix": "STSM",
        "dependent launch": "ACQBULK",
    },
    rank=3,
)
