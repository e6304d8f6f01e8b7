"""`flashmla` by mma.sync, 8 or 16 rows per thread block; tokens stream by TMA or cp.async."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.latent_cache import is_packed
from kernelcat.kernels.cuda.common.paged_cache import num_rows, num_slots, page_bits
from kernelcat.kernels.cuda.flashmla.operands import (
    max_rows,
    num_items,
    params,
    types,
)
from kernelcat.kernels.cuda.flashmla.split import (
    ALL_PARTS,
    NO_PARTS,
    WORKSPACES,
    combine_step,
    dealt,
    merge_us,
    num_teams,
    times_read,
    workspaces,
)
from kernelcat.kernels.cuda.flashmla.wgmma import wgmma_map
from kernelcat.reference._mla_row import LATENT, PACKED, ROW
from kernelcat.reference.flashmla import ENTRY
from kernelcat.runtime.gpu import Gpu

BLOCK_N = 16
"""Tokens of a KV tile."""
SPAN = 128
"""Bytes of a token in a chunk of a KV tile."""
MAX_BLOCK_ROWS = 16
"""Rows of a thread block, which registers hold."""
MAX_TEAM_BLOCKS = 8
"""Thread blocks of a team, which have the same tokens."""
THREADS = 12 * 32
STAGE_BYTES = {False: BLOCK_N * 2 * ROW, True: 11 << 10}
"""Bytes of a KV tile, by whether rows are packed: then padded to the swizzle's 1024 bytes."""
WEIGHT_BYTES = 100
"""Bytes of a row's weights and row max for a KV tile."""
FIXED_BYTES = 2048
"""Bytes of barriers, the schedule, and alignment."""
MIN_STAGES, MAX_STAGES = 8, 16

TILE_US = {False: 0.435, True: 0.5}
"""Microseconds of a thread block for a KV tile in shared memory, by whether it is packed."""
START_US = 3.5
"""Microseconds of a thread block to find its work and load its first KV tile, and to store."""

SPACE = {"least": (4, 2, 8, 16), "combine": (False, True)}
"""A team has at least ``least`` KV tiles or what costs as much; with ``combine`` a second kernel
merges rows that several teams share."""


def _block_rows(problem: Problem) -> int:
    """Rows of a thread block: the 8 columns of mma.sync, once or twice."""
    return min(8 * ceil(max_rows(problem) / 8), MAX_BLOCK_ROWS)


def _team_blocks(problem: Problem) -> int:
    """Thread blocks of a team: a power of two."""
    blocks = ceil(max_rows(problem) / MAX_BLOCK_ROWS)
    return min(1 << (blocks - 1).bit_length(), MAX_TEAM_BLOCKS)


def _tile_rows(problem: Problem) -> int:
    """Rows of a team."""
    return _block_rows(problem) * _team_blocks(problem)


def _teams(problem: Problem, gpu: Gpu) -> int:
    return num_teams(problem, _tile_rows(problem), gpu.sms // _team_blocks(problem))


def _stage_bytes(problem: Problem) -> int:
    """A KV tile, the weights of all rows, and three barriers."""
    return STAGE_BYTES[is_packed(problem)] + WEIGHT_BYTES * _block_rows(problem) + 24


def _num_stages(problem: Problem, gpu: Gpu) -> int:
    return min((gpu.shared_bytes - FIXED_BYTES) // _stage_bytes(problem), MAX_STAGES)


def _shared_bytes(problem: Problem, gpu: Gpu) -> int:
    return _num_stages(problem, gpu) * _stage_bytes(problem) + FIXED_BYTES


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _team_blocks(problem) > gpu.sms:
        return f"{_team_blocks(problem)} thread blocks of a team need as many SMs: {gpu.sms}"
    if is_packed(problem) and problem["dtype"] != "bfloat16":
        return "queries must be bfloat16, as is the rotated part of packed rows"
    if num_slots(problem) >= 1 << 31 or num_rows(problem) >= 1 << 31:
        return "there are more slots or rows than 32-bit indices reach"
    if _num_stages(problem, gpu) < MIN_STAGES:
        return f"{MIN_STAGES} stages do not fit the shared memory of {gpu.name}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    least, max_teams = config["least"], gpu.sms // _team_blocks(problem)
    if least > min(SPACE["least"]) and _items(problem) >= least * max_teams:
        return f"least={least} changes nothing: all teams have more KV tiles"
    return None


def _items(problem: Problem) -> int:
    """Pairs of a team's row tile and a KV tile, of all sequences."""
    return num_items(problem, _tile_rows(problem), BLOCK_N)


def _maps(problem: Problem) -> tuple[TensorMap, TensorMap]:
    """Over (slots, row): boxes of 128 bytes of latents, and boxes of what follows the latents."""
    if is_packed(problem):
        length, itemsize, tail = PACKED, 1, (PACKED - LATENT, 0)
    else:
        length, itemsize, tail = ROW, 2, (ROW - LATENT, SPAN)

    def boxes(columns: int, swizzle: int) -> TensorMap:
        return TensorMap(
            "kv_cache",
            problem["kv_dtype"],
            (length, num_slots(problem)),
            (length * itemsize,),
            (columns, BLOCK_N),
            swizzle=swizzle,
        )

    return boxes(SPAN // itemsize, SPAN), boxes(*tail)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    tile_rows, blocks, teams = _tile_rows(problem), _team_blocks(problem), _teams(problem, gpu)
    gathers = str(problem["page_size"] == 1).lower()
    stages = _num_stages(problem, gpu)
    arguments = (*types(problem), _block_rows(problem) // 8, blocks, stages, gathers)
    source = CudaSource(
        "flashmla/mma.cu", f"kernelcat::flashmla_mma<{', '.join(map(str, arguments))}>"
    )
    step = Step(
        source,
        (teams * blocks, 1, 1),
        (
            wgmma_map("q", problem, num_rows(problem), _block_rows(problem)),
            *_maps(problem),
            *params(problem, *WORKSPACES),
            Int32(page_bits(problem)),
            Int32(num_slots(problem)),
            Int32(config["least"]),
            Int32(NO_PARTS if config["combine"] else ALL_PARTS),
        ),
        THREADS,
        _shared_bytes(problem, gpu),
        programmatic=True,
    )
    steps: tuple[Step, ...] = (step,)
    if config["combine"]:
        steps += (combine_step(problem, tile_rows, teams, gpu, "merge"),)
    return Program(steps, workspaces(teams, tile_rows, blocks))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The bytes, or a team's share of the KV tiles and of the pieces; then the merge."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    tile_rows, items = _tile_rows(problem), _items(problem)
    share, teams = dealt(problem, tile_rows, _teams(problem, gpu), items, config["least"])
    busy = min(1.0, teams * _team_blocks(problem) / gpu.sms)
    reads = times_read(problem, tile_rows)
    bytes_us = copy_us(ENTRY.bytes_moved(problem) * reads, gpu, 0.87 * busy**0.5)
    work_us = share * TILE_US[is_packed(problem)]
    total_us = LAUNCH_US + START_US + max(bytes_us, work_us)
    return total_us + merge_us(problem, tile_rows, teams, config["combine"], gpu, all_at_once=True)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="mma",
    summary="8 or 16 rows per thread block by transposed mma.sync; tokens stream, also float8",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
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
