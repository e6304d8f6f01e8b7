"""`paged_attn` for few rows on Hopper: every warp streams pages of its own by TMA."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US, WAVE_LATENCY_US
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.paged_attn.operands import (
    CACHES,
    IN_FLIGHT,
    REGISTERS,
    cache_map,
    context,
    group,
    kind,
    num_rows,
    params,
    slots,
    token_bytes,
    why_no_boxes,
)
from kernelcat.reference.paged_attn import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

MAX_STAGES = 8
SM_BANDWIDTH = 60e9
"""Bytes a second that reach one SM while others have nothing to read."""
GPC_SMS = 14
"""Of a graphics processing cluster that has few; a cluster of blocks lies within one."""
LONELY_US = 1.0
"""What it costs where the next launch finds no room before this one ends."""
MERGE_US = 0.12
"""What each block of a cluster adds to the merge."""
TOKEN_US = 0.006
"""What a warp takes for a token, where no other launch or wave hides it."""

SPACE = {
    "tokens": (32, 16, 64),
    "num_warps": (8, 4),
    "blocks_per_sm": (1, 2, 3),
    "cluster": (1, 2, 4, 8, 16),
    "heads": (1, 2),
}
"""A warp takes ``tokens`` at a time; the blocks of a cluster share those of a sequence, each of
``heads`` key-value heads."""


def _rows(problem: Problem) -> int:
    """Of a key-value head and the sequence with the most query tokens."""
    return int(problem["max_q"] * group(problem))


def _row_tiles(problem: Problem, heads: int = 1) -> int:
    """Of eight rows, the columns of mma.sync."""
    return heads * ceil(_rows(problem) / 8)


def _box_tokens(problem: Problem, config: Config) -> int:
    return int(min(config["tokens"], problem["page_size"]))


def _stage_bytes(problem: Problem, config: Config) -> int:
    return int(config["heads"] * config["tokens"] * token_bytes(problem))


def _fixed_bytes(problem: Problem, config: Config) -> int:
    """Of a block: what other blocks send, the rows' sums, barriers, what alignment costs."""
    rows = 8 * _row_tiles(problem, config["heads"])
    warps, cluster = config["num_warps"], config["cluster"]
    chunks = ceil(rows * problem["head_dim"] / (16 * cluster))  # of 64 bytes, of the result
    inbox = 4 * 32 * chunks * cluster if cluster > 1 else 32
    return int(inbox + 8 * warps * (rows + MAX_STAGES) + 16 + 2048)


def _num_stages(problem: Problem, config: Config, gpu: Gpu) -> int:
    """As many as fit, and as a warp has lanes for their boxes."""
    # Each block costs a KB more.
    room = (gpu.shared_bytes + 1024) // config["blocks_per_sm"] - 1024
    room -= _fixed_bytes(problem, config)
    stages = room // (config["num_warps"] * _stage_bytes(problem, config))
    lanes = 32 // (config["tokens"] // _box_tokens(problem, config))
    return int(min(stages, lanes, MAX_STAGES))


def _shared_bytes(problem: Problem, config: Config, gpu: Gpu) -> int:
    rings = config["num_warps"] * _num_stages(problem, config, gpu)
    return rings * _stage_bytes(problem, config) + _fixed_bytes(problem, config)


def _registers(problem: Problem, config: Config) -> int:
    """Sums, queries, scores, weights and what is loaded, and about 34 others, of a thread."""
    own = 5 * problem["head_dim"] // 8 + config["tokens"] // 2
    return int(_row_tiles(problem, config["heads"]) * own + 34)


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, warps = _rows(problem), config["num_warps"]
    if rows > 16:
        return f"{rows} rows; 16 at most are kept in registers"
    if problem["kv_dtype"] not in (problem["dtype"], FP8):
        return "keys and values are float8, or as queries are"
    if problem["has_scales"] and problem["page_scales"]:
        return "scales of pages are not loaded"
    if problem["kv_heads"] % config["heads"]:
        return f"{problem['kv_heads']} key-value heads are not dealt out by {config['heads']}"
    if config["heads"] > 1 and config["heads"] * token_bytes(problem) > 256:
        return "a head's row fills 128 bytes by itself"
    if reason := why_no_boxes(problem, _box_tokens(problem, config)):
        return reason
    if max(problem["batch"], problem["kv_heads"]) > 65535:
        return "more sequences or heads than a grid has blocks"
    threads = 32 * warps * config["blocks_per_sm"]
    if _registers(problem, config) * threads > REGISTERS or _registers(problem, config) > 255:
        return f"{config['blocks_per_sm']} blocks an SM would leave too few registers"
    stages = _num_stages(problem, config, gpu)
    if stages < 2:
        return f"two stages do not fit {gpu.name}'s shared memory"
    sums = 32 * _row_tiles(problem, config["heads"]) * (problem["head_dim"] + 4)
    if sums > stages * _stage_bytes(problem, config):
        return "a warp's sums do not fit its stages"
    return _cluster_reason(config, problem, gpu)


