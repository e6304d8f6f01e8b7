"""`moe_route` in CuTe DSL: one thread for each expert, or one warp for each token.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.moe_route import blocks, lanes
from kernelcat.kernels.cuda.moe_route.operands import MAPS, SELECTED, pointers, sizes
from kernelcat.kernels.cute.common.matmul import exceeds_shared
from kernelcat.reference._routing import capacity_of, reroutes
from kernelcat.runtime.gpu import Gpu

GIVEN = ("logits", "x", "router", "router_bias")
"""Tensors of the problem's dtype."""
WORDS = {**dict.fromkeys(("expert_ids", *MAPS, "proposals"), "int32"), "block_counts": "uint32"}
"""Tensors of integers; all others are float32."""

NAIVE_THREADS = 512
LOGIT_THREADS = 128


def _source(
    kernel: str,
    problem: Problem,
    params: tuple[Param, ...],
    constants: dict[str, int | str | bool],
) -> CuteSource:
    """The kernel ``module:Class`` with parameters ``params``."""

    def kind(param: Param) -> str:
        if not isinstance(param, Pointer):
            return type(param).__name__.lower()
        if param.tensor in GIVEN:
            return "*" + str(problem["dtype"])
        return "*" + WORDS.get(param.tensor, "float32")

    return CuteSource(f"moe_route.{kernel}", tuple(map(kind, params)), tuple(constants.items()))


def _rule(problem: Problem) -> dict[str, int | str | bool]:
    """How experts are selected and weighted, as constants."""
    axes = {axis: problem[axis] for axis in ("score", "correction", "renormalize")}
    return {**axes, "limited": problem["top_groups"] < problem["groups"]}


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_assignments = problem["tokens"] * problem["top_k"]
    if num_assignments >= 1 << 31:
        return f"{num_assignments} assignments are more than 32-bit indices reach"
    return None


# naive --------------------------------------------------------------------------------------------


def _naive_logits(problem: Problem) -> Step:
    tokens, experts, hidden = (problem[axis] for axis in ("tokens", "experts", "hidden"))
    params = (
        *pointers("x", "router", "router_bias", "all_logits"),
        *map(Int32, (tokens, experts, hidden)),
    )
    constants = {"router_bias": problem["router_bias"]}
    source = _source("naive:Logits", problem, params, constants)
    grid = (tokens, ceil(experts / LOGIT_THREADS), 1)
    return Step(source, grid, params, block=LOGIT_THREADS)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, is_product = problem["tokens"], problem["product"]
    given = pointers("all_logits" if is_product else "logits", "correction", *SELECTED)
    rule = (*sizes(problem), Float32(problem["scaling"]))
    select_params = (*given, *rule)
    select = _source("naive:Select", problem, select_params, _rule(problem))
    params = (*given, *pointers(*MAPS, "proposals"), *rule, Int32(capacity_of(problem)))
    flags = {"load": problem["load"], "reroute": reroutes(problem), **_rule(problem)}
    place = _source("naive_place:Place", problem, params, flags)
    steps = (
        Step(select, (tokens, 1, 1), select_params, block=NAIVE_THREADS),
        Step(place, (1, 1, 1), params, block=NAIVE_THREADS),
    )
    workspaces = {
        "proposals": 4 * tokens * problem["top_k"] * reroutes(problem),
        "all_logits": 4 * tokens * problem["experts"] * is_product,
    }
    if not tokens:
        return Program(steps[1:], workspaces)
    return Program((_naive_logits(problem), *steps) if is_product else steps, workspaces)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Two passes of one thread block over all assignments."""
    return 4 * LAUNCH_US + 0.02 * problem["tokens"] * problem["top_k"]


# bitmask ------------------------------------------------------------------------------------------

MAX_TOP_K = 16


def _selection(problem: Problem, config: Config) -> dict[str, int | str | bool]:
    """Constants of a thread block that selects experts."""
    return {
        **_rule(problem),
        "per_lane": blocks.per_lane(problem),
        "vector": blocks.vector_size(problem, problem["dtype"]),
        **config,
    }


def _selection_sizes(problem: Problem) -> tuple[Param, ...]:
    """As `sizes`, and the lanes that find the best scores of a group."""
    return (*sizes(problem), Int32(1 << (32 // problem["groups"]).bit_length() - 1))


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of the cluster's kernel: masks, experts, scores, sums, counts, rerouting."""
    max_experts, block_tokens = 32 * blocks.per_lane(problem), config["block_tokens"]
    slots = MAX_TOP_K * block_tokens
    masks = 4 * ceil(block_tokens / 32) * max_experts
    scores = 4 * max_experts * config["warps"] * blocks.is_limited(problem)
    counts = 2 * max_experts * blocks.cluster_size(problem, config) * (1 + reroutes(problem))
    rerouting = (4 * max_experts + 2 * slots) * reroutes(problem)
    return int(masks + 6 * slots + scores + 12 * max_experts + counts + rerouting + 1024)


