"""`moe_route` in CUDA C++: one thread for each token, or one warp, with bit masks of tokens.

`bitmask` and `sorted` take logits, `product` takes x and router.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    LeastEstimate,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.moe_route import blocks, lanes
from kernelcat.kernels.cuda.moe_route.operands import MAPS, SELECTED, pointers, sizes
from kernelcat.reference._routing import capacity_of, reroutes
from kernelcat.reference.moe_route import ENTRY
from kernelcat.runtime.gpu import Gpu


def _score(problem: Problem) -> str:
    """The template argument."""
    return f"Score::k{problem['score'].capitalize()}"


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_assignments = problem["tokens"] * problem["top_k"]
    if num_assignments >= 1 << 31:
        return f"{num_assignments} assignments are more than 32-bit indices reach"
    return None


# naive --------------------------------------------------------------------------------------------

NAIVE_BLOCK = 512
"""Threads of `place`: one for each of at most 512 experts."""


def _naive_logits(problem: Problem) -> Step:
    tokens, experts, hidden = (problem[axis] for axis in ("tokens", "experts", "hidden"))
    source = instance("moe_route/naive.cu", "moe_route_naive_logits", problem["dtype"])
    params = (
        *pointers("x", "router", "router_bias", "all_logits"),
        *map(Int32, (tokens, experts, hidden)),
    )
    return Step(source, (ceil(tokens * experts / 256), 1, 1), params, 256)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, is_product = problem["tokens"], problem["product"]
    num_assignments = tokens * problem["top_k"]
    arguments = ("float32" if is_product else problem["dtype"], _score(problem))
    given = pointers("all_logits" if is_product else "logits", "correction", *SELECTED)
    rule = (*sizes(problem), Int32(problem["renormalize"]), Float32(problem["scaling"]))
    select = instance("moe_route/naive.cu", "moe_route_naive_select", *arguments)
    place = instance("moe_route/naive.cu", "moe_route_naive_place", *arguments)
    capacity = Int32(capacity_of(problem))
    steps = (
        Step(select, (ceil(tokens / 128), 1, 1), (*given, *rule), 128),
        Step(
            place, (1, 1, 1),
            (*given, *pointers(*MAPS, "proposals"), *rule, capacity), NAIVE_BLOCK,
        ),
    )  # fmt: skip
    workspaces = {
        "proposals": 4 * num_assignments * reroutes(problem),
        "all_logits": 4 * tokens * problem["experts"] * is_product,
    }
    if not tokens:
        return Program(steps[1:], workspaces)
    return Program((_naive_logits(problem), *steps) if is_product else steps, workspaces)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Two passes of one thread block over all assignments."""
    return 4 * LAUNCH_US + 0.02 * problem["tokens"] * problem["top_k"]


# bitmask ------------------------------------------------------------------------------------------

MAX_STATIC_BYTES = 48 * 1024


def _scratch_bytes(problem: Problem, config: Config) -> int:
    """Shared memory for the scores of a token in each warp."""
    return 4 * problem["experts"] * config["warps"] * blocks.is_limited(problem)


def _static_bytes(problem: Problem, config: Config) -> int:
    """Static shared memory of the cluster's kernel: masks, experts, counts, sums, and rerouting."""
    max_experts, block_tokens = 32 * blocks.per_lane(problem), config["block_tokens"]
    slots = 2 * 16 * block_tokens
    masks = 4 * ceil(block_tokens / 32) * max_experts + slots
    counts = 2 * (1 + reroutes(problem)) * blocks.cluster_size(problem, config) * max_experts
    return (
        masks + counts + 12 * max_experts + (4 * max_experts + slots + 8) * reroutes(problem) + 16
    )


def _kernel(problem: Problem, config: Config, name: str) -> CudaSource:
    flags = (problem["renormalize"], blocks.is_limited(problem), reroutes(problem))
    arguments = (
        f"kernelcat::{problem['dtype']}, kernelcat::{_score(problem)}",
        *(str(flag).lower() for flag in flags),
        *map(str, (blocks.per_lane(problem), blocks.vector_size(problem, problem["dtype"]))),
        *(str(config[name]) for name in ("warps", "block_tokens")),
        str(blocks.cluster_size(problem, config)),
    )
    return CudaSource(
        "moe_route/bitmask.cu", f"kernelcat::{name}<kernelcat::Setup<{', '.join(arguments)}>>"
    )


