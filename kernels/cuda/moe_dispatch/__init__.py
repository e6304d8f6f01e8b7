"""`moe_dispatch` in CUDA C++: ll (words that are their own flags) and tiles (rings with signals).

Ranks write to each other's windows (``kernelcat/window.cuh``) and never read them. One launch
sends and takes the rows, and makes the index maps in thread blocks of their own.
"""

from __future__ import annotations

from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.windows import (
    FLAGGED_WORDS,
    HALF_BYTES,
    RING_TILES,
    SHARED_BYTES,
    SM_BLOCKS,
    TRIP_US,
    why_not_resident,
    window_params,
    wire_us,
)
from kernelcat.reference._exchange import mean_rows
from kernelcat.reference.moe_dispatch import FP8, row_bytes
from kernelcat.runtime.gpu import Gpu

THREADS = 256
"""Threads of a thread block."""
MAX_MAP_BLOCKS = 128
"""Thread blocks that make index maps, at most one for each expert."""
GROUP_TOKENS, WORD_IDS = 64, 4
"""Tokens of which a flagged word says whether they come, and expert ids in one."""

LL_SPACE = {"blocks": (64, 128, 192)}
TILE_SPACE = {"tile_tokens": (1, 2, 4), "blocks": (32, 64, 128, 192)}
"""tile_tokens : tokens of a tile; blocks : thread blocks for rows, at most"""


def _num_scales(problem: Problem) -> int:
    return ceil(problem["hidden"] / 128) if problem["act_dtype"] == FP8 else 0


def _wire_bytes(problem: Problem) -> int:
    """Bytes of a row as it travels, in whole vectors of 16 bytes."""
    data = problem["hidden"] * dtypes.itemsize(problem["act_dtype"])
    return int(data + 16 * ceil((_num_scales(problem) + problem["top_k"]) / 4))


def _id_words(problem: Problem) -> int:
    """Flagged words that hold the ids of a token's experts."""
    return ceil(problem["top_k"] / WORD_IDS)


def _num_groups(problem: Problem) -> int:
    return ceil(problem["tokens"] / GROUP_TOKENS)


def _shared_bytes(problem: Problem, config: Config) -> int:
    """kernels/cuda/moe_dispatch/shared_memory.cuh has the same layout."""
    groups, rows = problem["ranks"] * _num_groups(problem), config.get("tile_tokens", 2)
    ranks = rows * ceil(problem["tokens"] / (rows * _row_blocks(problem, config)))
    words = 4 * rows * _num_scales(problem)
    return int(8 * (THREADS // 32) + 8 * groups + 4 * (groups + 1) + words + ranks)


def _row_blocks(problem: Problem, config: Config) -> int:
    tiles = ceil(problem["tokens"] / config.get("tile_tokens", 1))
    return int(min(max(tiles, 1), config["blocks"]))


def _map_blocks(problem: Problem, config: Config, gpu: Gpu) -> int:
    room = SM_BLOCKS * gpu.sms - _row_blocks(problem, config)
    return int(min(problem["local_experts"], MAX_MAP_BLOCKS, room))


def _launch(problem: Problem, config: Config, gpu: Gpu, kernel: str, *more: int) -> Program:
    """A launch; ``more`` are further sizes that the kernel takes."""
    programmatic = has_dependent_launch(gpu)
    source = instance(
        f"moe_dispatch/{kernel}.cu", f"moe_dispatch_{kernel}",
        problem["dtype"], problem["act_dtype"] == FP8, problem["ranks"], _id_words(problem),
        THREADS, programmatic,
    )  # fmt: skip
    tensors = ("x", "expert_ids", "weights", "rows", "scale", "gates", "row_of", "source_offsets",
               "offsets", "order", "position")  # fmt: skip
    map_blocks = _map_blocks(problem, config, gpu)
    num_blocks = map_blocks + _row_blocks(problem, config)
    axes = (problem[axis] for axis in ("tokens", "hidden", "top_k", "local_experts"))
    sizes = map(Int32, (*axes, map_blocks, *more))
    params = (*map(Pointer, tensors), *sizes, *window_params())
    step = Step(source, (num_blocks, 1, 1), params, THREADS, _shared_bytes(problem, config),
                programmatic=programmatic)  # fmt: skip
    return Program((step,))


def _ll(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _launch(problem, config, gpu, "ll")


def _tiles(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _launch(problem, config, gpu, "tiles", config["tile_tokens"])


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_scales(problem) + problem["top_k"] > 4 * THREADS:
        return f"a row of {problem['hidden']} elements has more scales than threads hold"
    words = _num_groups(problem) + problem["tokens"] * _id_words(problem)
    if words > FLAGGED_WORDS:
        return f"the ids of {problem['tokens']} tokens take {words} words, not {FLAGGED_WORDS}"
    if _shared_bytes(problem, config) > SHARED_BYTES:
        return f"{problem['tokens']} tokens of each rank do not fit into shared memory"
    return why_not_resident(_row_blocks(problem, config) + 1, gpu)


def _ll_illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    slots = problem["ranks"] * problem["tokens"] * _wire_bytes(problem)
    if slots > HALF_BYTES:
        return f"slots of {slots} bytes do not fit into a window"
    return _illegal(config, problem, gpu)


def _tiles_illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile_bytes = config["tile_tokens"] * _wire_bytes(problem)
    if config["blocks"] * problem["ranks"] * RING_TILES * tile_bytes > HALF_BYTES:
        return "rings of tiles do not fit into a window: fewer blocks or smaller tiles"
    return _illegal(config, problem, gpu)


def _exchange_us(problem: Problem, config: Config, gpu: Gpu, trips: int) -> float:
    """The longer of the wire and of the local memory, and trips."""
    received = mean_rows(problem) * row_bytes(problem)
    sent = received * (problem["ranks"] - 1) / problem["ranks"]
    wire = wire_us(sent, _row_blocks(problem, config))
    return LAUNCH_US + max(wire, copy_us(int(4 * received), gpu)) + trips * TRIP_US


def _ll_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _exchange_us(problem, config, gpu, 2)


def _tiles_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _exchange_us(problem, config, gpu, 3) + 0.1 * config["tile_tokens"]


IMPLEMENTATIONS = (
    Implementation(
        entry="moe_dispatch",
        language="cuda",
        variant="tiles",
        summary="rows travel in rings of tiles, with a signal for each tile",
        archs=("sm_80+",),
        space=TILE_SPACE,
        illegal=_tiles_illegal,
        program=_tiles,
        estimate=_tiles_us,
        techniques={
            "system-scope release": "STG.E.64.STRONG.SYS",
            "system-scope acquire": "LDG.E.64.STRONG.SYS",
            "flags beside data": "STG*128.STRONG.SYS",
        },
        rank=0,
        unverified="its first version was right on two H200, this one has not run there",
    ),
    Implementation(
        entry="moe_dispatch",
        language="cuda",
        variant="ll",
        summary="low latency: a slot for each token, whose words are their own flags",
        archs=("sm_80+",),
        space=LL_SPACE,
        illegal=_ll_illegal,
        program=_ll,
        estimate=_ll_us,
        techniques={"words that arrive": "STG*128.STRONG.SYS"},
        rank=1,
        unverified="right on two H200, where the sanitizer has not looked at it",
    ),
)
