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
from kernelcat.reference._routing import capacity_of, reroutes
from kernelcat.runtime.gpu import Gpu

SELECTED = ("expert_ids", "weights")
MAPS = ("counts", "offsets", "order", "position", "load")
INTEGERS = ("expert_ids", "counts", "offsets", "order", "position", "load", "proposals")
"""Tensors of int32; logits, x and the router have the problem's dtype, all others float32."""

NAIVE_THREADS = 512
LOGIT_THREADS = 128


def _pointers(*names: str) -> tuple[Param, ...]:
    return tuple(map(Pointer, names))


def _source(
    kernel: str,
    problem: Problem,
    dtype: str,
    params: tuple[Param, ...],
    constants: dict[str, int | str | bool],
) -> CuteSource:
    """``dtype`` is the element type of logits."""

    def kind(param: Param) -> str:
        if not isinstance(param, Pointer):
            return type(param).__name__.lower()
        given = {"logits": dtype, **dict.fromkeys(("x", "router", "router_bias"), problem["dtype"])}
        return "*" + ("int32" if param.tensor in INTEGERS else given.get(param.tensor, "float32"))

    compiled = {"dtype": dtype, **constants}
    return CuteSource(f"moe_route.{kernel}", tuple(map(kind, params)), tuple(compiled.items()))


def _sizes(problem: Problem) -> tuple[Param, ...]:
    """tokens, experts, top_k, group_size and top_groups."""
    sizes = [problem[axis] for axis in ("tokens", "experts", "top_k")]
    group_size = problem["experts"] // problem["groups"]
    return tuple(map(Int32, (*sizes, group_size, problem["top_groups"])))


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
        *_pointers("x", "router", "router_bias", "all_logits"),
        *map(Int32, (tokens, experts, hidden)),
    )
    constants = {"router_bias": problem["router_bias"]}
    source = _source("naive:Logits", problem, problem["dtype"], params, constants)
    grid = (tokens, ceil(experts / LOGIT_THREADS), 1)
    return Step(source, grid, params, block=LOGIT_THREADS)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, is_product = problem["tokens"], problem["product"]
    dtype = "float32" if is_product else problem["dtype"]
    given = _pointers("all_logits" if is_product else "logits", "correction", *SELECTED)
    rule = (*_sizes(problem), Float32(problem["scaling"]))
    select_params = (*given, *rule)
    select = _source("naive:Select", problem, dtype, select_params, _rule(problem))
    params = (*given, *_pointers(*MAPS, "proposals"), *rule, Int32(capacity_of(problem)))
    flags = {"load": problem["load"], "reroute": reroutes(problem), **_rule(problem)}
    place = _source("naive:Place", problem, dtype, params, flags)
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
)
