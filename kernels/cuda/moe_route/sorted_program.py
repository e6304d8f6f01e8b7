"""`moe_route` in CUDA C++, the variant `sorted`: each lane sorts its experts once."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.moe_route import blocks, lanes
from kernelcat.kernels.cuda.moe_route.operands import (
    MAPS,
    SELECTED,
    exceeds_indices,
    pointers,
)
from kernelcat.reference._routing import capacity_of, reroutes
from kernelcat.runtime.gpu import Gpu

MAX_STATIC_BYTES = 48 * 1024


def _static_bytes(problem: Problem, config: Config) -> int:
    """Static shared memory of the cluster's kernel: masks, slots, counts, sums, and rerouting."""
    max_experts, block_tokens = lanes.max_experts(problem), config["block_tokens"]
    slots = problem["top_k"] * block_tokens
    masks = 4 * ceil(block_tokens / 32) * max_experts
    counts = 2 * (1 + reroutes(problem)) * blocks.cluster_size(problem, config) * max_experts
    rerouting = (4 * max_experts + 2 * slots + 8) * reroutes(problem)
    return int(masks + 6 * slots + counts + 12 * max_experts + rerouting + 16)


def _kernel(problem: Problem, config: Config, name: str) -> CudaSource:
    experts = (
        problem["experts"], lanes.num_groups(problem), lanes.top_groups(problem),
        lanes.group_lanes(problem), lanes.per_lane(problem), lanes.vector_size(problem),
    )  # fmt: skip
    setup = (
        f"kernelcat::{problem['dtype']}, kernelcat::Score::k{problem['score'].capitalize()}",
        *(str(flag).lower() for flag in (problem["renormalize"], reroutes(problem))),
        f"kernelcat::sorted::LaneExperts<{', '.join(map(str, experts))}>",
        *map(str, (problem["top_k"], lanes.max_experts(problem))),
        *(str(config[name]) for name in ("warps", "block_tokens")),
        str(blocks.cluster_size(problem, config)),
    )
    return CudaSource(
        "moe_route/sorted.cu",
        f"kernelcat::sorted::{name}<kernelcat::sorted::Setup<{', '.join(setup)}>>",
    )


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["tokens"] <= blocks.CLUSTER_TOKENS:
        return _one_launch(problem, config)
    return _two_launches(problem, config)


def _one_launch(problem: Problem, config: Config) -> Program:
    cluster = blocks.cluster_size(problem, config)
    params = (
        *pointers("logits", "correction", *SELECTED, *MAPS),
        Int32(problem["tokens"]),
        Float32(problem["scaling"]),
        Int32(capacity_of(problem)),
    )
    step = Step(
        _kernel(problem, config, "moe_route_cluster"), (cluster, 1, 1), params,
        32 * config["warps"], lanes.sigmoid_bytes(problem, config), (cluster, 1, 1),
        programmatic=True,
    )  # fmt: skip
    return Program((step,))


def _two_launches(problem: Problem, config: Config) -> Program:
    num_blocks, max_experts = blocks.num_blocks(problem, config), lanes.max_experts(problem)
    select = Step(
        _kernel(problem, config, "moe_route_select"), (num_blocks, 1, 1),
        (
            *pointers("logits", "correction", *SELECTED, "position", "block_counts"),
            Int32(problem["tokens"]), Float32(problem["scaling"]),
        ),
        32 * config["warps"], lanes.sigmoid_bytes(problem, config), programmatic=True,
    )  # fmt: skip
    counts = (*(problem[axis] for axis in ("tokens", "experts", "top_k")), config["block_tokens"])
    place = Step(
        instance("moe_route/bitmask.cu", "moe_route_place", max_experts, blocks.PLACE_THREADS),
        (num_blocks, 1, 1),
        (
            *pointers("block_counts", *SELECTED, *MAPS),
            *map(Int32, (*counts, capacity_of(problem))),
        ),
        blocks.PLACE_THREADS, programmatic=True,
    )  # fmt: skip
    return Program((select, place), {"block_counts": num_blocks * max_experts})


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := blocks.illegal(config, problem):
        return why
    if _static_bytes(problem, config) > MAX_STATIC_BYTES:
        return f"{_static_bytes(problem, config)} bytes of static shared memory are more than 48 KB"
    return exceeds_indices(config, problem, gpu)


SORTED = Implementation(
    entry="moe_route",
    language="cuda",
    variant="sorted",
    summary="as bitmask, but each lane sorts its experts once, and sizes are compiled in",
    archs=("sm_90+",),
    space=blocks.SPACE,
    illegal=_illegal,
    unpromising=blocks.unpromising,
    program=_program,
    estimate=lanes.estimate,
    techniques={"maximum of a warp": "*REDUX", "ranks by population counts": "POPC"},
    rank=1,
    unverified="not run on a GPU yet",
)
