"""`paged_attn` for few rows on Hopper: every warp streams pages of its own by TMA."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.paged_attn.operands import (
    CACHES,
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
from kernelcat.model import BANDWIDTH_EFFICIENCY, LAUNCH_US, WAVE_LATENCY_US, copy_us
from kernelcat.reference.paged_attn import ENTRY, FP8
from kernelcat.spec import Problem

MAX_STAGES = 8
REGISTERS = 1 << 16
IN_FLIGHT = 64 << 10
"""Bytes that an SM must have in flight for the whole of the bandwidth."""

SPACE = {
    "tokens": (32, 16, 64),
    "num_warps": (8, 4),
    "blocks_per_sm": (1, 2, 3),
    "cluster": (1, 2, 4, 8, 16),
}
"""A warp takes ``tokens`` at a time; the blocks of a cluster share those of a sequence."""


def _rows(problem: Problem) -> int:
    """Of a key-value head and the sequence with the most query tokens."""
    return int(problem["max_q"] * group(problem))


def _row_tiles(problem: Problem) -> int:
    """Of eight rows, the columns of mma.sync."""
    return ceil(_rows(problem) / 8)


def _box_tokens(problem: Problem, config: Config) -> int:
    return int(min(config["tokens"], problem["page_size"]))


def _stage_bytes(problem: Problem, config: Config) -> int:
    return config["tokens"] * token_bytes(problem)


def _fixed_bytes(problem: Problem, config: Config) -> int:
    """Of a block: what other blocks send, the rows' sums, barriers, what alignment costs."""
    rows, warps, cluster = 8 * _row_tiles(problem), config["num_warps"], config["cluster"]
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
    """Sums, queries, scores and about 60 others, of a thread."""
    return _row_tiles(problem) * (3 * problem["head_dim"] // 8 + config["tokens"] // 4) + 60


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, warps = _rows(problem), config["num_warps"]
    if rows > 16:
        return f"{rows} rows; 16 at most are kept in registers"
    if problem["kv_dtype"] not in (problem["dtype"], FP8):
        return "keys and values are float8, or as queries are"
    if problem["has_scales"] and problem["page_scales"]:
        return "scales of pages are not loaded"
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
    sums = 32 * _row_tiles(problem) * (problem["head_dim"] + 4)
    if sums > stages * _stage_bytes(problem, config):
        return "a warp's sums do not fit its stages"
    return _cluster_reason(config, problem, gpu)


def _cluster_reason(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    cluster, tiles = config["cluster"], problem["batch"] * problem["kv_heads"]
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
        *(kind(problem), _row_tiles(problem), config["tokens"], config["num_warps"]),
        *(stages, config["cluster"], config["blocks_per_sm"]),
    )
    source = CudaSource(
        "paged_attn/tma.cu", f"kernelcat::paged_attn_tma<{', '.join(map(str, arguments))}>"
    )
    step = Step(
        source,
        (config["cluster"], problem["kv_heads"], problem["batch"]),
        (
            *(cache_map(name, problem, _box_tokens(problem, config)) for name in CACHES),
            *params(problem),
            Int32(slots(problem)),
        ),
        32 * config["num_warps"],
        _shared_bytes(problem, config, gpu),
        (config["cluster"], 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes, at the pace of the SMs that have work, in whole waves."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    blocks = problem["batch"] * problem["kv_heads"] * config["cluster"]
    at_once = gpu.sms * config["blocks_per_sm"]
    waves = ceil(blocks / at_once)
    busy = blocks / (waves * at_once) if waves > 1 else min(1.0, blocks / gpu.sms)
    per_sm = min(config["blocks_per_sm"], max(1.0, blocks / gpu.sms))
    ring = config["num_warps"] * _num_stages(problem, config, gpu) * _stage_bytes(problem, config)
    flow = min(1.0, (per_sm * ring / IN_FLIGHT) ** 0.5)
    # Small tiles wait and vote more often; larger clusters merge longer, and need room in one GPC.
    haste = 1 - 4 / (4 + config["tokens"])
    merge_us = 0.1 * config["cluster"]
    rate = BANDWIDTH_EFFICIENCY * busy * flow * haste
    stream_us = copy_us(ENTRY.bytes_moved(problem), gpu, rate)
    return LAUNCH_US + waves * WAVE_LATENCY_US + merge_us + stream_us


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    configs = [c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None]
    fallback = Config(tokens=16, num_warps=4, blocks_per_sm=1, cluster=1)
    return min(configs, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="tma",
    summary="decode by mma.sync, rows as columns; each warp streams pages by TMA, clusters merge",
    archs=("sm_90a",),
    space=SPACE,
    reject=_reject,
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
