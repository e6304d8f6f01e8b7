"""`paged_attn` by wgmma for many query tokens: warp-specialized, pages loaded by TMA."""

from __future__ import annotations

from math import ceil, gcd

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.paged_attn.operands import (
    CACHES,
    cache_map,
    group,
    kind,
    num_rows,
    params,
    q_len,
    slots,
    why_no_boxes,
)
from kernelcat.reference.paged_attn import ENTRY
from kernelcat.runtime.gpu import Gpu

COLUMNS = 64
"""Of a row of the 128-byte swizzle."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
OTHER_REGISTERS = 32
EFFICIENCY = 0.75
"""Of the tensor cores' peak."""
ROW_TILE_US = 2.0
"""What a block loses between two tiles of rows."""

SPACE = {"block_m": (128, 192), "block_n": (128, 160, 64, 192), "stages": (2, 3), "cluster": (2, 1)}


def _shared_bytes(problem: Problem, config: Config) -> int:
    """The queries and the stages; then barriers, and what is lost to alignment."""
    rows = config["block_m"] + 2 * config["stages"] * config["block_n"]
    return int(rows * problem["head_dim"] * 2 + 4096)


def _box_tokens(problem: Problem, config: Config) -> int:
    """That a block loads at once: they lie within a page."""
    return gcd(config["block_n"] // config["cluster"], problem["page_size"])


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, block_n, dim = config["block_m"], config["block_n"], problem["head_dim"]
    rows = problem["max_q"] * group(problem)
    if config["cluster"] > 1 and rows <= block_m:
        return "a cluster shares what two tiles of rows read"
    if problem["kv_dtype"] != problem["dtype"]:
        return "wgmma takes keys and values as queries are"
    if problem["has_scales"] and problem["page_scales"]:
        return "scales of pages are not loaded"
    if group(problem) > block_m:
        return f"{group(problem)} heads share keys, more than a tile's {block_m} rows"
    if 2 * rows <= block_m:
        return f"tiles of {block_m} rows are mostly empty at {rows}"
    if reason := why_no_boxes(problem, _box_tokens(problem, config)):
        return reason
    registers = block_n // 2 + dim // 2 + block_n // 4 + OTHER_REGISTERS
    if registers > CONSUMER_REGISTERS[block_m // 64]:
        return f"{block_m // 64} warpgroups have no registers for {block_n} x {dim}"
    if _shared_bytes(problem, config) > gpu.shared_bytes:
        return f"{config['stages']} stages do not fit {gpu.name}'s shared memory"
    if problem["batch"] * problem["kv_heads"] * _row_tiles(problem, config) >= 1 << 31:
        return "more tiles of rows than are counted in 32 bits"
    return None


def _row_tiles(problem: Problem, config: Config) -> int:
    """Of the longest sequence, a key-value head and a block of a cluster."""
    return ceil(problem["max_q"] / (config["block_m"] // group(problem) * config["cluster"]))


def _query_map(problem: Problem, block_m: int) -> TensorMap:
    """(tokens, kv_heads, group, head_dim): boxes of whole tokens, the heads that share keys."""
    shared_by, dim = group(problem), problem["head_dim"]
    return TensorMap(
        "q",
        problem["dtype"],
        (dim, shared_by, problem["kv_heads"], problem["tokens"]),
        (dim * 2, shared_by * dim * 2, problem["heads"] * dim * 2),
        (COLUMNS, shared_by, 1, block_m // shared_by),
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
            Int32(slots(problem)),
            Int32(row_tiles),
        ),
        128 * (config["block_m"] // 64 + 1),
        _shared_bytes(problem, config),
        (cluster, 1, 1),
    )
    return Program((step,))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Products or bytes on the SMs that have work; the model knows no better tile."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    rows = q_len(problem) * group(problem)
    per_head = ceil(q_len(problem) / (config["block_m"] // group(problem)))
    tiles = per_head * problem["kv_heads"] * problem["batch"]
    busy = min(1.0, tiles / gpu.sms)
    padding = per_head * config["block_m"] / max(rows, 1)
    flops = ENTRY.flops(problem) * padding
    math_us = flops / (gpu.flops[problem["dtype"]] * EFFICIENCY * busy) * 1e6
    bytes_us = copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * busy)
    return max(math_us, bytes_us) + ceil(tiles / gpu.sms) * ROW_TILE_US


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The first that serves: the space is in order of preference."""
    configs = (c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None)
    return next(configs, Config(block_m=128, block_n=64, stages=2, cluster=1))


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="wgmma",
    summary="prefill by warp-specialized wgmma, pages by TMA, softmax between products",
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
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=3,
)
