"""`paged_attn` for few tokens a thread block, with room for the next launch beside this one."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, L2_TO_DRAM
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import mean_context, num_rows
from kernelcat.kernels.cuda.paged_attn.few_rows import (
    NO_OVERLAP_US,
    TABLE_LOADS,
    next_launch_fits,
    passes,
    resident_clusters,
    row_tiles,
    tile_us,
    why_not_few_rows,
)
from kernelcat.kernels.cuda.paged_attn.operands import (
    MAX_REGISTERS,
    SM_REGISTERS,
    group,
    kind,
    params,
    token_bytes,
)
from kernelcat.reference.paged_attn import ENTRY, FP8, most_visible
from kernelcat.runtime.gpu import Gpu

RELEASE_US, LOOK_UP_US = 1.1, 0.1
"""Microseconds from a launch's end until the next one may read, and until its tokens are found."""
DRAM_US, L2_US = 0.7, 0.25
"""Microseconds until the first bytes come from DRAM, and from L2."""
SM_BANDWIDTH = 95e9
"""Bytes per second that reach one SM, whose warps copy asynchronously."""
AHEAD_US = 1.3
"""Microseconds from when a launch may read until the next one has asked for its pages."""
MERGE_US, CLUSTER_MERGE_US = 0.9, 0.65
"""Microseconds of the merge of a thread block's warps, for each 1,024 elements of its rows, and of
a cluster's thread blocks. These numbers and the other times are fitted to 159 times of 60 problems,
most of them of an H200."""
NEXT_US = 1.25
"""Microseconds that an SM loses where one thread block ends and the next begins: its length, table
and queries come from DRAM one after another, and no launch before it hides that."""
NEXT_SHARE = 0.4
"""Part of the passes of later thread blocks that those beside them do not hide."""
OVERLAP = 1.25
"""Order of the norm that adds up what thread blocks wait for and the bytes of all of them."""
MAX_AHEAD_BYTES = 4e6
"""Bytes up to which a launch has asked for all of its pages before it may read: 25 MB that were
asked for early took 1.9 times as long as predicted (6 sequences of 15,904 tokens, a window of
4,096)."""
LARGE_CLUSTER = 8
"""Clusters of so many thread blocks or more leave SMs idle: each lies in one GPC."""

SPACE = {
    "tokens": (32, 16, 64),
    "num_warps": (8, 4, 6, 2),
    "blocks_per_sm": (3, 1, 2, 4, 6, 8),
    "cluster": (1, 2, 4, 8, 16),
    "ahead": (False, True),
}
"""A warp takes ``tokens`` at a time. The thread blocks of a cluster divide the tokens of a sequence
and key-value head. ``blocks_per_sm`` have room on an SM, those of the next launch among them.
``ahead``: pages are prefetched into L2 while the launch before this one still runs. That is faster
for the window of one sequence (2.1 us), and 3 us slower for five short sequences (H200)."""

LESS_ROOM = {more: less for less, more in pairwise(sorted(SPACE["blocks_per_sm"]))}
"""``blocks_per_sm`` -> the next smaller value."""


class _Sizes(NamedTuple):
    """What each configuration asks of a problem."""

    row_tiles: int
    head_dim: int
    token_bytes: int
    group: int
    window: int
    visible: int
    clusters: int


@lru_cache(16)
def _sizes(problem: Problem) -> _Sizes:
    return _Sizes(
        row_tiles(problem), problem["head_dim"], token_bytes(problem), group(problem),
        problem["window"], most_visible(problem), problem["batch"] * problem["kv_heads"],
    )  # fmt: skip


@lru_cache(16)  # each configuration of a choice asks twice
def _shared_bytes(problem: Problem, config: Config) -> int:
    """Stages or accumulators and softmax of all warps, inbox, block table, sinks and a barrier."""
    sizes, num_warps, cluster = _sizes(problem), config["num_warps"], config["cluster"]
    rows, dim = 8 * sizes.row_tiles, sizes.head_dim
    warp = max(4 * rows * (dim + 4), config["tokens"] * sizes.token_bytes)
    inbox = cluster * 4 * 32 * ceil(rows * dim / (16 * cluster)) if cluster > 1 else 32
    table = 4 * TABLE_LOADS * 32 * num_warps if sizes.window else 4
    shared = num_warps * (warp + 8 * rows) + inbox + table + 4 * sizes.group + 16
    return int(ceil(shared / 128) * 128)


