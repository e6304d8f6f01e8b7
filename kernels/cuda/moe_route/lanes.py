"""Which experts the lanes of a warp have in the variants `sorted`, in CUDA and in CuTe; cost model.

A lane has consecutive experts of one group. Thread blocks are those of ``blocks``.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.moe_route import blocks
from kernelcat.reference.moe_route import ENTRY
from kernelcat.runtime.gpu import Gpu


def max_experts(problem: Problem) -> int:
    """Experts that counts have room for: a power of two, at least 32."""
    return 32 << (ceil(problem["experts"] / 32) - 1).bit_length()


def num_groups(problem: Problem) -> int:
    """Groups that selection tells apart: one where a token may use all."""
    return int(problem["groups"]) if blocks.is_limited(problem) else 1


def top_groups(problem: Problem) -> int:
    """Groups that a token uses, of ``num_groups``."""
    return min(num_groups(problem), int(problem["top_groups"]))


def group_lanes(problem: Problem) -> int:
    """Lanes of a warp that share a group's experts: a power of two."""
    return 1 << (32 // num_groups(problem)).bit_length() - 1


def per_lane(problem: Problem) -> int:
    """Experts that a lane holds, all of one group: a power of two."""
    group_size = problem["experts"] // num_groups(problem)
    return 1 << (ceil(group_size / group_lanes(problem)) - 1).bit_length()


def vector_size(problem: Problem) -> int:
    """Logits of one load: at most 16 bytes, and a divisor of a group."""
    vector = min(16 // itemsize(problem["dtype"]), per_lane(problem))
    while problem["experts"] // num_groups(problem) % vector:
        vector //= 2
    return vector


def sigmoid_bytes(problem: Problem, config: Config) -> int:
    """Shared memory for the sigmoids of a token in each warp."""
    return 4 * int(problem["experts"]) * int(config["warps"]) * (problem["score"] == "sigmoid")


def estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Launches, the latency of a warp's tokens or the issue of their instructions, and the maps.

    Cycles are counted in machine code: of the chain of dependent instructions, and of the issue.
    """
    tokens, block_tokens, warps = problem["tokens"], config["block_tokens"], config["warps"]
    ctas, top_k = blocks.num_blocks(problem, config), problem["top_k"]
    lane_experts, is_limited = per_lane(problem), blocks.is_limited(problem)
    token_us = (300 + 60 * top_k + 47 * lane_experts + 270 * is_limited) / 1700
    issue_us = (60 + 35 * lane_experts + top_k * (20 + 4 * lane_experts)) / 4 / 1700
    waves = ceil(ctas * warps / (32 * gpu.sms))
    resident = min(ctas / gpu.sms, 32 / warps) if ctas > gpu.sms else 1
    block_us = max(ceil(block_tokens / warps) * token_us, block_tokens * resident * issue_us)
    if tokens <= blocks.CLUSTER_TOKENS:
        cluster = blocks.cluster_size(problem, config)
        return LAUNCH_US + block_us + 0.8 + 0.15 * cluster.bit_length()
    maps_us = 1.5 + ctas**2 * max_experts(problem) / 5e6
    return 2 * LAUNCH_US + copy_us(ENTRY.bytes_moved(problem), gpu) + waves * block_us + maps_us
