"""`paged_attn` by wgmma for many query tokens: warp-specialized, pages loaded by TMA."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from math import ceil, gcd
from typing import NamedTuple

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import num_rows, num_slots
from kernelcat.kernels.cuda.paged_attn.operands import (
    CACHES,
    cache_map,
    group,
    kind,
    params,
    why_no_boxes,
)
from kernelcat.reference._sequences import query_groups
from kernelcat.reference.paged_attn import ENTRY, is_cut, most_visible
from kernelcat.runtime.gpu import Gpu

COLUMNS = 64
"""16-bit elements in a row of the 128-byte swizzle."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Registers of a consumer thread, by the number of consumer warpgroups."""
OTHER_REGISTERS = 32
"""Registers of a consumer thread beside scores, accumulators and weights."""
EFFICIENCY = 1.1
"""Fraction of the tensor cores' peak at the clock of a data sheet. This and the next numbers are
fitted to 654 times of 44 problems on an H200, with the lengths of each sequence."""
SCORE_US, CAPPED_US = {2: 2.7e-5, 3: 2.2e-5}, 6.1e-5
"""Microseconds of an SM for the softmax of a score that no product hides, by the number of consumer
warpgroups; and for its softcap."""
START_US, FILL_US = 3.0, 7.6e-5
"""From the launch to the first product and from the last one to the end; and for each element of
the first KV tile's keys."""
ROW_TILE_US = 2.6
"""Microseconds that a thread block loses between two row tiles."""
SHARED = 0.98
"""Time of a token in a cluster of two, which loads keys and values once, over that of one thread
block."""
KV_TILE_US = {2: 0.175, 3: 0.15}
"""Microseconds that a thread block waits at each KV tile, by the number of stages."""

SPACE = {"block_m": (128, 192), "block_n": (128, 160, 64, 192), "stages": (2, 3), "cluster": (2, 1)}
"""In order of preference."""


def _shared_bytes(problem: Problem, config: Config) -> int:
    """The queries and the stages; then barriers, and what is lost to alignment."""
    rows = config["block_m"] + 2 * config["stages"] * config["block_n"]
    return int(rows * problem["head_dim"] * 2 + 4096)


