"""`gemm` by stream-K on Hopper: the tiles of the last waves are dealt out by k-blocks.

Thread blocks then end together whatever the number of tiles. Osama et al., Stream-K (PPoPP 2023);
the mainloop and the stores are those of `wgmma`.
"""

from __future__ import annotations

from functools import lru_cache

from kernelcat.catalog.cost_model import least_estimate
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
from kernelcat.kernels.cuda.common.stream_k import WAVES, StreamPlan
from kernelcat.kernels.cuda.gemm.operands import (
    BLOCK_K,
    EPILOGUE,
    d_cols,
    epilogue,
    operand_map,
    why_not_tma,
)
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.kernels.cuda.gemm.wgmma import illegal_tiles
from kernelcat.runtime.gpu import Gpu

SLACK = 1.15
"""Estimate of the slowest configuration that is tried over the best one's."""

SPACE = {
    "tile": (
        *("128x64", "128x96", "128x128", "128x160", "128x192", "128x224", "128x256"),
        *("256x128", "256x160"),
    ),
    "swap": (False, True),
    "waves": WAVES,
}
"""
tile : BLOCK_M x BLOCK_N of Z = A @ B^T, or of Z^T where ``swap``
waves : waves of tiles that are streamed, at most
"""


def _tiles(config: Config, problem: Problem, gpu: Gpu) -> Plan:
    """The tiles of a configuration, as those of `wgmma`."""
    return Plan.of(
        Config(
            tile=config["tile"], swap=config["swap"], schedule="cooperative", cluster="1x1",
            split_k=1,
        ),
        problem,
        gpu,
    )  # fmt: skip


def _stream(tiles: Plan, config: Config) -> StreamPlan:
    return StreamPlan(tiles.num_tiles, tiles.num_k_blocks, config["waves"], tiles.sms)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tiles, dtype = _tiles(config, problem, gpu), problem["dtype"]
    stream = _stream(tiles, config)
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
        (stream.num_blocks, 1, 1),
        (
            *(map_a, map_b, map_d, *EPILOGUE, Pointer("partials"), Pointer("counters")),
            *(*sizes(problem), Int32(stream.num_streamed), Int32(tiles.group_m)),
        ),
        tiles.num_threads,
        tiles.shared_bytes(gpu),
        programmatic=True,
    )
    return Program((step,), stream.workspaces(tiles.block_m * tiles.block_n, tiles.num_consumers))


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tiles = _tiles(config, problem, gpu)
    return (
        why_not_tma(problem)
        or illegal_tiles(tiles, problem, gpu)
        or _stream(tiles, config).why_illegal()
    )


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tiles = _tiles(config, problem, gpu)
    return _unpromising_tiles(tiles) or _stream(tiles, config).why_unpromising()


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    best = _best(problem, gpu)
    if best is not None and _estimate(problem, config, gpu) > SLACK * best[0]:
        return f"estimated to be more than {SLACK} times slower than {best[1]['tile']}"
    return None


def _unpromising_tiles(tiles: Plan) -> str | None:
    if tiles.num_tiles and (
        tiles.block_m >= 2 * tiles.rows or tiles.block_n >= 2 * tiles.cols > 64
    ):
        return f"tiles of {tiles.block_m} x {tiles.block_n} are mostly empty"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_RATE = {64: 0.68, 96: 0.80, 128: 0.88, 160: 0.91, 192: 0.93}
"""BLOCK_N -> rate of wgmma over that of a wide one; narrow ones wait for shared memory."""

_L2_BYTES = 75e9
"""Bytes that L2 gives one SM in a second when all SMs load."""

_TILE_US = 2.0
"""Storing a tile of 128 x 256 while nothing is multiplied."""


MEASURED = 1.4
"""Measured over modelled time on an H200: 1.22 to 1.69 in five problems, docs/measured.md."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """K-blocks and stores of the busiest thread block and the sums it adds up; or the memory's
    time."""
    tiles = _tiles(config, problem, gpu)
    stream = _stream(tiles, config)
    rate = gpu.flops[problem["dtype"]] / gpu.sms * 0.85 * _RATE.get(tiles.block_n, 0.95)
    math_us = 2 * tiles.block_m * tiles.block_n * BLOCK_K / rate * 1e6
    load_us = tiles.stage_bytes / _L2_BYTES * 1e6
    busy_us = stream.num_k_blocks * max(math_us, load_us)
    area = tiles.block_m * tiles.block_n / (128 * 256)
    busy_us += _TILE_US * area * (stream.num_whole // stream.sms + 1)
    busy_us += stream.addition_us(min(tiles.block_n, tiles.cols) * tiles.block_m)
    m, n, k = problem["M"], problem["N"], problem["K"]
    return MEASURED * overlapped_us(busy_us, 2 * (m * k + n * k + m * n), gpu)


@lru_cache(maxsize=1024)
def _best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    return least_estimate(IMPLEMENTATION, problem, gpu)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="stream_k",
    summary="stream-K: the tiles of the last waves are dealt out by k-blocks",
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
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
        "dependent launch": "ACQBULK",
    },
    rank=3,
)
