"""`paged_attn` by wgmma for many query tokens: warp-specialized, pages loaded by TMA."""

from __future__ import annotations

from itertools import chain
from math import ceil, gcd

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
from kernelcat.reference.paged_attn import ENTRY, most_visible, tiles_seen
from kernelcat.runtime.gpu import Gpu

COLUMNS = 64
"""16-bit elements in a row of the 128-byte swizzle."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Registers of a consumer thread, by the number of consumer warpgroups."""
OTHER_REGISTERS = 32
"""Registers of a consumer thread beside scores, accumulators and weights."""
EFFICIENCY = 1.0
"""Fraction of the tensor cores' peak. This and the next numbers are fitted to 123 times of 30
problems on an H200."""
SCORE_US, CAPPED_US = 2.8e-5, 4e-5
"""Microseconds of an SM for the softmax of a score that no product hides, and for its softcap."""
START_US = 3.2
"""From the launch to the first product, and from the last one to the end."""
ROW_TILE_US = 2.6
"""Microseconds that a thread block loses between two row tiles."""
SHARED = 0.9
"""Time of a token in a cluster of two, which loads keys and values once, over that of one thread
block. This and the next number are fitted to each time against the others of its problem."""
KV_TILE_US = 0.27
"""Microseconds that a thread block waits at each KV tile."""

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
            Int32(row_tiles),
        ),
        128 * (config["block_m"] // 64 + 1),
        _shared_bytes(problem, config),
        (cluster, 1, 1),
    )
    return Program((step,))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Row tiles in whole waves of clusters, the longest ones, or bytes.

    A row tile of one query takes as long for a cached token as a full one. Where a chunk of a
    prompt is beside sequences with one query, and each cluster has two row tiles or more, some
    cluster has both one of the chunk and the longest sequence, since row tiles are dealt out by
    their number; with fewer row tiles it is the less likely. The last KV tile is half empty. Does
    not depend on ``stages``.
    """
    if num_rows(problem) == 0:
        return LAUNCH_US
    block_m, cluster = config["block_m"], config["cluster"]
    in_tile = block_m // group(problem) * cluster  # queries of a cluster's row tiles
    head_tiles, head_tokens = tiles_seen(problem, in_tile * group(problem))
    tiles, mean = head_tiles * problem["kv_heads"], head_tokens / head_tiles
    rate = gpu.flops[problem["dtype"]] / gpu.sms * EFFICIENCY / 1e6  # a microsecond, of an SM
    score_us = SCORE_US + (CAPPED_US if problem["softcap"] else 0.0)
    token_us = block_m * (4 * problem["head_dim"] / rate + score_us)
    token_us = (token_us + KV_TILE_US / config["block_n"]) * (SHARED if cluster > 1 else 1.0)
    row_tile_us = ROW_TILE_US + config["block_n"] / 2 * token_us
    waves_us = ceil(tiles / (gpu.sms // cluster)) * (row_tile_us + mean * token_us)
    longest, groups = most_visible(problem, in_tile * group(problem)), query_groups(problem)
    longest_us = row_tile_us + longest * token_us
    if len(groups) > 1:
        chance = min(max(tiles / (gpu.sms // cluster) - 1, 0.0), 1.0)
        longest_us += chance * (row_tile_us + min(groups[0].tokens, longest) * token_us)
    bytes_us = copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * min(1.0, tiles * cluster / gpu.sms))
    return float(START_US + max(waves_us, longest_us, bytes_us))


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
