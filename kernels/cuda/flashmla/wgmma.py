"""`flashmla` by wgmma: 64 rows per thread block, two warpgroups that exchange weights.

TMA loads pages; cp.async gathers pages of one token, whose rows lie anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from kernelcat.kernels.cuda.common.paged_cache import (
    num_rows,
    num_slots,
)
from kernelcat.kernels.cuda.flashmla.operands import (
    max_rows,
    num_items,
    params,
    row_bytes,
)
from kernelcat.kernels.cuda.flashmla.split import (
    ALL_PARTS,
    MAX_READS,
    NO_PARTS,
    WORKSPACES,
    combine_step,
    merge_us,
    most_pieces,
    num_teams,
    times_read,
    workspaces,
)
from kernelcat.reference._mla_row import ROW
from kernelcat.reference._sequences import query_groups
from kernelcat.reference.flashmla import ENTRY
from kernelcat.runtime.gpu import Gpu

BLOCK = 64
"""Rows of a row tile, and tokens of a KV tile."""
COLUMNS = 64
"""16-bit elements in a row of the 128-byte swizzle."""
THREADS = 384
SHARED_BYTES = 28 * BLOCK * 2 * COLUMNS + 3072
"""Queries, two KV tiles, two tiles of weights; then barriers and alignment."""

TILE_US = 1.63
"""Microseconds of a thread block for a KV tile."""
FIRST_US, CHANGE_US = 3.9, 5.2
"""Microseconds of a thread block for the queries and results of its first row tile, and between two
row tiles: results are stored and the first scores multiplied while nothing else is."""
MISSED, L2_COPIES = 0.9, 2
"""Share of the tokens that a row tile of a long sequence finds in DRAM and not in L2, since teams
are at different tokens; and how often L2 has a token, once for each half of the SMs. Of six
sequences with 37,000 to 117,000 tokens that many row tiles see, the times were 0.9 to 1.26 of what
follows."""

SPACE = {
    "row_tiles": (2, 1, 4),
    "cluster": (1, 2),
    "least": (1, 2, 4, 8),
    "combine": (False, True),
}
"""A team of ``row_tiles`` thread blocks has the same tokens; clusters of ``cluster`` thread blocks
load the tokens together. A team has at least ``least`` KV tiles; with ``combine`` a second kernel
merges rows that several teams share."""


def illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why a configuration cannot run, or None."""
    blocks, cluster = config["row_tiles"], config["cluster"]
    if reason := why_no_wgmma(problem):
        return reason
    if problem["page_size"] == 1 and cluster > 1:
        return "pages of one token come by cp.async, which cannot multicast to a cluster"
    if gpu.shared_bytes < SHARED_BYTES:
        return f"two KV tiles do not fit the shared memory of {gpu.name}"
    if blocks > gpu.sms:
        return f"{blocks} thread blocks of a team need as many SMs: {gpu.sms}"
    if blocks % cluster:
        return f"teams of {blocks} thread blocks are not whole clusters of {cluster}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_teams(config, problem, gpu, _items(problem, config), SPACE["least"])


def unpromising_teams(
    config: Config, problem: Problem, gpu: Gpu, items: int, leasts: Sequence[int]
) -> str | None:
    """Why teams that share ``items`` are not worth a try, or None; ``leasts`` are the space's."""
    blocks, least, rows = config["row_tiles"], config["least"], max_rows(problem)
    if blocks > 1 and rows <= BLOCK * blocks // 2:
        return f"{rows} rows leave half of a team's {blocks} thread blocks without rows"
    if least > min(leasts) and items >= least * gpu.sms // blocks:
        return f"least={least} changes nothing: all teams have more KV tiles"
    return None


def why_no_wgmma(problem: Problem) -> str | None:
    """Why wgmma and TMA cannot take a problem's queries and cache."""
    if problem["kv_dtype"] != problem["dtype"]:
        return f"wgmma needs cached rows of the queries' type, {problem['dtype']}"
    if num_slots(problem) >= 1 << 31 or num_rows(problem) >= 1 << 31:
        return "there are more slots or rows than TMA's 32-bit coordinates reach"
    return None


