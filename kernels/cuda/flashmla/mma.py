"""`flashmla` by mma.sync, 16 rows a block: 16-bit or packed tokens stream by TMA or cp.async."""

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
from kernelcat.reference._mla_row import LATENT, PACKED, ROW
from kernelcat.reference.flashmla import ENTRY, PACKED_TYPE
from kernelcat.runtime.gpu import Gpu

TOKENS = 16
"""Of a unit."""
SPAN = 128
"""Bytes of a row in a chunk."""
BLOCK_ROWS = 16
"""Of a block, at most: that many are kept in registers."""
MOST_SIDE = 8
"""Blocks that have the same tokens."""
THREADS = 12 * 32
STAGE_BYTES = {False: TOKENS * 2 * ROW, True: 11 << 10}
"""Of a unit; a packed one is padded to the swizzle's 1024 bytes."""
WEIGHT_BYTES = 100
"""Of a row and a unit: weights, the largest score."""
FIXED_BYTES = 2048
"""Barriers, the schedule, what is lost to alignment."""
MAX_STAGES = 16

UNIT_US = {False: 0.3, True: 0.25}
"""What a block takes for a unit that waits for no memory."""
SEGMENT_US = 3.0
"""What it takes for queries and results of a sequence."""

SPACE = {"least": (4, 8, 16), "combine": (False, True)}
"""A block has at least ``least`` units; ``combine`` is a second kernel for rows that many blocks
share."""


def _packed(problem: Problem) -> bool:
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def _block_rows(problem: Problem) -> int:
    """The columns of mma.sync, once or twice."""
    return min(8 * ceil(rows(problem) / 8), BLOCK_ROWS)


def _side(problem: Problem) -> int:
    """Blocks side by side: a power of two."""
    blocks = ceil(rows(problem) / BLOCK_ROWS)
    return min(1 << (blocks - 1).bit_length(), MOST_SIDE)


def _tile_rows(problem: Problem) -> int:
    """Of all blocks side by side."""
    return _block_rows(problem) * _side(problem)


def _shares(problem: Problem, gpu: Gpu) -> int:
    return num_shares(problem, _tile_rows(problem), gpu.sms // _side(problem))


def _num_stages(problem: Problem, gpu: Gpu) -> int:
    stage = STAGE_BYTES[_packed(problem)] + WEIGHT_BYTES * _block_rows(problem) + 24
    return min((gpu.shared_bytes - FIXED_BYTES) // stage, MAX_STAGES)


def _shared_bytes(problem: Problem, gpu: Gpu) -> int:
    stage = STAGE_BYTES[_packed(problem)] + WEIGHT_BYTES * _block_rows(problem) + 24
    return _num_stages(problem, gpu) * stage + FIXED_BYTES


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _side(problem) > gpu.sms:
        return f"{_side(problem)} blocks side by side need as many SMs"
    if _packed(problem) and problem["dtype"] != "bfloat16":
        return "the rotated part of packed rows is bfloat16, and so must queries be"
    if slots(problem) >= 1 << 31 or num_rows(problem) >= 1 << 31:
        return "more slots, or rows, than 32-bit indices reach"
    if _num_stages(problem, gpu) < 8:
        return f"eight units do not fit {gpu.name}'s shared memory"
    blocks = gpu.sms // _side(problem)
    if config["least"] > SPACE["least"][0] and _units(problem) >= config["least"] * blocks:
        return "blocks have more units than that"
    return None


def _units(problem: Problem) -> int:
    """Of all sequences, and of all blocks side by side together."""
    return row_tiles(problem, _tile_rows(problem)) * max(ceil(context(problem) / TOKENS), 1)


def _maps(problem: Problem) -> tuple[TensorMap, TensorMap]:
    """(slots, a row): boxes of latents, 128 bytes wide, and of what comes after them."""
    if _packed(problem):
        length, item, tail = PACKED, 1, (PACKED - LATENT, 0)
    else:
        length, item, tail = ROW, 2, (ROW - LATENT, SPAN)

    def boxes(columns: int, swizzle: int) -> TensorMap:
        return TensorMap(
            "kv_cache",
            problem["kv_dtype"],
            (length, slots(problem)),
            (length * item,),
            (columns, TOKENS),
            swizzle=swizzle,
        )

    return boxes(SPAN // item, SPAN), boxes(*tail)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    tile_rows, side, shares = _tile_rows(problem), _side(problem), _shares(problem, gpu)
    gathers = str(problem["page_size"] == 1).lower()
    stages = _num_stages(problem, gpu)
    arguments = (*types(problem), _block_rows(problem) // 8, side, stages, gathers)
    source = CudaSource(
        "flashmla/mma.cu", f"kernelcat::flashmla_mma<{', '.join(map(str, arguments))}>"
    )
    step = Step(
        source,
        (shares * side, 1, 1),
        (
            *_maps(problem),
            *params(problem, *WORKSPACES),
            Int32(problem["page_size"].bit_length() - 1),
            Int32(slots(problem)),
            Int32(config["least"]),
            Int32(NO_PARTS if config["combine"] else ALL_PARTS),
        ),
        THREADS,
        _shared_bytes(problem, gpu),
        programmatic=True,
    )
    steps: tuple[Step, ...] = (step,)
    if config["combine"]:
        steps += (combine_step(problem, tile_rows, shares, gpu),)
    return Program(steps, workspaces(shares, tile_rows, side))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The bytes, or the units of a share; its queries and results, and merging its parts."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    tile_rows, units, side = _tile_rows(problem), _units(problem), _side(problem)
    shares = max(1, min(_shares(problem, gpu), units // config["least"]))
    busy = min(1.0, shares * side / gpu.sms)
    again = ceil(rows(problem) / tile_rows)  # a tile of rows by itself reads all keys again
    bytes_us = copy_us(ENTRY.bytes_moved(problem) * again, gpu, 0.9 * busy**0.5)
    work_us = ceil(units / shares) * UNIT_US[_packed(problem)]
    segments = ceil(row_tiles(problem, tile_rows) / shares)
    total_us = LAUNCH_US + max(bytes_us, work_us) + segments * SEGMENT_US
    return total_us + merge_us(problem, tile_rows, shares, config["combine"])


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    configs = [c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None]
    fallback = Config(least=SPACE["least"][0], combine=False)
    return min(configs, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="mma",
    summary="16 rows a block, as columns of mma.sync; tokens stream by TMA, also float8 ones",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "tma": "UTMALDG",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=1,
)
