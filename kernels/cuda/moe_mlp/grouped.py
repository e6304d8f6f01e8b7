"""`moe_mlp` for many tokens: the programs of `moe_route` and `moe_gemm`, one after the other.

Float8 activations are quantized before each product by `fp8_quantize`. Rows of the second product
are rounded before they are summed: half the bytes of float32, and an error far below that of h.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda import fp8_quantize, moe_route
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.moe_gemm import packed, wgmma
from kernelcat.kernels.cuda.moe_mlp.operands import is_empty, num_assignments
from kernelcat.reference import moe_gemm
from kernelcat.reference._experts import FP4, FP8
from kernelcat.reference._fp8 import BLOCK
from kernelcat.reference.moe_route import routed
from kernelcat.runtime.gpu import Gpu

TILES = tuple(dict.fromkeys(wgmma.SPACE["tile"] + packed.SPACE["tile"]))
SUM_THREADS, SUM_VECTOR = 128, 8
"""Threads of a thread block of the last launch, and columns of a thread."""
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
    return first, moe_gemm.product(tokens, top_k, experts, hidden, inter, **axes)


def _multiplier(problem: Problem) -> Implementation:
    """What computes both products."""
    return packed.IMPLEMENTATION if problem["format"] in FP4 else wgmma.IMPLEMENTATION


def _tiles(config: Config) -> tuple[Config, Config]:
    return Config(tile=config["first_tile"]), Config(tile=config["second_tile"])


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
        _multiplier(problem).program(product, tile, gpu)
        for product, tile in zip(_products(problem), _tiles(config), strict=True)
    )
    x, h = ("x_fp8", "h_fp8") if problem["act_dtype"] == FP8 else ("x", "h")
    quantize = [_quantize(part, name, gpu) for part, name in _quantizations(problem)]
    return composed(
        *quantize[:1],
        renamed(route, {"expert_ids": "ids", "weights": "gates"}),
        renamed(first, {**_weights("1"), "a": x, "a_scale": "x_scale", "d": "h"}),
        *quantize[1:],
        renamed(second, {**_weights("2"), "a": h, "a_scale": "h_scale", "d": "y"}),
        Program((_sum(problem),)),
        workspaces=_workspaces(problem),
    )


def _sum(problem: Problem) -> Step:
    """The weighted sums of rows of y."""
    tokens, top_k, hidden = (problem[axis] for axis in ("tokens", "top_k", "hidden"))
    dtype = problem["dtype"]
    return Step(
        instance("moe_gemm/combine.cu", "moe_gemm_combine", dtype, dtype),
        (tokens, ceil(hidden / (SUM_VECTOR * SUM_THREADS)), 1),
        (
            *map(Pointer, ("y", "position", "gates", "residual", "out")),
            *map(Int32, (top_k, hidden, hidden)),
        ),
        SUM_THREADS,
        programmatic=True,
    )


def _quantize(part: Problem, name: str, gpu: Gpu) -> Program:
    program = _by_default(fp8_quantize.VECTORIZED, part, gpu)
    return renamed(program, {"x": name, "q": f"{name}_fp8", "scale": f"{name}_scale"})


def _by_default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Program:
    return implementation.program(problem, implementation.default(problem, gpu), gpu)


def _weights(number: str) -> Mapping[str, str]:
    names = {name: f"{name[0]}{number}{name[1:]}" for name in ("w", "w_scale", "w_global_scale")}
    return names | {"bias": f"bias{number}"}


def _workspaces(problem: Problem) -> dict[str, int]:
    """What the launches pass to each other. ``load`` is an output that nobody asked for."""
    rows, experts, inter = num_assignments(problem), problem["experts"], problem["inter"]
    sizes = {
        "ids": 4 * rows, "gates": 4 * rows, "counts": 4 * experts, "offsets": 4 * (experts + 1),
        "order": 4 * rows, "position": 4 * rows, "load": 0,
        "h": rows * inter * itemsize(problem["dtype"]),
        "y": rows * problem["hidden"] * itemsize(problem["dtype"]),
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
    for product, tile in zip(_products(problem), _tiles(config), strict=True):
        if why := _multiplier(problem).why_not(tile, product, gpu):
            return why
    if problem["hidden"] % SUM_VECTOR:
        return f"hidden={problem['hidden']} must be a multiple of {SUM_VECTOR}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    for product, tile in zip(_products(problem), _tiles(config), strict=True):
        if why := _multiplier(problem).unpromising(tile, product, gpu):
            return why
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    router = _router(problem)
    us = moe_route.BITMASK.estimate(router, moe_route.BITMASK.default(router, gpu), gpu)
    for product, tile in zip(_products(problem), _tiles(config), strict=True):
        us += _multiplier(problem).estimate(product, tile, gpu)
    for part, _ in _quantizations(problem):
        quantize = fp8_quantize.VECTORIZED
        us += quantize.estimate(part, quantize.default(part, gpu), gpu)
    summed_bytes = (num_assignments(problem) + problem["tokens"]) * problem["hidden"]
    return us + copy_us(summed_bytes * itemsize(problem["dtype"]), gpu) - LAUNCH_US / 2


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
