"""`flashmla` by clusters of two thread blocks for 128 rows: each has half of the columns, and
computes the softmax of half of the rows. With 64 rows, the first one computes the whole softmax."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.latent_cache import is_packed
from kernelcat.kernels.cuda.common.paged_cache import num_rows, num_slots
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
    merge_us,
    most_pieces,
    num_teams,
    times_read,
    workspaces,
)
from kernelcat.kernels.cuda.flashmla.wgmma import (
    BLOCK,
    THREADS,
    wgmma_map,
    why_no_wgmma,
)
from kernelcat.reference._mla_row import PACKED, ROPE, SCALED, SCALES
from kernelcat.reference.flashmla import ENTRY, PACKED_TYPE
from kernelcat.runtime.gpu import Gpu

CLUSTER = 2
"""Thread blocks of a team, which is a cluster."""
SHARED_BYTES = 24 * BLOCK * 128 + BLOCK * 256 + BLOCK * 160 + 3072
"""Queries, three KV tiles, what the other thread block sends; then barriers and alignment."""
SCALE_BYTES = 3 * 16 * BLOCK
"""Bytes of the scales of packed rows."""

TILE_US = {(1, False): 1.55, (2, False): 2.1, (1, True): 2.3, (2, True): 2.9}
"""Microseconds of a cluster for a KV tile, by the number of warpgroups that have rows, and by
whether it is packed."""
FIRST_US, CHANGE_US = 3.7, 2.3
"""Microseconds of a cluster for the queries and results of its first row tile, and between two."""

SPACE = {"least": (1, 2, 4, 8), "combine": (False, True)}
"""A cluster has at least ``least`` KV tiles; with ``combine`` a second kernel merges rows that
several clusters share."""


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["page_size"] == 1:
        return "page_size=1 is too small for TMA: use `mma` or `wgmma`"
    if is_packed(problem):
        if problem["dtype"] != "bfloat16":
            return "queries must be bfloat16, as is the rotated part of packed rows"
    elif reason := why_no_wgmma(problem):
        return reason
    if gpu.shared_bytes < _shared_bytes(problem):
        return f"three KV tiles do not fit the shared memory of {gpu.name}"
    if gpu.sms < CLUSTER:
        return f"a cluster of {CLUSTER} thread blocks needs as many SMs: {gpu.sms}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    least = config["least"]
    if least > 1 and _items(problem) >= least * (gpu.sms // CLUSTER):
        return f"least={least} changes nothing: all clusters have more KV tiles"
    return None


def _warpgroups(problem: Problem) -> int:
    """Warpgroups of a thread block that have rows."""
    return 1 if max_rows(problem) <= BLOCK else 2


def _tile_rows(problem: Problem) -> int:
    """Rows of a cluster."""
    return BLOCK * _warpgroups(problem)


def _shared_bytes(problem: Problem) -> int:
    return SHARED_BYTES + (SCALE_BYTES if is_packed(problem) else 0)


def _maps(problem: Problem) -> tuple[TensorMap, ...]:
    """Over the queries, then three over the cache: whole rows in each, or the latents, the rotated
    part and the scales of packed rows."""
    tokens = min(BLOCK, problem["page_size"])
    queries = wgmma_map("q", problem, num_rows(problem), BLOCK)
    if not is_packed(problem):
        return queries, *[wgmma_map("kv_cache", problem, num_slots(problem), tokens)] * 3

    def boxes(columns: int, swizzle: int) -> TensorMap:
        shape, box = (PACKED, num_slots(problem)), (columns, tokens)
        return TensorMap("kv_cache", PACKED_TYPE, shape, (PACKED,), box, swizzle=swizzle)

    return queries, boxes(SCALED, 0), boxes(2 * ROPE, 2 * ROPE), boxes(SCALES, 0)


def _items(problem: Problem) -> int:
    """Pairs of a row tile and a KV tile, of all sequences."""
    return num_items(problem, _tile_rows(problem), BLOCK)


def _teams(problem: Problem, gpu: Gpu) -> int:
    return num_teams(problem, _tile_rows(problem), gpu.sms // CLUSTER)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    arguments = (*types(problem), problem["page_size"], _warpgroups(problem))
    source = CudaSource(
        "flashmla/pair.cu",
        f"kernelcat::flashmla_pair<{', '.join(map(str, arguments))}>",
    )
    teams = _teams(problem, gpu)
    step = Step(
        source,
        (teams * CLUSTER, 1, 1),
        (
            *_maps(problem),
            *params(problem, *WORKSPACES),
            Int32(num_slots(problem)),
            Int32(config["least"]),
            Int32(NO_PARTS if config["combine"] else ALL_PARTS),
        ),
        THREADS,
        _shared_bytes(problem),
        (CLUSTER, 1, 1),
        programmatic=True,
    )
    steps: tuple[Step, ...] = (step,)
    if config["combine"]:
        steps += (combine_step(problem, _tile_rows(problem), teams, gpu),)
    return Program(steps, workspaces(teams, _tile_rows(problem), CLUSTER))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The bytes, or the KV tiles of a cluster with its queries and results; then the merge."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    tile_rows, items = _tile_rows(problem), _items(problem)
    teams = max(1, min(_teams(problem, gpu), items // config["least"]))
    reads = times_read(problem, tile_rows)
    bytes_us = copy_us(ENTRY.bytes_moved(problem) * reads, gpu, 0.85)
    changes = most_pieces(problem, tile_rows, teams, items) - 1
    tile_us = TILE_US[_warpgroups(problem), is_packed(problem)]
    work_us = ceil(items / teams) * tile_us + FIRST_US + CHANGE_US * changes
    total_us = LAUNCH_US + max(bytes_us, work_us)
    return total_us + merge_us(problem, tile_rows, teams, config["combine"], gpu)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="pair",
    summary="64 or 128 rows per cluster; each thread block has half of the columns",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
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