def _registers(sizes: _Sizes, config: Config) -> int:
    """Registers of a thread: accumulators, queries, scores, operands, and about 20 others."""
    per_row_tile = 7 * sizes.head_dim // 16 + config["tokens"] // 4 + 8
    return int(sizes.row_tiles * per_row_tile + 20)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not_few_rows(config, problem, gpu):
        return reason
    if problem["kv_dtype"] not in (problem["dtype"], FP8):
        return f"keys and values must be {FP8} or {problem['dtype']} as the queries"
    shared_bytes = _shared_bytes(problem, config)
    if shared_bytes > gpu.shared_bytes:
        return f"{shared_bytes} bytes do not fit the shared memory of {gpu.name}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    sizes, blocks_per_sm = _sizes(problem), config["blocks_per_sm"]
    num_warps, cluster = config["num_warps"], config["cluster"]
    registers = min(MAX_REGISTERS, SM_REGISTERS // (32 * num_warps * blocks_per_sm))
    if (needed := _registers(sizes, config)) > registers:
        return f"{needed} registers of a thread would spill: there are {registers}"
    # The system reserves 1 KB of shared memory for each resident thread block.
    if blocks_per_sm * (_shared_bytes(problem, config) + 1024) > gpu.shared_bytes + 1024:
        return f"{blocks_per_sm} thread blocks do not fit the shared memory of an SM"
    tiles = ceil(sizes.visible / config["tokens"])
    # Of the warps that share one tile, the first does the work; four are the fastest (measured).
    if num_warps * cluster >= (2 * tiles if tiles > 1 else 6):
        return f"half of the warps have none of the {tiles} tiles"
    clusters, less_room = sizes.clusters, LESS_ROOM.get(blocks_per_sm)
    if less_room and next_launch_fits(clusters, cluster, less_room, gpu):
        return f"{clusters} clusters do not need room for {blocks_per_sm} thread blocks an SM"
    blocks = clusters * cluster
    if cluster > 1 and blocks > gpu.sms * blocks_per_sm:
        return f"smaller clusters than {cluster} fill the SMs"
    if config["ahead"] and not _asks_early(problem, blocks, gpu):
        return "pages that are asked for early pay for windows of few sequences only (measured)"
    return None


def _asks_early(problem: Problem, blocks: int, gpu: Gpu) -> bool:
    """Whether all pages are here before the launch may read, if ``blocks`` thread blocks ask."""
    is_small = _work(problem).bytes_moved <= MAX_AHEAD_BYTES
    return bool(problem["window"]) and blocks <= gpu.sms and is_small


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    shared_bytes = _shared_bytes(problem, config)
    arguments = (
        *(kind(problem), group(problem), row_tiles(problem), config["tokens"]),
        *(config["num_warps"], config["cluster"], config["blocks_per_sm"]),
        *(str(config["ahead"]).lower(), shared_bytes),
    )
    source = CudaSource(
        "paged_attn/staged.cu", f"kernelcat::paged_attn_staged<{', '.join(map(str, arguments))}>"
    )
    step = Step(
        source,
        (config["cluster"], problem["kv_heads"], problem["batch"]),
        (*params(problem), Int32(problem["pages"]), Int32(problem["tokens"])),
        32 * config["num_warps"],
        shared_bytes,
        (config["cluster"], 1, 1),
        programmatic=True,
    )
    return Program((step,))


class _Work(NamedTuple):
    """What each estimate asks of a problem."""

    clusters: int
    mean: float
    merge_us: float
    bytes_moved: int


@lru_cache(16)  # as _sizes, of which estimates are no part
def _work(problem: Problem) -> _Work:
    sizes = _sizes(problem)
    elements = problem["max_q"] * sizes.group * sizes.head_dim
    mean = min(mean_context(problem), sizes.visible)
    return _Work(sizes.clusters, mean, MERGE_US * elements / 1024, ENTRY.bytes_moved(problem))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What a chain of launches waits for, and the bytes, which come from L2 with ``ahead``: those
    of all, as fast as memory, or those of the longest sequence, as fast as one SM.

    The first thread block of an SM has the longest sequence, the others have mean ones.
    """
    if num_rows(problem) == 0:
        return RELEASE_US
    clusters, mean, merge_us, bytes_moved = _work(problem)
    cluster, blocks_per_sm = config["cluster"], config["blocks_per_sm"]
    blocks, fits = clusters * cluster, next_launch_fits(clusters, cluster, blocks_per_sm, gpu)
    is_large, room = cluster >= LARGE_CLUSTER, gpu.sms * blocks_per_sm
    at_once = resident_clusters(room, cluster) if is_large else max(room // cluster, 1)
    waves = ceil(clusters / at_once)
    is_ahead = config["ahead"] and fits and bytes_moved <= MAX_AHEAD_BYTES
    pass_us = (L2_US if is_ahead else DRAM_US) + tile_us(problem, config, blocks, gpu)
    merge_us += CLUSTER_MERGE_US if cluster > 1 else 0.0
    waits_us = LOOK_UP_US + passes(problem, config) * pass_us + merge_us
    if waves > 1:
        mean_passes = max(1.0, mean / (config["tokens"] * config["num_warps"] * cluster))
        waits_us += (waves - 1) * (NEXT_US + merge_us + NEXT_SHARE * mean_passes * pass_us)
    dram = BANDWIDTH_EFFICIENCY * gpu.bandwidth
    rate = dram * (L2_TO_DRAM if is_ahead else 1.0)
    # Of eight clusters of 16 thread blocks seven run at once, and the last one has few SMs.
    last = (clusters - 1) % resident_clusters(gpu.sms, cluster) + 1 if is_large else clusters
    last_rate = min(rate, min(last * cluster, gpu.sms) * SM_BANDWIDTH)
    seconds = bytes_moved / clusters * ((clusters - last) / rate + last / last_rate)
    longest_bytes = _sizes(problem).visible * _sizes(problem).token_bytes / cluster
    stream_us = max(seconds, longest_bytes / SM_BANDWIDTH) * 1e6
    total_us = RELEASE_US + (waits_us**OVERLAP + stream_us**OVERLAP) ** (1 / OVERLAP)
    total_us += 0.0 if fits else NO_OVERLAP_US
    if not is_ahead:
        return total_us
    return max(total_us, AHEAD_US + DRAM_US + bytes_moved / dram * 1e6)


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="staged",
    summary="decode of few tokens by mma.sync; each warp stages rows of its own, clusters merge",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "asynchronous copy": "LDGSTS",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=1,
)