def _tiles(problem: Problem, config: Config) -> int:
    """Sequences and heads, as blocks or clusters take them."""
    return int(problem["batch"] * problem["kv_heads"] // config["heads"])


def _cluster_reason(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    cluster, tiles = config["cluster"], _tiles(problem, config)
    seen = min(context(problem), problem["window"] or context(problem))
    most = seen // (config["tokens"] * config["num_warps"])  # that have work for all warps
    if cluster > max(most, 1):
        return f"{cluster} blocks share too few tokens"
    if cluster > 8 and gpu.mig:
        return "a slice of a GPU may have no room for 16 blocks side by side"
    if cluster > 1 and tiles * cluster > gpu.sms * config["blocks_per_sm"]:
        return "the SMs are full with smaller clusters"
    if 2 * cluster <= min(most, 16) and 4 * tiles * cluster <= gpu.sms:
        return "three quarters of the SMs or more are idle"
    return None


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    stages = _num_stages(problem, config, gpu)
    arguments = (
        *(kind(problem), config["heads"], _row_tiles(problem), config["tokens"]),
        *(config["num_warps"], stages, config["cluster"]),
        config["blocks_per_sm"],
    )
    source = CudaSource(
        "paged_attn/tma.cu", f"kernelcat::paged_attn_tma<{', '.join(map(str, arguments))}>"
    )
    step = Step(
        source,
        (config["cluster"], problem["kv_heads"] // config["heads"], problem["batch"]),
        (
            *(
                cache_map(name, problem, _box_tokens(problem, config), config["heads"])
                for name in CACHES
            ),
            *params(problem),
            Int32(slots(problem)),
        ),
        32 * config["num_warps"],
        _shared_bytes(problem, config, gpu),
        (config["cluster"], 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _next_starts(problem: Problem, config: Config, gpu: Gpu) -> bool:
    """Whether the next launch's blocks find room beside these, cluster by cluster."""
    blocks, cluster = config["blocks_per_sm"], config["cluster"]
    clusters = gpu.sms // GPC_SMS * (GPC_SMS * blocks // cluster)
    return 2 * _tiles(problem, config) <= clusters


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes, at the pace of the SMs that have work, and what nothing hides in a single wave."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    blocks = _tiles(problem, config) * config["cluster"]
    waves = ceil(blocks / (gpu.sms * config["blocks_per_sm"]))
    per_sm = min(config["blocks_per_sm"], max(1.0, blocks / gpu.sms))
    ring = config["num_warps"] * _num_stages(problem, config, gpu) * _stage_bytes(problem, config)
    flow = min(1.0, (per_sm * ring / IN_FLIGHT) ** 0.5)
    # Small tiles wait and vote more often.
    haste = 1 - 2 / (2 + config["tokens"])
    rate = min(BANDWIDTH_EFFICIENCY * gpu.bandwidth * flow, min(blocks, gpu.sms) * SM_BANDWIDTH)
    stream_us = ENTRY.bytes_moved(problem) / (rate * haste) * 1e6
    total_us = LAUNCH_US + MERGE_US * config["cluster"] + stream_us
    if waves > 1:
        return total_us + waves * WAVE_LATENCY_US
    lonely_us = 0.0 if _next_starts(problem, config, gpu) else LONELY_US
    per_warp = context(problem) / (config["cluster"] * config["num_warps"])
    return total_us + WAVE_LATENCY_US + lonely_us + per_warp * TOKEN_US


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    configs = [c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None]
    fallback = Config(tokens=16, num_warps=4, blocks_per_sm=1, cluster=1, heads=1)
    return min(configs, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="tma",
    summary="decode by mma.sync, rows as columns; each warp streams pages by TMA, clusters merge",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "tma": "UTMALDG",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=4,
)