def _bitmask(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["tokens"] <= blocks.CLUSTER_TOKENS:
        return _one_launch(problem, config)
    return _two_launches(problem, config)


def _one_launch(problem: Problem, config: Config) -> Program:
    cluster = blocks.cluster_size(problem, config)
    params = (
        *pointers("logits", "correction", *SELECTED, *MAPS),
        *_selection_sizes(problem),
        Float32(problem["scaling"]),
        Int32(capacity_of(problem)),
    )
    constants = {
        "load": problem["load"], "reroute": reroutes(problem), "cluster_size": cluster,
        **_selection(problem, config),
    }  # fmt: skip
    source = _source("bitmask:Cluster", problem, params, constants)
    shape = (cluster, 1, 1)
    step = Step(
        source, shape, params, block=32 * config["warps"], cluster=shape, programmatic=True
    )  # fmt: skip
    return Program((step,))


def _two_launches(problem: Problem, config: Config) -> Program:
    num_blocks, max_experts = blocks.num_blocks(problem, config), 32 * blocks.per_lane(problem)
    grid = (num_blocks, 1, 1)
    select_params = (
        *pointers("logits", "correction", *SELECTED, "position", "block_counts"),
        *_selection_sizes(problem),
        Float32(problem["scaling"]),
    )
    select = _source("bitmask:Select", problem, select_params, _selection(problem, config))
    place_params = (
        *pointers("block_counts", *SELECTED, *MAPS),
        *(Int32(problem[axis]) for axis in ("tokens", "experts", "top_k")),
        Int32(capacity_of(problem)),
    )
    constants = {
        "load": problem["load"], "max_experts": max_experts,
        "block_tokens": config["block_tokens"],
    }  # fmt: skip
    place = _source("place:Place", problem, place_params, constants)
    steps = (
        Step(select, grid, select_params, block=32 * config["warps"], programmatic=True),
        Step(place, grid, place_params, block=blocks.PLACE_THREADS, programmatic=True),
    )
    return Program(steps, {"block_counts": num_blocks * max_experts})


def _illegal_bitmask(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return (
        blocks.illegal(config, problem)
        or exceeds_shared(_shared_bytes(problem, config), gpu)
        or _illegal(config, problem, gpu)
    )


BITMASK = Implementation(
    entry="moe_route",
    language="cute",
    variant="bitmask",
    summary="one warp for each token, ranks from bit masks of tokens, counts within a cluster",
    archs=("sm_90+",),
    space=blocks.SPACE,
    illegal=_illegal_bitmask,
    unpromising=blocks.unpromising,
    program=_bitmask,
    estimate=blocks.estimate,
    techniques={"maximum of a warp": "*REDUX", "ranks by population counts": "POPC"},
    rank=1,
)

# sorted -------------------------------------------------------------------------------------------


def _sorted_selection(problem: Problem, config: Config) -> dict[str, int | str | bool]:
    """Constants of a thread block that selects experts from sorted lists."""
    axes = ("score", "correction", "renormalize", "experts", "top_k")
    return {
        **{axis: problem[axis] for axis in axes},
        "groups": lanes.num_groups(problem),
        "top_groups": lanes.top_groups(problem),
        "group_lanes": lanes.group_lanes(problem),
        "per_lane": lanes.per_lane(problem),
        "vector": lanes.vector_size(problem),
        "max_experts": lanes.max_experts(problem),
        **config,
    }


def _sorted_shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of the cluster's kernel: masks, slots, sigmoids, sums, counts, rerouting."""
    max_experts, block_tokens = lanes.max_experts(problem), config["block_tokens"]
    masks = 4 * ceil(block_tokens / 32) * max_experts
    slots = 6 * problem["top_k"] * block_tokens
    sigmoids = lanes.sigmoid_bytes(problem, config)
    counts = 2 * max_experts * blocks.cluster_size(problem, config) * (1 + reroutes(problem))
    rerouting = (4 * max_experts + 2 * MAX_TOP_K * block_tokens) * reroutes(problem)
    return int(masks + slots + sigmoids + 12 * max_experts + counts + rerouting + 1024)


def _sorted(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["tokens"] <= blocks.CLUSTER_TOKENS:
        return _sorted_one_launch(problem, config)
    return _sorted_two_launches(problem, config)


def _sorted_one_launch(problem: Problem, config: Config) -> Program:
    cluster = blocks.cluster_size(problem, config)
    params = (
        *pointers("logits", "correction", *SELECTED, *MAPS),
        Int32(problem["tokens"]),
        Float32(problem["scaling"]),
        Int32(capacity_of(problem)),
    )
    constants = {
        "load": problem["load"], "reroute": reroutes(problem), "cluster_size": cluster,
        **_sorted_selection(problem, config),
    }  # fmt: skip
    source = _source("sorted:Cluster", problem, params, constants)
    shape = (cluster, 1, 1)
    step = Step(
        source, shape, params, block=32 * config["warps"], cluster=shape, programmatic=True
    )  # fmt: skip
    return Program((step,))


def _sorted_two_launches(problem: Problem, config: Config) -> Program:
    params = (
        *pointers("logits", "correction", *SELECTED, "position", "block_counts"),
        Int32(problem["tokens"]),
        Float32(problem["scaling"]),
    )
    source = _source("sorted:Select", problem, params, _sorted_selection(problem, config))
    grid, block = (blocks.num_blocks(problem, config), 1, 1), 32 * config["warps"]
    select = Step(source, grid, params, block=block, programmatic=True)
    _, place = _two_launches(problem, config).steps
    workspace = {"block_counts": grid[0] * lanes.max_experts(problem)}
    return Program((select, place), workspace)


def _illegal_sorted(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return (
        blocks.illegal(config, problem)
        or exceeds_shared(_sorted_shared_bytes(problem, config), gpu)
        or _illegal(config, problem, gpu)
    )


SORTED = Implementation(
    entry="moe_route",
    language="cute",
    variant="sorted",
    summary="as bitmask, but each lane sorts its experts once, and sizes are compiled in",
    archs=("sm_90+",),
    space=blocks.SPACE,
    illegal=_illegal_sorted,
    unpromising=blocks.unpromising,
    program=_sorted,
    estimate=lanes.estimate,
    techniques={"maximum of a warp": "*REDUX", "ranks by population counts": "POPC"},
    rank=1,
)

IMPLEMENTATIONS = (
    Implementation(
        entry="moe_route",
        language="cute",
        variant="naive",
        summary="one thread for each logit, and one thread for each expert; any problem",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive,
        estimate=_naive_estimate,
        rank=0,
    ),
    BITMASK,
    SORTED,
)