def _items(problem: Problem, config: Config) -> int:
    """Pairs of a team's row tile and a KV tile, of all sequences."""
    return num_items(problem, BLOCK * config["row_tiles"], BLOCK)


def _teams(problem: Problem, config: Config, gpu: Gpu) -> int:
    blocks = config["row_tiles"]
    return num_teams(problem, BLOCK * blocks, gpu.sms // blocks)


def _program(problem: Problem, config: Config, gpu: Gpu, combine: str = "combine") -> Program:
    if num_rows(problem) == 0:
        return Program(())
    blocks, cluster = config["row_tiles"], config["cluster"]
    dtype, size = f"kernelcat::{problem['dtype']}", problem["page_size"]
    arguments = (dtype, size, blocks, cluster)
    source = CudaSource(
        "flashmla/wgmma.cu", f"kernelcat::flashmla_wgmma<{', '.join(map(str, arguments))}>"
    )
    teams = _teams(problem, config, gpu)
    step = Step(
        source,
        (teams * blocks, 1, 1),
        (
            wgmma_map("q", problem, num_rows(problem), BLOCK),
            wgmma_map("kv_cache", problem, num_slots(problem), min(BLOCK // cluster, size)),
            *params(problem, *WORKSPACES),
            Int32(num_slots(problem)),
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
        steps += (combine_step(problem, BLOCK * blocks, teams, gpu, combine),)
    return Program(steps, workspaces(teams, BLOCK * blocks, blocks))


launches = _program
"""The launches of a problem, for `dealt`, which replaces both kernels."""


def wgmma_map(name: str, problem: Problem, num_rows: int, box_rows: int) -> TensorMap:
    """Over (rows, 576): boxes of 64 columns, which are rows of 128 bytes."""
    return TensorMap(
        name,
        problem["dtype"],
        (ROW, num_rows),
        (2 * ROW,),
        (COLUMNS, box_rows),
        swizzle=2 * COLUMNS,
    )


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The bytes, or the KV tiles of a team with its queries and results; then the merge."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    tile_rows, items = BLOCK * config["row_tiles"], _items(problem, config)
    teams = max(1, min(_teams(problem, config, gpu), items // config["least"]))
    changes = most_pieces(problem, tile_rows, teams, items) - 1
    work_us = ceil(items / teams) * TILE_US + FIRST_US + CHANGE_US * changes
    return launch_us(problem, config, gpu, work_us) + merge_us(
        problem, tile_rows, teams, config["combine"], gpu
    )


def _passes_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds in which DRAM delivers the tokens of sequences that do not fit L2, once for each
    team's row tile, where these are many."""
    num_bytes = 0.0
    for group in query_groups(problem):
        sequence_bytes = group.tokens * row_bytes(problem)
        passes = ceil(group.queries * problem["heads"] / (BLOCK * config["row_tiles"]))
        if passes > MAX_READS and L2_COPIES * sequence_bytes > gpu.l2_bytes:
            num_bytes += group.sequences * passes * sequence_bytes
    return MISSED * num_bytes / gpu.bandwidth * 1e6


def launch_us(problem: Problem, config: Config, gpu: Gpu, work_us: float) -> float:
    """Microseconds of the launch whose busiest team takes ``work_us``, or the bytes' time."""
    bytes_us = copy_us(ENTRY.bytes_moved(problem), gpu, 0.85)
    # Tokens that are read again come from L2, which costs power, where it costs no time.
    power_us = 0.07 * bytes_us * times_read(problem, BLOCK * config["row_tiles"])
    busy_us = max(bytes_us, work_us, _passes_us(problem, config, gpu))
    return LAUNCH_US + busy_us + power_us + 0.1 * (config["cluster"] > 1)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="wgmma",
    summary="64 rows per thread block; two warpgroups exchange weights; split over tokens",
    archs=("sm_90a",),
    space=SPACE,
    illegal=illegal,
    unpromising=_unpromising,
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