def _box_tokens(problem: Problem, config: Config) -> int:
    """Tokens of a box, which lies within a page."""
    return gcd(config["block_n"] // config["cluster"], problem["page_size"])


def _rows(problem: Problem) -> int:
    """Rows of a key-value head, of the sequence with the most query tokens."""
    return int(problem["max_q"] * group(problem))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, block_n, dim = config["block_m"], config["block_n"], problem["head_dim"]
    if problem["kv_dtype"] != problem["dtype"]:
        return f"wgmma needs keys and values of the queries' type, {problem['dtype']}"
    if problem["has_scales"] and problem["page_scales"]:
        return "the kernel does not load scales of pages"
    if group(problem) > block_m:
        return f"the {group(problem)} heads that share keys are more than a tile's {block_m} rows"
    if reason := why_no_boxes(problem, _box_tokens(problem, config)):
        return reason
    warpgroups = block_m // 64
    registers = block_n // 2 + dim // 2 + block_n // 4 + OTHER_REGISTERS
    if registers > CONSUMER_REGISTERS[warpgroups]:
        return f"{block_n} x {dim} needs {registers} registers; {warpgroups} warpgroups have fewer"
    if _shared_bytes(problem, config) > gpu.shared_bytes:
        return f"{config['stages']} stages do not fit the shared memory of {gpu.name}"
    if problem["batch"] * problem["kv_heads"] * _row_tiles(problem, config) >= 1 << 31:
        return "there are more row tiles than 32 bits count"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, rows = config["block_m"], _rows(problem)
    if config["cluster"] > 1 and rows <= block_m:
        return f"{rows} rows are one row tile, and clusters share the keys of two"
    if 2 * rows <= block_m:
        return f"tiles of {block_m} rows would be mostly empty with {rows} rows"
    return None


def _row_tiles(problem: Problem, config: Config) -> int:
    """Row tiles of the longest sequence and a key-value head, for a thread block of a cluster."""
    return ceil(problem["max_q"] / (config["block_m"] // group(problem) * config["cluster"]))


def _query_map(problem: Problem, block_m: int) -> TensorMap:
    """Over (tokens, kv_heads, group, head_dim): boxes of whole tokens, of a key-value head."""
    heads, dim = group(problem), problem["head_dim"]
    return TensorMap(
        "q",
        problem["dtype"],
        (dim, heads, problem["kv_heads"], problem["tokens"]),
        (dim * 2, heads * dim * 2, problem["heads"] * dim * 2),
        (COLUMNS, heads, 1, block_m // heads),
        swizzle=2 * COLUMNS,
    )


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    arguments = (kind(problem), *(config[name] for name in SPACE))
    source = CudaSource(
        "paged_attn/wgmma.cu", f"kernelcat::paged_attn_wgmma<{', '.join(map(str, arguments))}>"
    )
    row_tiles, cluster = _row_tiles(problem, config), config["cluster"]
    clusters = min(gpu.sms // cluster, row_tiles * problem["kv_heads"] * problem["batch"])
    step = Step(
        source,
        (clusters * cluster, 1, 1),
        (
            _query_map(problem, config["block_m"]),
            *(cache_map(name, problem, _box_tokens(problem, config)) for name in CACHES),
            *params(problem),
            Int32(num_slots(problem)),
        ),
        128 * (config["block_m"] // 64 + 1),
        _shared_bytes(problem, config),
        (cluster, 1, 1),
    )
    return Program((step,))


class _RowTiles(NamedTuple):
    """Row tiles of one key-value head: how many, and the tokens that the first and the last see."""

    count: int
    fewest: float
    most: float


@lru_cache(64)  # the configurations of a choice ask for a few heights
def _row_tiles_of(problem: Problem, queries: int) -> list[_RowTiles]:
    """The row tiles of ``queries`` query tokens of each kind of sequence, shortest ones first."""
    window, found = problem["window"], []
    for sequences, new, tokens in sorted(query_groups(problem), key=lambda group: group.tokens):
        most, fewest = tokens, tokens - new + min(queries, new)
        if window:
            seen = window + min(queries, new) - 1
            most, fewest = min(most, seen), min(fewest, seen)
        found.append(_RowTiles(sequences * ceil(new / queries), fewest, most))
    return found


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """All row tiles divided evenly, or the longest one, or bytes.

    Clusters take equally many row tiles, the longest first (prefill_schedule.cuh). In the last
    round some take none: so no cluster with one has less than an even part of the rounds before,
    and the longest row tile of that round. A row tile of one query takes as long for a cached token
    as a full one. The last KV tile is half empty, and with a window the first one, too.
    """
    if num_rows(problem) == 0:
        return LAUNCH_US
    block_m, block_n, cluster = config["block_m"], config["block_n"], config["cluster"]
    rate = gpu.flops[problem["dtype"]] / gpu.sms * EFFICIENCY / 1e6  # a microsecond, of an SM
    score_us = SCORE_US[block_m // 64] + (CAPPED_US if problem["softcap"] else 0.0)
    token_us = block_m * (4 * problem["head_dim"] / rate + score_us)
    token_us = (token_us + KV_TILE_US[config["stages"]] / block_n) * (SHARED if cluster > 1 else 1)
    half_empty = 2 if is_cut(problem) else 1
    row_tile_us = ROW_TILE_US + half_empty * block_n / 2 * token_us

    queries = block_m // group(problem) * cluster  # of a cluster's row tile
    groups = _row_tiles_of(problem, queries)
    heads, clusters = problem["kv_heads"], gpu.sms // cluster
    tiles = heads * sum(tiles.count for tiles in groups)
    tokens = heads * sum(tiles.count * (tiles.fewest + tiles.most) / 2 for tiles in groups)
    longest_us = row_tile_us + most_visible(problem, queries * group(problem)) * token_us
    rounds = ceil(tiles / clusters)
    last_tokens, most = _last_round(groups, heads, tiles - (rounds - 1) * clusters)
    seen = max(tokens / clusters, (tokens - last_tokens) / clusters + most)
    even_us = rounds * row_tile_us + seen * token_us
    bytes_us = copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * min(1.0, tiles * cluster / gpu.sms))
    start_us = START_US + FILL_US * block_n * problem["head_dim"]
    return float(start_us + max(even_us, longest_us, bytes_us))


def _last_round(groups: list[_RowTiles], heads: int, left: int) -> tuple[float, float]:
    """The tokens that the ``left`` row tiles of the last round see together, and the longest."""
    tokens, most = 0.0, 0.0
    for of_group in groups:
        count = heads * of_group.count
        taken = min(left, count)
        most = of_group.fewest + taken / count * (of_group.most - of_group.fewest)
        tokens += taken * (of_group.fewest + most) / 2
        left -= taken
        if left == 0:
            break
    return tokens, most


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The first that is promising, else the first that is legal, else the first."""
    promising = IMPLEMENTATION.configs(problem, gpu)
    legal = IMPLEMENTATION.legal(problem, gpu)
    return next(chain(promising, legal, IMPLEMENTATION.whole_space()))


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="wgmma",
    summary="prefill by warp-specialized wgmma, pages by TMA, softmax between products",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "register reallocation": "USETMAXREG",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=3,
)
