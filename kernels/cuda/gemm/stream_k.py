"""`gemm` by stream-K on Hopper: the tiles of the last waves are dealt out by k-blocks.

Thread blocks then end together whatever the number of tiles. Osama et al., Stream-K (PPoPP 2023);
the mainloop and the stores are those of `wgmma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil

from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import overlapped_us, sizes
from kernelcat.kernels.cuda.gemm.operands import (
    BLOCK_K,
    EPILOGUE,
    d_cols,
    epilogue,
    operand_map,
    why_not_tma,
)
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.runtime.gpu import Gpu

MIN_STAGES = 3
MIN_K_BLOCKS = 4
"""K-blocks that a thread block multiplies, at least, of streamed tiles."""
SLACK = 1.15
"""Estimate of the slowest configuration that is tried over the best one's."""

SPACE = {
    "tile": (
        *("128x64", "128x96", "128x128", "128x160", "128x192", "128x224", "128x256"),
        *("256x128", "256x160"),
    ),
    "swap": (False, True),
    "waves": (1, 2),
}
"""
tile : BLOCK_M x BLOCK_N of Z = A @ B^T, or of Z^T where ``swap``
waves : waves of tiles that are streamed, rounded down to what is left after whole waves
"""


@dataclass(frozen=True)
class StreamPlan:
    """A configuration in numbers, for one problem: ``tiles``, of which the first are streamed."""

    tiles: Plan
    waves: int
    sms: int

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> StreamPlan:
        whole = Config(
            tile=config["tile"], swap=config["swap"], schedule="cooperative", cluster="1x1",
            split_k=1,
        )  # fmt: skip
        return StreamPlan(Plan.of(whole, problem, gpu), config["waves"], gpu.sms)

    @property
    def num_whole(self) -> int:
        """Tiles that one thread block computes, in whole waves."""
        return max(self.tiles.num_tiles // self.sms - self.waves + 1, 0) * self.sms

    @property
    def num_streamed(self) -> int:
        return self.tiles.num_tiles - self.num_whole

    @property
    def num_k_blocks(self) -> int:
        """K-blocks of streamed tiles that the busiest thread block multiplies."""
        return ceil(self.num_streamed * self.tiles.num_k_blocks / self.sms)

    @property
    def num_sharers(self) -> int:
        """Thread blocks that share a streamed tile, at most."""
        return ceil(self.tiles.num_k_blocks / max(self.num_k_blocks, 1)) + 1

    @property
    def workspaces(self) -> dict[str, int]:
        tile_bytes = 4 * self.tiles.block_m * self.tiles.block_n
        return {
            "partials": (self.num_streamed + self.sms - 1) * tile_bytes,
            "counters": self.num_streamed * self.tiles.num_consumers * 4,
        }


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    plan, dtype = StreamPlan.of(config, problem, gpu), problem["dtype"]
    tiles = plan.tiles
    if tiles.num_tiles == 0:
        return Program(())
    columns, (chunk_rows, chunk_cols) = d_cols(problem), tiles.chunk
    a, b = ("b", "a") if tiles.swap else ("a", "b")
    map_a = operand_map(a, problem, tiles.rows, tiles.block_m)
    map_b = operand_map(b, problem, tiles.cols, tiles.block_n)
    by_tma = columns % 8 == 0
    map_d = (
        TensorMap(
            *("d", dtype, (columns, problem["M"]), (2 * columns,), (chunk_cols, chunk_rows)),
            2 * chunk_cols,
        )
        if by_tma
        else map_a
    )
    source = instance(
        "gemm/stream_k.cu",
        "gemm_stream_k",
        *(dtype, tiles.block_m, tiles.block_n, tiles.num_stages(gpu), tiles.swap, by_tma),
        *epilogue(problem),
    )
    step = Step(
        source,
        (plan.sms, 1, 1),
        (
            *(map_a, map_b, map_d, *EPILOGUE, Pointer("partials"), Pointer("counters")),
            *(*sizes(problem), Int32(plan.num_streamed), Int32(tiles.group_m)),
        ),
        tiles.num_threads,
        tiles.shared_bytes(gpu),
        programmatic=True,
    )
    return Program((step,), plan.workspaces)


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = StreamPlan.of(config, problem, gpu)
    return why_not_tma(problem) or _illegal_plan(plan, problem, gpu)


def _illegal_plan(plan: StreamPlan, problem: Problem, gpu: Gpu) -> str | None:
    """What the kernel or the hardware cannot do."""
    tiles = plan.tiles
    if tiles.num_tiles == 0:
        return None
    if tiles.num_accumulators > ((96 if tiles.swap else 128) if problem["residual"] else 160):
        return f"{tiles.num_accumulators} accumulators a thread do not fit in registers"
    if tiles.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if not tiles.swap and tiles.block_n // tiles.pair % 16:
        return (
            f"{tiles.block_n} columns of Z make {tiles.block_n // tiles.pair} of D, which must be "
            "a multiple of 16"
        )
    if plan.num_streamed * tiles.num_k_blocks < MIN_K_BLOCKS * plan.sms:
        return (
            f"{plan.num_streamed} streamed tiles of {tiles.num_k_blocks} k-blocks leave fewer than "
            f"{MIN_K_BLOCKS} k-blocks for each of {plan.sms} thread blocks"
        )
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = StreamPlan.of(config, problem, gpu)
    why = _unpromising_tile(plan)
    best = None if why else _best(problem, gpu)
    if best is not None and _plan_us(plan, problem, gpu) > SLACK * best[0]:
        return f"estimated to be more than {SLACK} times slower than {best[1]['tile']}"
    return why


def _unpromising_tile(plan: StreamPlan) -> str | None:
    tiles = plan.tiles
    if tiles.num_tiles == 0:
        return None
    if tiles.block_m >= 2 * tiles.rows or tiles.block_n >= 2 * tiles.cols > 64:
        return f"tiles of {tiles.block_m} x {tiles.block_n} are mostly empty"
    if plan.num_streamed % plan.sms == 0:
        return f"{plan.num_streamed} streamed tiles are whole waves for {plan.sms} thread blocks"
    if plan.waves > 1 and tiles.num_tiles < plan.sms:
        return "all tiles are streamed with waves=1"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_RATE = {64: 0.68, 96: 0.80, 128: 0.88, 160: 0.91, 192: 0.93}
"""BLOCK_N -> rate of wgmma over that of a wide one; narrow ones wait for shared memory."""

_L2_BYTES = 75e9
"""Bytes that L2 gives one SM in a second when all SMs load."""

_TILE_US = 2.0
"""Storing a tile of 128 x 256 while nothing is multiplied."""

_MEETING_US = 1.5
"""Two atomics and the barriers around them."""

_PARTIAL_BYTES = 80e9
"""Bytes of partial sums that one SM writes, or reads, in a second."""


def _plan_us(plan: StreamPlan, problem: Problem, gpu: Gpu) -> float:
    """K-blocks of a thread block, what it stores, and what it writes and reads of shared tiles; or
    the memory's time."""
    tiles = plan.tiles
    rate = gpu.flops[problem["dtype"]] / gpu.sms * 0.85 * _RATE.get(tiles.block_n, 0.95)
    math_us = 2 * tiles.block_m * tiles.block_n * BLOCK_K / rate * 1e6
    load_us = (tiles.block_m + tiles.block_n) * BLOCK_K * 2 / _L2_BYTES * 1e6
    num_whole = plan.num_whole // plan.sms
    num_k_blocks = plan.num_k_blocks + num_whole * tiles.num_k_blocks
    busy_us = num_k_blocks * max(math_us, load_us)
    area = tiles.block_m * tiles.block_n / (128 * 256)
    busy_us += _TILE_US * area * (num_whole + 1)
    tile_bytes = min(tiles.block_n, tiles.cols) * tiles.block_m * 4
    busy_us += _MEETING_US + plan.num_sharers * tile_bytes / _PARTIAL_BYTES * 1e6
    m, n, k = problem["M"], problem["N"], problem["K"]
    return overlapped_us(busy_us, 2 * (m * k + n * k + m * n), gpu)


@lru_cache(maxsize=1024)
def _best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """The least estimate, and its configuration."""
    best: tuple[float, Config] | None = None
    for values in product(*SPACE.values()):
        config = Config(dict(zip(SPACE, values, strict=True)))
        plan = StreamPlan.of(config, problem, gpu)
        if _illegal_plan(plan, problem, gpu) or _unpromising_tile(plan):
            continue
        us = _plan_us(plan, problem, gpu)
        if best is None or us < best[0]:
            best = us, config
    return best


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _plan_us(StreamPlan.of(config, problem, gpu), problem, gpu)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The configuration of the least estimate, or the first legal one."""
    best = _best(problem, gpu)
    if best is not None:
        return best[1]
    configs = [Config(dict(zip(SPACE, values, strict=True))) for values in product(*SPACE.values())]
    return next((c for c in configs if _illegal(c, problem, gpu) is None), configs[0])


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="stream_k",
    summary="stream-K: the tiles of the last waves are dealt out by k-blocks",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
        "dependent launch": "ACQBULK",
    },
    rank=3,
    unverified="not run on a GPU yet",
)
