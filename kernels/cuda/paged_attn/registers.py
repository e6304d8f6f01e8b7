"""`paged_attn` for few tokens a thread block: keys and values go straight into registers."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US, why_slower
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import num_rows
from kernelcat.kernels.cuda.paged_attn import tma
from kernelcat.kernels.cuda.paged_attn.few_rows import (
    TABLE_LOADS,
    longest_waves,
    passes,
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
)
from kernelcat.reference.paged_attn import ENTRY, most_visible
from kernelcat.runtime.gpu import Gpu

MAX_SHARED_BYTES = 48 << 10
"""Static shared memory of a thread block."""
SM_BANDWIDTH = 95e9
"""Bytes per second that reach one SM while others have nothing to read."""
START_US = 1.0
"""Microseconds until a launch may read. This and the next two numbers are fitted to 36 times of 25
problems, most of them of an H200."""
LOOK_UP_US, PASS_US = 0.4, 1.25
"""Microseconds until the length and the block table are here, and of loads that nothing hides."""
WARP_MERGE_US, CLUSTER_MERGE_US, BLOCK_MERGE_US = 0.02, 0.4, 0.05
"""Microseconds of the merge: for each warp, for a cluster, for each thread block of a cluster."""

SPACE = {
    "tokens": (32, 16, 64),
    "num_warps": (4, 8, 16, 2),
    "blocks_per_sm": (1, 2, 3, 4),
    "cluster": (1, 2, 4, 8, 16),
}
"""A warp takes ``tokens`` at a time. The thread blocks of a cluster divide the tokens of a sequence
and key-value head."""


def _shared_bytes(problem: Problem, config: Config) -> int:
    """At most: accumulators and softmax of all warps, inbox, block table, sinks and a barrier."""
    rows, dim, cluster = 8 * row_tiles(problem), problem["head_dim"], config["cluster"]
    warps = config["num_warps"] * rows * (4 * (dim + 4) + 8)
    inbox = cluster * 4 * 32 * ceil(rows * dim / (16 * cluster)) if cluster > 1 else 32
    table = 4 * TABLE_LOADS * 32 * config["num_warps"] if problem["window"] else 0
    return int(warps + inbox + table + 4 * group(problem) + 64)


def _registers(problem: Problem, config: Config) -> int:
    """Registers of a thread: keys, values, accumulators, queries, scores and about 24 others."""
    dim, tokens = problem["head_dim"], config["tokens"]
    rows = row_tiles(problem) * (dim // 4 + dim // 8 + tokens // 4)
    return int(tokens * dim // 32 + rows + 24)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not_few_rows(config, problem, gpu):
        return reason
    if problem["kv_dtype"] != problem["dtype"]:
        return f"keys and values must be {problem['dtype']} as the queries"
    shared_bytes = _shared_bytes(problem, config)
    if shared_bytes > MAX_SHARED_BYTES:
        return f"{shared_bytes} bytes are more than the {MAX_SHARED_BYTES} of static shared memory"
    threads = 32 * config["num_warps"] * config["blocks_per_sm"]
    registers = min(MAX_REGISTERS, SM_REGISTERS // threads)
    needed = _registers(problem, config)
    if needed > registers:
        return f"{needed} registers of a thread would spill: there are {registers}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["blocks_per_sm"] * (_shared_bytes(problem, config) + 1024) > gpu.shared_bytes:
        return f"{config['blocks_per_sm']} thread blocks do not fit the shared memory of an SM"
    tiles = ceil(most_visible(problem) / config["tokens"])
    if config["num_warps"] * config["cluster"] >= 2 * tiles > 2:
        return f"half of the warps have none of the {tiles} tiles"
    blocks = problem["batch"] * problem["kv_heads"] * config["cluster"]
    # As many thread blocks of the next launch may wait beside those of this one.
    if config["blocks_per_sm"] > max(2 * ceil(blocks / gpu.sms), 1):
        return f"{blocks} thread blocks do not need room for {config['blocks_per_sm']} an SM"
    if config["cluster"] > 1 and blocks > gpu.sms * config["blocks_per_sm"]:
        return f"smaller clusters than {config['cluster']} fill the SMs"
    return None


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return why_slower(_estimate(problem, config, gpu), tma.IMPLEMENTATION, problem, gpu)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    arguments = (
        *(kind(problem), group(problem), row_tiles(problem), config["tokens"]),
        *(config["num_warps"], config["cluster"], config["blocks_per_sm"]),
    )
    source = CudaSource(
        "paged_attn/registers.cu",
        f"kernelcat::paged_attn_registers<{', '.join(map(str, arguments))}>",
    )
    step = Step(
        source,
        (config["cluster"], problem["kv_heads"], problem["batch"]),
        params(problem),
        32 * config["num_warps"],
        cluster=(config["cluster"], 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The waits of a thread block, in waves, and the bytes as fast as the busy SMs read them."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    blocks = problem["batch"] * problem["kv_heads"] * config["cluster"]
    waves = ceil(blocks / (gpu.sms * config["blocks_per_sm"]))
    busy_sms = min(blocks, gpu.sms)
    rate = min(BANDWIDTH_EFFICIENCY * gpu.bandwidth, busy_sms * SM_BANDWIDTH)
    pass_us = passes(problem, config) * (PASS_US + tile_us(problem, config, blocks, gpu))
    merge_us = WARP_MERGE_US * config["num_warps"]
    if config["cluster"] > 1:
        merge_us += CLUSTER_MERGE_US + BLOCK_MERGE_US * config["cluster"]
    stream_us = ENTRY.bytes_moved(problem) / rate * 1e6
    waits_us = waves * (LOOK_UP_US + merge_us) + longest_waves(problem, waves) * pass_us
    return START_US + waits_us + stream_us


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="registers",
    summary="decode of few tokens by mma.sync from registers; clusters merge",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    too_slow=_too_slow,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "16-byte loads": "LDG*128",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=5,
)
