"""`flashmla` by wgmma: 64 rows a block, two warpgroups that trade weights, pages by TMA.

A page of one token is a row that lies anywhere: those are gathered by cp.async.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.flashmla.operands import (
    context,
    num_rows,
    params,
    row_tiles,
    rows,
    slots,
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
from kernelcat.reference._mla_row import ROW
from kernelcat.reference.flashmla import ENTRY
from kernelcat.runtime.gpu import Gpu

BLOCK = 64
"""Rows, and tokens, of a tile."""
COLUMNS = 64
"""Of a row of the 128-byte swizzle."""
THREADS = 384
SHARED_BYTES = 28 * BLOCK * 2 * COLUMNS + 3072
"""Queries, two tiles of keys, two of weights; then barriers, and what is lost to alignment."""

TILE_US = 1.5
"""What a block takes for a tile of tokens."""
ROW_TILE_US = 3.0
"""What it takes for queries and results."""

SPACE = {
    "row_tiles": (2, 1, 4),
    "cluster": (1, 2),
    "least": (1, 2, 4, 8),
    "combine": (False, True),
}
"""``row_tiles`` blocks have the same tokens, which ``cluster`` of them load together; a block has
at least ``least`` tiles; ``combine`` is a second kernel for rows that many blocks share."""


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    side, cluster = config["row_tiles"], config["cluster"]
    if reason := why_no_wgmma(problem):
        return reason
    if problem["page_size"] == 1 and cluster > 1:
        return "a row by itself is copied into one block"
    if gpu.shared_bytes < SHARED_BYTES:
        return f"two tiles of keys do not fit {gpu.name}'s shared memory"
    if side > 1 and rows(problem) <= BLOCK * side // 2:
        return f"{rows(problem)} rows are not split over {side} blocks"
    if side > gpu.sms:
        return f"{side} blocks side by side need as many SMs"
    if side % cluster:
        return "a cluster is of blocks that have the same tokens"
    if config["least"] > 1 and _tiles(problem, config) >= config["least"] * gpu.sms // side:
        return "blocks have more tiles than that"
    return None


def why_no_wgmma(problem: Problem) -> str | None:
    """What keeps wgmma and TMA from a problem's queries and cache."""
    if problem["kv_dtype"] != problem["dtype"]:
        return "wgmma takes rows of the cache as queries are"
    if slots(problem) >= 1 << 31 or num_rows(problem) >= 1 << 31:
        return "more slots, or rows, than TMA's 32-bit coordinates reach"
    return None


def _tiles(problem: Problem, config: Config) -> int:
    """Tiles of tokens that are worked on, of all blocks side by side together."""
    return row_tiles(problem, BLOCK * config["row_tiles"]) * max(ceil(context(problem) / BLOCK), 1)


def _shares(problem: Problem, config: Config, gpu: Gpu) -> int:
    side = config["row_tiles"]
    return num_shares(problem, BLOCK * side, gpu.sms // side)


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
            wgmma_map("q", problem, num_rows(problem), BLOCK),
            wgmma_map("kv_cache", problem, slots(problem), min(BLOCK // cluster, size)),
            *params(problem, *WORKSPACES),
            Int32(slots(problem)),
            Int32(config["least"]),
            Int32(NO_PARTS if config["combine"] else ALL_PARTS),
        ),
        THREADS,
        SHARED_BYTES,
        (cluster, 1, 1),
        programmatic=True,
    )
    steps: tuple[Step, ...] = (step,)
    if config["combine"]:
        steps += (combine_step(problem, BLOCK * side, shares, gpu),)
    return Program(steps, workspaces(shares, BLOCK * side, side))


def wgmma_map(name: str, problem: Problem, num_rows: int, box_rows: int) -> TensorMap:
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
    side, cluster, tiles = config["row_tiles"], config["cluster"], _tiles(problem, config)
    shares = max(1, min(_shares(problem, config, gpu), tiles // config["least"]))
    per_share = ceil(tiles / shares)
    row_tiles_of_all = row_tiles(problem, BLOCK * side)
    # A tile of rows by itself reads all keys again.
    again = ceil(rows(problem) / (BLOCK * side))
    bytes_us = copy_us(ENTRY.bytes_moved(problem) * again, gpu, 0.85)
    work_us = per_share * TILE_US + ROW_TILE_US * ceil(row_tiles_of_all / shares)
    # What is read again costs power, if not time.
    total_us = LAUNCH_US + max(bytes_us, work_us) + 0.05 * bytes_us + 0.1 * (cluster > 1)
    return total_us + merge_us(problem, BLOCK * side, shares, config["combine"])


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
    illegal=_reject,
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
)
