"""`moe_mlp` for many tokens: the programs of `moe_route` and `moe_gemm`, one after the other.

Float8 activations are quantized before each product by `fp8_quantize`. The second product sums rows
in the order of slots, so that results are reproducible bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda import fp8_quantize, moe_route
from kernelcat.kernels.cuda.moe_gemm import decoded, wgmma
from kernelcat.kernels.cuda.moe_mlp.operands import is_empty, num_assignments
from kernelcat.reference import moe_gemm
from kernelcat.reference._experts import FP8
from kernelcat.reference._fp8 import BLOCK
from kernelcat.reference.moe_route import routed
from kernelcat.runtime.gpu import Gpu

TILES = tuple(dict.fromkeys(wgmma.SPACE["tile"] + decoded.SPACE["tile"]))
SPACE = {"first_tile": TILES, "second_tile": TILES}
"""Tiles of both products: rows of an expert x rows of the expert's weights."""

ROUTER_AXES = (
    "score", "renormalize", "groups", "top_groups", "correction", "scaling", "skew",
)  # fmt: skip
PRODUCT_AXES = ("dtype", "format", "act_dtype", "packing", "bias", "skew")


# ---- the parts: problems of other entries -------------------------------------------------------


def _router(problem: Problem) -> Problem:
    axes = {axis: problem[axis] for axis in ROUTER_AXES}
    sizes = (problem[axis] for axis in ("tokens", "experts", "top_k"))
    return routed(*sizes, dtype=problem["logit_dtype"], **axes)


def _products(problem: Problem) -> tuple[Problem, Problem]:
    tokens, top_k, experts, hidden, inter = (
        problem[axis] for axis in ("tokens", "top_k", "experts", "hidden", "inter")
    )
    axes = {axis: problem[axis] for axis in PRODUCT_AXES}
    first = moe_gemm.product(
        tokens, top_k, experts, 2 * inter, hidden, gather=True, activation=problem["activation"],
        **axes,
    )  # fmt: skip
    second = moe_gemm.product(
        tokens, top_k, experts, hidden, inter, combine=True, residual=problem["residual"], **axes
    )
    return first, second


def _multiplier(problem: Problem) -> Implementation:
    """What computes both products."""
    format, act_dtype = problem["format"], problem["act_dtype"]
    has_equal_types = act_dtype == (FP8 if format == "fp8" else format)
    return wgmma.IMPLEMENTATION if has_equal_types else decoded.IMPLEMENTATION


def _configs(problem: Problem, config: Config) -> tuple[Config, Config]:
    """Configurations of both products."""
    more = {"combine": "ordered"} if _multiplier(problem) is wgmma.IMPLEMENTATION else {}
    first, second = config["first_tile"], config["second_tile"]
    return Config(more, tile=first), Config(more, tile=second)


def _quantizations(problem: Problem) -> tuple[tuple[Problem, str], ...]:
    """Those of x and of h, each with its tensor's name; none for activations in 16 bits."""
    if problem["act_dtype"] != FP8:
        return ()
    sizes = {
        "x": (problem["tokens"], problem["hidden"]),
        "h": (num_assignments(problem), problem["inter"]),
    }
    return tuple(
        (Problem.of("fp8_quantize", M=m, K=k, block="1x128", dtype=problem["dtype"]), name)
        for name, (m, k) in sizes.items()
    )


# ---- the whole ----------------------------------------------------------------------------------


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    router = _router(problem)
    route = _by_default(moe_route.BITMASK, router, gpu)
    first, second = (
        _multiplier(problem).program(product, part, gpu)
        for product, part in zip(_products(problem), _configs(problem, config), strict=True)
    )
    x, h = ("x_fp8", "h_fp8") if problem["act_dtype"] == FP8 else ("x", "h")
    quantize = [_quantize(part, name, gpu) for part, name in _quantizations(problem)]
    return composed(
        *quantize[:1],
        renamed(route, {"expert_ids": "ids", "weights": "gates"}),
        renamed(first, {**_operands("1", x), "d": "h"}),
        *quantize[1:],
        renamed(second, {**_operands("2", h), "d": "out"}),
        workspaces=_workspaces(problem),
    )


def _quantize(part: Problem, name: str, gpu: Gpu) -> Program:
    program = _by_default(fp8_quantize.VECTORIZED, part, gpu)
    return renamed(program, {"x": name, "q": f"{name}_fp8", "scale": f"{name}_scale"})


def _by_default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Program:
    return implementation.program(problem, implementation.default(problem, gpu), gpu)


def _operands(number: str, a: str) -> Mapping[str, str]:
    """Names of the operands of a product: weights with ``number``, and activations ``a``."""
    names = {name: f"{name[0]}{number}{name[1:]}" for name in ("w", "w_scale", "w_global_scale")}
    activations = {"a": a, "a_scale": f"{a[0]}_scale", "a_prepared": f"{a[0]}_prepared"}
    return {**names, **activations, "bias": f"bias{number}"}


def _workspaces(problem: Problem) -> dict[str, int]:
    """What the launches pass to each other. ``load`` is an output that nobody asked for."""
    rows, experts, inter = num_assignments(problem), problem["experts"], problem["inter"]
    sizes = {
        "ids": 4 * rows, "gates": 4 * rows, "counts": 4 * experts, "offsets": 4 * (experts + 1),
        "order": 4 * rows, "position": 4 * rows, "load": 0,
        "h": rows * inter * itemsize(problem["dtype"]),
    }  # fmt: skip
    is_fp8, tokens, hidden = problem["act_dtype"] == FP8, problem["tokens"], problem["hidden"]
    return sizes | {
        "x_fp8": tokens * hidden * is_fp8,
        "x_scale": 4 * ceil(hidden / BLOCK) * tokens * is_fp8,
        "h_fp8": rows * inter * is_fp8,
        "h_scale": 4 * ceil(inter / BLOCK) * rows * is_fp8,
    }


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    router = _router(problem)
    why = moe_route.ENTRY.constraint(router) or moe_route.BITMASK.why_not(
        moe_route.BITMASK.default(router, gpu), router, gpu
    )
    if why:
        return f"the router: {why}"
    for product, part in zip(_products(problem), _configs(problem, config), strict=True):
        if why := _multiplier(problem).why_not(part, product, gpu):
            return why
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    for product, part in zip(_products(problem), _configs(problem, config), strict=True):
        if why := _multiplier(problem).unpromising(part, product, gpu):
            return why
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    router = _router(problem)
    us = moe_route.BITMASK.estimate(router, moe_route.BITMASK.default(router, gpu), gpu)
    for product, part in zip(_products(problem), _configs(problem, config), strict=True):
        us += _multiplier(problem).estimate(product, part, gpu)
    for part, _ in _quantizations(problem):
        quantize = fp8_quantize.VECTORIZED
        us += quantize.estimate(part, quantize.default(part, gpu), gpu)
    return us


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="cuda",
    variant="grouped",
    summary="for many tokens: moe_route, then moe_gemm's grouped products; the sum is ordered",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)
