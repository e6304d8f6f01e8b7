"""Thread blocks of the variants with bit masks, in CUDA and in CuTe: sizes, limits, cost model.

Up to ``CLUSTER_TOKENS`` tokens there is one launch of one cluster, for more tokens two launches.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, ConfigValue
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.reference._routing import reroutes
from kernelcat.reference.moe_route import ENTRY
from kernelcat.runtime.gpu import Gpu

SPACE: dict[str, tuple[ConfigValue, ...]] = {
    "block_tokens": (4, 8, 16, 32, 64, 128),
    "warps": (4, 8, 16, 32),
}
"""Tokens and warps of a thread block."""
CLUSTER_TOKENS = 512
"""Most tokens of one launch."""
MAX_CLUSTER = 16
"""Most thread blocks of a cluster."""
PLACE_THREADS = 512
"""Threads of a thread block of the second launch."""


def per_lane(problem: Problem) -> int:
    """Experts that a lane holds: a power of two."""
    return 1 << (ceil(problem["experts"] / 32) - 1).bit_length()


def vector_size(problem: Problem, dtype: str) -> int:
    """Logits of one load: at most 16 bytes, and a divisor of a row."""
    vector = min(16 // itemsize(dtype), per_lane(problem))
    while problem["experts"] % vector:
        vector //= 2
    return vector


def num_blocks(problem: Problem, config: Config) -> int:
    """Thread blocks that have tokens; one where there are none."""
    return max(1, ceil(problem["tokens"] / config["block_tokens"]))


def cluster_size(problem: Problem, config: Config) -> int:
    """Thread blocks of the only cluster: a power of two; 1 where there are two launches."""
    if problem["tokens"] > CLUSTER_TOKENS:
        return 1
    return 1 << (num_blocks(problem, config) - 1).bit_length()


def is_limited(problem: Problem) -> bool:
    """Whether tokens may use some groups of experts only."""
    return bool(problem["top_groups"] < problem["groups"])


def illegal(config: Config, problem: Problem) -> str | None:
    """Why no cluster and no two launches serve the problem."""
    if problem["product"]:
        return "logits must be given: naive computes the router's product"
    if reroutes(problem) and problem["tokens"] > CLUSTER_TOKENS:
        return f"tokens={problem['tokens']} are rerouted by naive only: more than one cluster"
    if cluster_size(problem, config) > MAX_CLUSTER:
        size = cluster_size(problem, config)
        return f"{size} thread blocks are no cluster: at most {MAX_CLUSTER}"
    return None


def unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why thread blocks have too few tokens, or there are too many thread blocks."""
    block_tokens, warps, tokens = config["block_tokens"], config["warps"], problem["tokens"]
    if warps > block_tokens and warps > 4:
        return f"{warps} warps are more than the {block_tokens} tokens of a thread block"
    if block_tokens > 4 and block_tokens >= 2 * tokens:
        return f"thread blocks of {block_tokens} tokens are at least half empty for {tokens}"
    if tokens > CLUSTER_TOKENS and block_tokens < 32:
        return f"block_tokens={block_tokens} makes many thread blocks, each with all their counts"
    return None


def alike(problem: Problem) -> Problem:
    """The largest problem of one launch whose thread blocks are as many, for each configuration.

    Only the number of thread blocks depends on the tokens, and the least thread block has 4.
    """
    tokens = problem["tokens"]
    if tokens > CLUSTER_TOKENS or tokens % 4 == 0:
        return problem
    return Problem.with_values(problem.entry, problem.values | {"tokens": -(-tokens // 4) * 4})


def estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Launches, the latency of a warp's tokens or the issue of their instructions, and the maps."""
    tokens, block_tokens, warps = problem["tokens"], config["block_tokens"], config["warps"]
    ctas, top_k = num_blocks(problem, config), problem["top_k"]
    lane_experts = per_lane(problem)
    token_us = (0.3 + top_k * (0.04 + 0.003 * lane_experts)) * (1.5 if is_limited(problem) else 1.0)
    issue_us = (60 + 10 * lane_experts + top_k * (10 + 5 * lane_experts)) / 4 / 1700
    waves = ceil(ctas * warps / (32 * gpu.sms))
    resident = min(ctas / gpu.sms, 32 / warps) if ctas > gpu.sms else 1
    block_us = max(ceil(block_tokens / warps) * token_us, block_tokens * resident * issue_us)
    if tokens <= CLUSTER_TOKENS:
        return LAUNCH_US + block_us + 0.8 + 0.15 * cluster_size(problem, config).bit_length()
    maps_us = 1.5 + ctas**2 * 32 * lane_experts / 5e6
    return 2 * LAUNCH_US + copy_us(ENTRY.bytes_moved(problem), gpu) + waves * block_us + maps_us
