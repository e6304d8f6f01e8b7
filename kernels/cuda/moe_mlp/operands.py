"""What the variants of `moe_mlp` share: template arguments, routing, what no kernel can do."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.implementation import Float32, Int32, Param, Pointer, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.reference._moe_parts import num_assignments

GATINGS = {"swiglu": "Swiglu", "swiglu_oai": "SwigluOai"}

MAX_EXPERTS = 512
MAX_TOP_K = 32
"""Experts of a token: each belongs to a lane of a warp."""
ROUTE_WARPS = 4


def gating(problem: Problem) -> str:
    """The template argument ``kGating``."""
    return f"Gating::k{GATINGS[problem['activation']]}"


def weights(number: int) -> tuple[Param, ...]:
    """Pointers to weights, scales, global scales and bias of a product."""
    return tuple(
        Pointer(f"{name}{number}{suffix}")
        for name, suffix in (("w", ""), ("w", "_scale"), ("w", "_global_scale"), ("bias", ""))
    )


# ---- routing ------------------------------------------------------------------------------------


def _is_grouped(problem: Problem) -> bool:
    """Whether tokens may use some groups of experts only."""
    return bool(problem["top_groups"] < problem["groups"])


def router_kind(problem: Problem) -> tuple[str | bool | int, ...]:
    """The template arguments of ``RouterKind``."""
    per_lane = 1 << (ceil(problem["experts"] / 32) - 1).bit_length()
    vector = min(16 // itemsize(problem["logit_dtype"]), per_lane)
    while problem["experts"] % vector:
        vector //= 2
    score = f"Score::k{problem['score'].capitalize()}"
    kind = (problem["logit_dtype"], score, problem["renormalize"], _is_grouped(problem))
    return (*kind, per_lane, vector)


def router_sizes(problem: Problem) -> tuple[Param, ...]:
    """experts, top_k, group_size, top_groups and scaling."""
    experts = problem["experts"]
    sizes = (experts, problem["top_k"], experts // problem["groups"], problem["top_groups"])
    return (*map(Int32, sizes), Float32(problem["scaling"]))


def router_scratch_bytes(problem: Problem, warps: int) -> int:
    """Shared memory for the scores of a token in each warp."""
    return 4 * problem["experts"] * warps * _is_grouped(problem)


def route_step(problem: Problem, *, programmatic: bool) -> Step:
    """The launch that writes ids and gates of all tokens."""
    return Step(
        instance("moe_mlp/route.cu", "moe_mlp_route", programmatic, *router_kind(problem)),
        (ceil(problem["tokens"] / ROUTE_WARPS), 1, 1),
        (
            *map(Pointer, ("logits", "correction", "ids", "gates")),
            Int32(problem["tokens"]),
            *router_sizes(problem),
        ),
        ROUTE_WARPS * 32,
        router_scratch_bytes(problem, ROUTE_WARPS),
        programmatic=programmatic,
    )


def routing_workspaces(problem: Problem) -> dict[str, int]:
    """Bytes of ids and gates."""
    return {"ids": 4 * num_assignments(problem), "gates": 4 * num_assignments(problem)}


def why_not_routed(problem: Problem) -> str | None:
    """Why the kernels cannot route, or None."""
    if problem["experts"] > MAX_EXPERTS:
        return f"{problem['experts']} experts are more than the {MAX_EXPERTS} of a warp's registers"
    if problem["top_k"] > MAX_TOP_K:
        return f"top_k={problem['top_k']} exceeds the {MAX_TOP_K} lanes of a warp"
    if num_assignments(problem) >= 1 << 31:
        return f"{num_assignments(problem)} assignments are more than 32-bit indices reach"
    return None
