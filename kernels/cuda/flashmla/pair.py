"""`flashmla` by two blocks for 128 rows: each has half of the columns, and the softmax of half of
the rows. Of 64 rows the first block has the softmax of all."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.flashmla.operands import (
    context,
    num_rows,
    params,
    row_tiles,
    rows,
    slots,
    types,
)
from kernelcat.kernels.cuda.flashmla.split import (
    ALL_PARTS,
    NO_PARTS,
    WORKSPACES,
    combine_step,
    merge_us,
    num_shares,
    workspaces,
)
from kernelcat.kernels.cuda.flashmla.wgmma import BLOCK, THREADS, wgmma_map, why_no_wgmma
from kernelcat.reference._mla_row import PACKED, ROPE, SCALED, SCALES
from kernelcat.reference.flashmla import ENTRY, PACKED_TYPE
from kernelcat.runtime.gpu import Gpu

SIDE = 2
"""Blocks of a cluster."""
SHARED_BYTES = 24 * BLOCK * 128 + BLOCK * 256 + BLOCK * 160 + 3072
"""Queries, three tiles' keys, what the other block sends; barriers, what is lost to alignment."""
SCALE_BYTES = 3 * 16 * BLOCK
"""Of packed rows."""

TILE_US = {1: 1.0, 2: 1.3}
"""What a cluster takes for a tile of tokens, by the warpgroups that have rows."""
ROW_TILE_US = 3.0
"""What it takes for queries and results."""

SPACE = {"least": (1, 2, 4, 8), "combine": (False, True)}
"""A cluster has at least ``least`` tiles; ``combine`` is a second kernel for rows that many
clusters share."""


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["page_size"] == 1:
        return "pages of one token are too small for TMA"
    if _packed(problem):
        if problem["dtype"] != "bfloat16":
            return "the rotated part of packed rows is bfloat16, and so must queries be"
    elif reason := why_no_wgmma(problem):
        return reason
    if gpu.shared_bytes < _shared_bytes(problem):
        return f"three tiles of keys do not fit {gpu.name}'s shared memory"
    if gpu.sms < SIDE:
        return f"a cluster of {SIDE} blocks needs as many SMs"
    if config["least"] > 1 and _tiles(problem) >= config["least"] * (gpu.sms // SIDE):
        return "clusters have more tiles than that"
    return None


def _warpgroups(problem: Problem) -> int:
    """Of a block, that have rows."""
    return 1 if rows(problem) <= BLOCK else 2


def _tile_rows(problem: Problem) -> int:
    return BLOCK * _warpgroups(problem)


def _packed(problem: Problem) -> bool:
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def _shared_bytes(problem: Problem) -> int:
    return SHARED_BYTES + (SCALE_BYTES if _packed(problem) else 0)


def _maps(problem: Problem) -> tuple[TensorMap, ...]:
    """Of the queries, and of the cache: its rows, or packed ones' latents, rotations, scales."""
    tokens = min(BLOCK, problem["page_size"])
    queries = wgmma_map("q", problem, num_rows(problem), BLOCK)
    if not _packed(problem):
        return queries, *[wgmma_map("kv_cache", problem, slots(problem), tokens)] * 3

    def boxes(columns: int, swizzle: int) -> TensorMap:
        shape, box = (PACKED, slots(problem)), (columns, tokens)
        return TensorMap("kv_cache", PACKED_TYPE, shape, (PACKED,), box, swizzle=swizzle)

    return queries, boxes(SCALED, 0), boxes(2 * ROPE, 2 * ROPE), boxes(SCALES, 0)


def _tiles(problem: Problem) -> int:
    """Tiles of tokens that are worked on, of all clusters together."""
    return row_tiles(problem, _tile_rows(problem)) * max(ceil(context(problem) / BLOCK), 1)


def _shares(problem: Problem, gpu: Gpu) -> int:
    return num_shares(problem, _tile_rows(problem), gpu.sms // SIDE)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    arguments = (*types(problem), problem["page_size"], _warpgroups(problem))
    source = CudaSource(
        "flashmla/pair.cu",
        f"kernelcat::flashmla_pair<{', '.join(map(str, arguments))}>",
    )
    shares = _shares(problem, gpu)
    step = Step(
        source,
        (shares * SIDE, 1, 1),
        (
            *_maps(problem),
            *params(problem, *WORKSPACES),
            Int32(slots(problem)),
            Int32(config["least"]),
            Int32(NO_PARTS if config["combine"] else ALL_PARTS),
        ),
        THREADS,
        _shared_bytes(problem),
        (SIDE, 1, 1),
        programmatic=True,
    )
    steps: tuple[Step, ...] = (step,)
    if config["combine"]:
        steps += (combine_step(problem, _tile_rows(problem), shares, gpu),)
    return Program(steps, workspaces(shares, _tile_rows(problem), SIDE))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The tiles of a share, its queries and results, and what it takes to merge its parts."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    tiles = _tiles(problem)
    shares = max(1, min(_shares(problem, gpu), tiles // config["least"]))
    # A tile of rows by itself reads all keys again.
    again = ceil(rows(problem) / _tile_rows(problem))
    bytes_us = copy_us(ENTRY.bytes_moved(problem) * again, gpu, 0.85)
    segments = ceil(row_tiles(problem, _tile_rows(problem)) / shares)
    tile_us = TILE_US[_warpgroups(problem)]
    work_us = ceil(tiles / shares) * tile_us + ROW_TILE_US * segments
    merging_us = merge_us(problem, _tile_rows(problem), shares, config["combine"])
    return LAUNCH_US + max(bytes_us, work_us) + merging_us


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    configs = [c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None]
    fallback = Config(least=1, combine=False)
    return min(configs, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="pair",
    summary="64 or 128 rows a cluster; each block half of the columns; scores and weights cross",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "register reallocation": "USETMAXREG",
        "distributed shared memory": "STAS",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=3,
)