def _bitmask(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["tokens"] <= blocks.CLUSTER_TOKENS:
        return _one_launch(problem, config)
    return _two_launches(problem, config)


def _one_launch(problem: Problem, config: Config) -> Program:
    cluster = blocks.cluster_size(problem, config)
    params = (
        *pointers("logits", "correction", *SELECTED, *MAPS),
        *sizes(problem),
        Float32(problem["scaling"]),
        Int32(capacity_of(problem)),
    )
    step = Step(
        _kernel(problem, config, "moe_route_cluster"), (cluster, 1, 1), params,
        32 * config["warps"], _scratch_bytes(problem, config), (cluster, 1, 1), programmatic=True,
    )  # fmt: skip
    return Program((step,))


def _two_launches(problem: Problem, config: Config) -> Program:
    num_blocks, max_experts = blocks.num_blocks(problem, config), 32 * blocks.per_lane(problem)
    select = Step(
        _kernel(problem, config, "moe_route_select"), (num_blocks, 1, 1),
        (
            *pointers("logits", "correction", *SELECTED, "position", "block_counts"),
            *sizes(problem), Float32(problem["scaling"]),
        ),
        32 * config["warps"], _scratch_bytes(problem, config), programmatic=True,
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


def _illegal_bitmask(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := blocks.illegal(config, problem):
        return why
    if _static_bytes(problem, config) > MAX_STATIC_BYTES:
        return f"{_static_bytes(problem, config)} bytes of static shared memory are more than 48 KB"
    return _illegal(config, problem, gpu)


BITMASK = Implementation(
    entry="moe_route",
    language="cuda",
    variant="bitmask",
    summary="one warp for each token, ranks from bit masks of tokens, counts within a cluster",
    archs=("sm_90+",),
    space=blocks.SPACE,
    illegal=_illegal_bitmask,
    unpromising=blocks.unpromising,
    program=_bitmask,
    default=LeastEstimate(alike=blocks.alike),
    estimate=blocks.estimate,
    techniques={"maximum of a warp": "*REDUX", "ranks by population counts": "POPC"},
    rank=1,
)


# sorted -------------------------------------------------------------------------------------------


def _sorted_static_bytes(problem: Problem, config: Config) -> int:
    """Static shared memory of the cluster's kernel: masks, slots, counts, sums, and rerouting."""
    max_experts, block_tokens = lanes.max_experts(problem), config["block_tokens"]
    slots = problem["top_k"] * block_tokens
    masks = 4 * ceil(block_tokens / 32) * max_experts
    counts = 2 * (1 + reroutes(problem)) * blocks.cluster_size(problem, config) * max_experts
    rerouting = (4 * max_experts + 2 * slots + 8) * reroutes(problem)
    return int(masks + 6 * slots + counts + 12 * max_experts + rerouting + 16)


def _sorted_kernel(problem: Problem, config: Config, name: str) -> CudaSource:
    experts = (
        problem["experts"], lanes.num_groups(problem), lanes.top_groups(problem),
        lanes.group_lanes(problem), lanes.per_lane(problem), lanes.vector_size(problem),
    )  # fmt: skip
    setup = (
        f"kernelcat::{problem['dtype']}, kernelcat::{_score(problem)}",
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
    step = Step(
        _sorted_kernel(problem, config, "moe_route_cluster"), (cluster, 1, 1), params,
        32 * config["warps"], lanes.sigmoid_bytes(problem, config), (cluster, 1, 1),
        programmatic=True,
    )  # fmt: skip
    return Program((step,))


def _sorted_two_launches(problem: Problem, config: Config) -> Program:
    num_blocks = blocks.num_blocks(problem, config)
    select = Step(
        _sorted_kernel(problem, config, "moe_route_select"), (num_blocks, 1, 1),
        (
            *pointers("logits", "correction", *SELECTED, "position", "block_counts"),
            Int32(problem["tokens"]), Float32(problem["scaling"]),
        ),
        32 * config["warps"], lanes.sigmoid_bytes(problem, config), programmatic=True,
    )  # fmt: skip
    _, place = _two_launches(problem, config).steps
    return Program((select, place), {"block_counts": num_blocks * lanes.max_experts(problem)})


def _illegal_sorted(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := blocks.illegal(config, problem):
        return why
    if (size := _sorted_static_bytes(problem, config)) > MAX_STATIC_BYTES:
        return f"{size} bytes of static shared memory are more than 48 KB"
    return _illegal(config, problem, gpu)


SORTED = Implementation(
    entry="moe_route",
    language="cuda",
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


# product ------------------------------------------------------------------------------------------

PRODUCT_SPACE = {"splits": (1, 2, 4, 8, 16, 32), "warps": (4, 8, 16)}
"""Splits of hidden, and warps of a thread block."""
TILE_TOKENS = 16
STEP = 32
"""Elements of hidden that a warp multiplies at once."""


def _num_tiles(problem: Problem) -> int:
    return max(1, ceil(problem["tokens"] / TILE_TOKENS))


def _product(problem: Problem, config: Config, gpu: Gpu) -> Program:
    splits, warps, max_experts = config["splits"], config["warps"], 32 * blocks.per_lane(problem)
    setup = (
        f"kernelcat::{_score(problem)}",
        *(str(flag).lower() for flag in (problem["renormalize"], blocks.is_limited(problem))),
        *map(str, (blocks.per_lane(problem), blocks.vector_size(problem, "float32"), warps)),
    )
    source = CudaSource(
        "moe_route/product.cu",
        f"kernelcat::moe_route_product<kernelcat::{problem['dtype']}, "
        f"kernelcat::ProductSetup<{', '.join(setup)}>>",
    )
    num_blocks = _num_tiles(problem) * splits
    workspaces = {
        "all_logits": 4 * problem["tokens"] * problem["experts"],
        "partials": 4 * num_blocks * TILE_TOKENS * max_experts,
        "counters": 4 * (_num_tiles(problem) + 1),
    }
    params = (
        *pointers("x", "router", "router_bias", "correction", *SELECTED, *MAPS, *workspaces),
        *sizes(problem),
        Float32(problem["scaling"]),
        *map(Int32, (capacity_of(problem), problem["hidden"], splits)),
    )
    step = Step(
        source, (num_blocks, 1, 1), params, 32 * warps, _scratch_bytes(problem, config),
        programmatic=True,
    )  # fmt: skip
    return Program((step,), workspaces)


def _illegal_product(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if not problem["product"]:
        return "x and router must be given: bitmask and naive take logits"
    if problem["dtype"] == "float32":
        return "dtype=float32 is multiplied by naive only: tensor cores would round it"
    if problem["tokens"] > blocks.CLUSTER_TOKENS:
        return f"tokens={problem['tokens']} are more than the {blocks.CLUSTER_TOKENS} of one launch"
    if problem["hidden"] % 8:
        return f"hidden={problem['hidden']} must be a multiple of 8, for loads of 16 bytes"
    if reroutes(problem):
        return "overflow must be 'drop' where there is a capacity limit: naive reroutes products"
    return None


def _unpromising_product(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    splits, warps = config["splits"], config["warps"]
    if splits > 1 and problem["hidden"] < 2 * STEP * splits:
        return f"hidden={problem['hidden']} has less than two steps in each of {splits} splits"
    if splits > 1 and _num_tiles(problem) * splits > 2 * gpu.sms:
        return f"{_num_tiles(problem)} tiles in {splits} splits are more than the SMs take at once"
    if warps > 4 and 8 * warps > problem["experts"]:
        return f"{warps} warps are too many for {problem['experts']} experts, 8 for each"
    return None


def _product_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, the steps of a warp, the sum of splits, the selection of a tile, and the maps."""
    splits, warps, per_lane = config["splits"], config["warps"], blocks.per_lane(problem)
    num_blocks = _num_tiles(problem) * splits
    waves = ceil(num_blocks / (gpu.sms * 2048 // (32 * warps)))
    steps = ceil(problem["hidden"] / splits / STEP)
    step_us = waves * steps * (0.12 + 0.01 * per_lane * 4 / warps)
    token_us = 0.3 + problem["top_k"] * (0.04 + 0.003 * per_lane)
    sum_us = 0.5 + 0.05 * splits * per_lane / warps
    maps_us = 2.0 + problem["tokens"] * problem["top_k"] / (32 * warps) * 0.05
    return (
        copy_us(ENTRY.bytes_moved(problem), gpu) + step_us + sum_us
        + ceil(TILE_TOKENS / warps) * token_us + maps_us
    )  # fmt: skip


IMPLEMENTATIONS = (
    Implementation(
        entry="moe_route",
        language="cuda",
        variant="naive",
        summary="one thread for each logit, for each token and for each expert; any problem",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive,
        estimate=_naive_estimate,
        rank=0,
    ),
    BITMASK,
    SORTED,
    Implementation(
        entry="moe_route",
        language="cuda",
        variant="product",
        summary="the router's product in splits; last thread blocks select and make the maps",
        archs=("sm_90+",),
        space=PRODUCT_SPACE,
        illegal=_illegal_product,
        unpromising=_unpromising_product,
        program=_product,
        estimate=_product_us,
        techniques={"tensor cores": "HMMA", "ranks by population counts": "POPC"},
        rank=2,
    ),
)
