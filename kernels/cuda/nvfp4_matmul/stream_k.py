"""`nvfp4_matmul` by stream-K on Hopper: the tiles of the last waves are dealt out by k-blocks.

Thread blocks then end together whatever the number of tiles, and no cluster has to fit into a GPC.
Osama et al., Stream-K (PPoPP 2023); the mainloop and the stores are those of `wgmma`.
"""

from __future__ import annotations

from kernelcat.catalog.cost_model import copy_us
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
from kernelcat.kernels.cuda.common.packed_weights import weight_maps
from kernelcat.kernels.cuda.common.persistent import overlapped_us, sizes
from kernelcat.kernels.cuda.common.stream_k import WAVES, StreamPlan
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
from kernelcat.kernels.cuda.nvfp4_matmul.wgmma import CONSUMERS, GROUP_M, Plan, _widen_rows
from kernelcat.reference.nvfp4_matmul import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

BLOCK_M = 128
"""Rows of W in a tile."""

SPACE = {"tile": ("128x64", "128x128", "128x192", "128x256"), "waves": WAVES}
"""
tile : rows of W x rows of A
waves : waves of tiles that are streamed, at most
"""


def _tiles(config: Config, problem: Problem, gpu: Gpu) -> Plan:
    """The tiles of a configuration, as those of `wgmma`."""
    return Plan.of(Config(tile=config["tile"], split_k=1), problem, gpu)


def _stream(tiles: Plan, config: Config) -> StreamPlan:
    return StreamPlan(tiles.tiles, tiles.k_blocks, config["waves"], tiles.sms)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    m, k, dtype = problem["M"], problem["K"], math_dtype(problem)
    tiles, is_float8 = _tiles(config, problem, gpu), problem["dtype"] == FP8
    stream = _stream(tiles, config)
    map_a = TensorMap(
        "wide" if is_float8 else "a", dtype, (k, m), (2 * k,), (64, tiles.block_n), 128,
        l2_promotion=128,
    )  # fmt: skip
    source = instance(
        "nvfp4_matmul/stream_k.cu",
        "nvfp4_matmul_stream_k",
        *(dtype, out_type(problem), is_nvfp4(problem), activation(problem), is_float8),
        *(tiles.block_n, tiles.num_stages(gpu)),
    )
    step = Step(
        source,
        (stream.num_blocks, 1, 1),
        (
            map_a,
            *weight_maps(row_tiles(problem), k_tiles(problem), tiles.scale_block),
            *(*EPILOGUE, Pointer("partials"), Pointer("counters")),
            *(*sizes(problem), Int32(stream.num_streamed), Int32(GROUP_M)),
        ),
        (CONSUMERS + 1) * 128,
        tiles.shared_bytes(gpu),
        programmatic=True,
    )
    workspaces = stream.workspaces(BLOCK_M * tiles.block_n, CONSUMERS)
    if not is_float8:
        return Program((step,), workspaces)
    return Program((_widen_rows(m * k // 16, gpu), step), {**workspaces, "wide": 2 * m * k})


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    why = why_not_tiles(problem)
    if why or is_empty(problem):
        return why
    return _stream(_tiles(config, problem, gpu), config).why_illegal()


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    tiles = _tiles(config, problem, gpu)
    if tiles.block_n > 64 and tiles.block_n >= 2 * tiles.m:
        return f"tiles of {tiles.block_n} rows of A are at least half empty at M={tiles.m}"
    if tiles.block_n < 192 and tiles.m >= 32 * tiles.block_n:
        return f"tiles of {tiles.block_n} rows of A decode W more often than M={tiles.m} needs"
    return _stream(tiles, config).why_unpromising()


# ---- which one without measuring ---------------------------------------------------------------

_STAGE_US = {64: 0.42, 128: 0.74, 192: 1.0, 256: 1.28}
"""Rows of A in a tile -> microseconds that a stage takes in long products, by races of `wgmma`."""

_ENDS_US = 3.0
"""Time until the first stage is loaded, and time after the last one."""

_TILE_US = 1.5
"""Storing a tile of 128 x 256 while nothing is multiplied."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Stages and stores of a thread block and the sums it adds up; or the memory's time."""
    tiles = _tiles(config, problem, gpu)
    stream = _stream(tiles, config)
    busy_us = stream.num_k_blocks * _STAGE_US[tiles.block_n] + _ENDS_US
    busy_us += _TILE_US * tiles.block_n / 256 * (stream.num_whole // stream.sms)
    busy_us += stream.addition_us(BLOCK_M * min(tiles.block_n, tiles.m))
    widen_us = copy_us(3 * problem["M"] * problem["K"], gpu) if problem["dtype"] == FP8 else 0.0
    return widen_us + overlapped_us(busy_us, ENTRY.bytes_moved(problem), gpu)


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="stream_k",
    summary="stream-K: the tiles of the last waves are dealt out by k-blocks",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)
