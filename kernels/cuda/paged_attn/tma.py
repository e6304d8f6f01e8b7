"""`paged_attn` for few rows on Hopper: every warp streams pages of its own by TMA."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, row_share
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import context, num_rows, num_slots
from kernelcat.kernels.cuda.paged_attn.few_rows import (
    MAX_ROWS,
    NO_OVERLAP_US,
    next_launch_fits,
)
from kernelcat.kernels.cuda.paged_attn.operands import (
    BYTES_IN_FLIGHT,
    CACHES,
    MAX_REGISTERS,
    SM_REGISTERS,
    cache_map,
    group,
    kind,
    params,
    token_bytes,
    why_no_boxes,
)
from kernelcat.reference.paged_attn import ENTRY, FP8, most_visible
from kernelcat.runtime.gpu import Gpu

MAX_STAGES = 8
START_US, WAVE_US = 1.4, 1.25
"""Microseconds until a launch reads, and of each wave of thread blocks. These numbers and the next
ones are fitted to 70 times of 30 problems on an H200."""
MERGE_US = 0.1
"""Microseconds that each thread block of a cluster adds to the merge."""
TOKEN_US = 0.005
"""Microseconds of a warp for a token, where no other launch or wave hides them."""
SM_BANDWIDTH = 50e9
"""Bytes per second that reach one SM."""

SPACE = {
    "tokens": (32, 16, 64),
    "num_warps": (8, 4),
    "blocks_per_sm": (1, 2, 3),
    "cluster": (1, 2, 4, 8, 16),
    "heads": (1, 2),
}
"""A warp takes ``tokens`` at a time. The thread blocks of a cluster divide the tokens of a
sequence; each takes ``heads`` key-value heads."""


def _rows(problem: Problem) -> int:
    """Rows of a key-value head, of the sequence with the most query tokens."""
    return int(problem["max_q"] * group(problem))


def _row_tiles(problem: Problem, heads: int = 1) -> int:
    """Row tiles of eight rows, the columns of mma.sync."""
    return heads * ceil(_rows(problem) / 8)


def _box_tokens(problem: Problem, config: Config) -> int:
    return int(min(config["tokens"], problem["page_size"]))


def _stage_bytes(problem: Problem, config: Config) -> int:
    return int(config["heads"] * config["tokens"] * token_bytes(problem))


def _fixed_bytes(problem: Problem, config: Config) -> int:
    """Shared memory beside the rings: what other thread blocks send, the softmax of the rows,
    barriers, alignment."""
    rows = 8 * _row_tiles(problem, config["heads"])
    warps, cluster = config["num_warps"], config["cluster"]
    chunks = ceil(rows * problem["head_dim"] / (16 * cluster))  # of 64 bytes, of the result
    inbox = 4 * 32 * chunks * cluster if cluster > 1 else 32
    return int(inbox + 8 * warps * (rows + MAX_STAGES) + 16 + 2048)


def _num_stages(problem: Problem, config: Config, gpu: Gpu) -> int:
    """As many as fit, and as a warp has lanes for their boxes."""
    # The system reserves 1 KB of shared memory for each resident thread block.
    available = (gpu.shared_bytes + 1024) // config["blocks_per_sm"] - 1024
    available -= _fixed_bytes(problem, config)
    stages = available // (config["num_warps"] * _stage_bytes(problem, config))
    lanes = 32 // (config["tokens"] // _box_tokens(problem, config))
    return int(min(stages, lanes, MAX_STAGES))


def _shared_bytes(problem: Problem, config: Config, gpu: Gpu) -> int:
    rings = config["num_warps"] * _num_stages(problem, config, gpu)
    return rings * _stage_bytes(problem, config) + _fixed_bytes(problem, config)


def _registers(problem: Problem, config: Config) -> int:
    """Registers of a thread: accumulators, queries, scores, weights, loads and about 34 others."""
    per_row_tile = 5 * problem["head_dim"] // 8 + config["tokens"] // 2
    return int(_row_tiles(problem, config["heads"]) * per_row_tile + 34)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    heads, kv_heads = config["heads"], problem["kv_heads"]
    if _rows(problem) > MAX_ROWS:
        return f"{_rows(problem)} rows are more than the {MAX_ROWS} that registers hold"
    if problem["kv_dtype"] not in (problem["dtype"], FP8):
        return f"keys and values must be {FP8} or {problem['dtype']} as the queries"
    if problem["has_scales"] and problem["page_scales"]:
        return "the kernel does not load scales of pages"
    if kv_heads % heads:
        return f"kv_heads={kv_heads} must be a multiple of heads={heads}"
    if heads > 1 and heads * token_bytes(problem) > 256:
        return f"the keys of {heads} heads are longer than the 128 bytes of a swizzle row"
    if reason := why_no_boxes(problem, _box_tokens(problem, config)):
        return reason
    if max(problem["batch"], kv_heads) > 65535:
        return "batch and kv_heads must be at most 65535, a grid's size in y and z"
    stages = _num_stages(problem, config, gpu)
    if stages < 2:
        return f"two stages do not fit the shared memory of {gpu.name}"
    accumulators = 32 * _row_tiles(problem, heads) * (problem["head_dim"] + 4)
    if accumulators > stages * _stage_bytes(problem, config):
        return f"the {accumulators} bytes of a warp's accumulators do not fit its stages"
    if config["cluster"] > 8 and gpu.mig:
        return "a slice of a GPU may have no room for a cluster of 16"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads = 32 * config["num_warps"] * config["blocks_per_sm"]
    registers = min(MAX_REGISTERS, SM_REGISTERS // threads)
    if _registers(problem, config) > registers:
        needed = _registers(problem, config)
        return f"{needed} registers of a thread would spill: there are {registers}"
    return _unpromising_cluster(config, problem, gpu)


def _tiles(problem: Problem, config: Config) -> int:
    """Sequences times heads, as clusters take them."""
    return int(problem["batch"] * problem["kv_heads"] // config["heads"])


def _unpromising_cluster(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    cluster, tiles = config["cluster"], _tiles(problem, config)
    visible = min(context(problem), problem["window"] or context(problem))
    busy_blocks = visible // (config["tokens"] * config["num_warps"])  # all their warps have work
    if cluster > max(busy_blocks, 1):
        return f"{visible} tokens are too few for the warps of {cluster} thread blocks"
    if cluster > 1 and tiles * cluster > gpu.sms * config["blocks_per_sm"]:
        return f"smaller clusters than {cluster} fill the SMs"
    if 2 * cluster <= min(busy_blocks, 16) and 4 * tiles * cluster <= gpu.sms:
        return f"clusters of {cluster} leave three quarters of the SMs idle"
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
            Int32(num_slots(problem)),
        ),
        32 * config["num_warps"],
        _shared_bytes(problem, config, gpu),
        (config["cluster"], 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The bytes, as fast as the busy SMs read them, and in a single wave what nothing hides."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    blocks = _tiles(problem, config) * config["cluster"]
    waves = ceil(blocks / (gpu.sms * config["blocks_per_sm"]))
    per_sm = min(config["blocks_per_sm"], max(1.0, blocks / gpu.sms))
    ring = config["num_warps"] * _num_stages(problem, config, gpu) * _stage_bytes(problem, config)
    flow = min(1.0, (per_sm * ring / BYTES_IN_FLIGHT) ** 0.5)
    # Small KV tiles wait and vote more often.
    tile_efficiency = 1 - 1 / (1 + config["tokens"])
    share = row_share(config["heads"] * token_bytes(problem) // 2)
    rate = min(share * gpu.bandwidth * flow, min(blocks, gpu.sms) * SM_BANDWIDTH)
    stream_us = ENTRY.bytes_moved(problem) / (rate * tile_efficiency) * 1e6
    longest_bytes = most_visible(problem) * config["heads"] * token_bytes(problem)
    longest_us = longest_bytes / config["cluster"] / SM_BANDWIDTH * 1e6
    stream_us = max(stream_us, longest_us)  # no other thread block takes a part of it
    total_us = START_US + MERGE_US * config["cluster"] + stream_us
    if waves > 1:
        return total_us + waves * WAVE_US
    fits = next_launch_fits(
        _tiles(problem, config), config["cluster"], config["blocks_per_sm"], gpu
    )
    gap_us = 0.0 if fits else NO_OVERLAP_US
    warp_tokens = most_visible(problem) / (config["cluster"] * config["num_warps"])
    return total_us + WAVE_US + gap_us + warp_tokens * TOKEN_US


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="tma",
    summary="decode by transposed mma.sync; each warp streams pages by TMA, clusters merge",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
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
