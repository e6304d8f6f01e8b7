"""`flashmla` by wgmma: 64 rows a block, two warpgroups that trade weights, pages by TMA."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.flashmla.operands import (
    context,
    num_rows,
    params,
    row_tiles,
    rows,
    slots,
)
from kernelcat.model import LAUNCH_US, copy_us
from kernelcat.reference._mla_row import LATENT, ROW
from kernelcat.reference.flashmla import ENTRY
from kernelcat.spec import Problem

BLOCK = 64
"""Rows, and tokens, of a tile."""
COLUMNS = 64
"""Of a row of the 128-byte swizzle."""
THREADS = 384
SHARED_BYTES = 28 * BLOCK * 2 * COLUMNS + 3072
"""Queries, two tiles of keys, two of weights; then barriers, and what is lost to alignment."""
PART_FLOATS = BLOCK * (LATENT + 2)
"""Of a block's rows: sums, the largest scores, totals."""
TASK_BYTES = 16
COMBINE_THREADS = 512
COMBINE_BLOCKS_PER_SM = 2
FEW_PARTS = 4
"""Of a row: so many the last block puts together, more a kernel that follows."""
ALL_PARTS = 1 << 30
FULL = 0.9
"""Of the blocks: so many are enough if then no tile of rows has to be split."""

TILE_US = 1.5
"""What a block takes for a tile of tokens."""
ROW_TILE_US = 3.0
"""What it takes for queries and results."""
PART_US = 0.9
"""What the last block takes for a part of its rows."""
COMBINE_US = 4.0

SPACE = {
    "row_tiles": (2, 1),
    "cluster": (1, 2),
    "least": (1, 2, 4, 8),
    "combine": (False, True),
}
"""``row_tiles`` blocks have the same tokens, which a ``cluster`` of them loads together; a block
has at least ``least`` tiles; ``combine`` is a second kernel for rows that many blocks share."""


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    side, cluster = config["row_tiles"], config["cluster"]
    if problem["kv_dtype"] != problem["dtype"]:
        return "wgmma takes rows of the cache as queries are"
    if problem["page_size"] < 16:
        return f"pages of {problem['page_size']} tokens are too small for TMA"
    if slots(problem) >= 1 << 31 or num_rows(problem) >= 1 << 31:
        return "more slots, or rows, than TMA's 32-bit coordinates reach"
    if gpu.shared_bytes < SHARED_BYTES:
        return f"two tiles of keys do not fit {gpu.name}'s shared memory"
    if side > 1 and rows(problem) <= BLOCK:
        return f"{rows(problem)} rows are not split over {side} blocks"
    if cluster not in (1, side):
        return "a cluster is of blocks that have the same tokens"
    if cluster > 1 and problem["page_size"] < 32:
        return "a block's half of a page would be less than the swizzle's 16 rows"
    if config["combine"] and _shares(problem, config, gpu) <= FEW_PARTS:
        return f"no row has more than {FEW_PARTS} parts"
    if config["least"] > 1 and _tiles(problem, config) >= config["least"] * gpu.sms // side:
        return "blocks have more tiles than that"
    return None


def _tiles(problem: Problem, config: Config) -> int:
    """Tiles of tokens that are worked on, of all blocks side by side together."""
    return row_tiles(problem, BLOCK * config["row_tiles"]) * max(ceil(context(problem) / BLOCK), 1)


def _shares(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Of the work: for each block that an SM has, or a few less where that leaves rows whole."""
    most = gpu.sms // config["row_tiles"]
    tiles = max(row_tiles(problem, BLOCK * config["row_tiles"]), 1)
    whole = ceil(tiles / ceil(tiles / most)) if tiles > most else most // tiles * tiles
    return int(whole if whole >= FULL * most else most)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    side, cluster = config["row_tiles"], config["cluster"]
    dtype, size = f"kernelcat::{problem['dtype']}", problem["page_size"]
    arguments = (dtype, size, side, cluster)
    source = CudaSource(
        "flashmla/wgmma.cu", f"kernelcat::flashmla_wgmma<{', '.join(map(str, arguments))}>"
    )
    shares = _shares(problem, config, gpu)
    step = Step(
        source,
        (shares * side, 1, 1),
        (
            _map("q", problem, num_rows(problem), BLOCK),
            _map("kv_cache", problem, slots(problem), min(BLOCK // cluster, size)),
            *params(problem, "partials", "counters", "tasks"),
            Int32(slots(problem)),
            Int32(config["least"]),
            Int32(FEW_PARTS if config["combine"] else ALL_PARTS),
        ),
        THREADS,
        SHARED_BYTES,
        (cluster, 1, 1),
        programmatic=True,
    )
    workspaces = {
        "partials": 2 * shares * side * PART_FLOATS * 4,
        "counters": shares * side * 4,
        "tasks": shares * TASK_BYTES,
    }
    if not config["combine"]:
        return Program((step,), workspaces)
    combine = Step(
        CudaSource("flashmla/combine.cu", f"kernelcat::flashmla_combine<{dtype}, {BLOCK * side}>"),
        (gpu.sms * COMBINE_BLOCKS_PER_SM, 1, 1),
        (*map(Pointer, ("partials", "tasks", "out", "lse")), Int32(shares)),
        COMBINE_THREADS,
        programmatic=True,
    )
    return Program((step, combine), workspaces)


def _map(name: str, problem: Problem, num_rows: int, box_rows: int) -> TensorMap:
    """(rows, 576): boxes of 64 columns, 128 bytes a row."""
    return TensorMap(
        name,
        problem["dtype"],
        (ROW, num_rows),
        (2 * ROW,),
        (COLUMNS, box_rows),
        swizzle=2 * COLUMNS,
    )


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The tiles of a share, its queries and results, and what it takes to merge its parts."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    side, tiles = config["row_tiles"], _tiles(problem, config)
    shares = max(1, min(_shares(problem, config, gpu), tiles // config["least"]))
    per_share = ceil(tiles / shares)
    row_tiles_of_all = row_tiles(problem, BLOCK * side)
    parts = ceil(shares / max(row_tiles_of_all, 1))
    merge_us = PART_US * parts if parts > 1 else 0.0
    if config["combine"]:
        merge_us = COMBINE_US + (PART_US * parts if parts <= FEW_PARTS else 0.0)
    # A tile of rows by itself reads all keys again.
    again = ceil(rows(problem) / (BLOCK * side))
    bytes_us = copy_us(ENTRY.bytes_moved(problem) * again, gpu, 0.85)
    work_us = per_share * TILE_US + ROW_TILE_US * ceil(row_tiles_of_all / shares)
    return LAUNCH_US + max(bytes_us, work_us) + merge_us + 0.1 * (config["cluster"] > 1)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    configs = [c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None]
    fallback = Config(row_tiles=1, cluster=1, least=1, combine=False)
    return min(configs, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="wgmma",
    summary="64 rows a block, two warpgroups that trade softmaxes and weights; split over tokens",
    archs=("sm_90a",),
    space=SPACE,
    reject=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=2,
    unverified="not yet run on a GPU",
)
