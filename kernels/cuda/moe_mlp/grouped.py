"""`moe_mlp` for many tokens: the programs of `moe_route` and `moe_gemm`, one after the other.

Float8 activations are quantized before each product by `fp8_quantize`. Rows of the second product
are rounded before they are summed: half the bytes of float32, and an error far below that of h.
"""

from __future__ import annotations

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
from kernelcat.reference._experts import FP4
from kernelcat.reference._moe_parts import (
    ROUTER_NAMES,
    is_empty,
    num_assignments,
    product_names,
    products,
    quantization_names,
    quantizations,
    router,
    workspaces,
)
from kernelcat.runtime.gpu import Gpu

TILES = tuple(dict.fromkeys(wgmma.SPACE["tile"] + packed.SPACE["tile"]))
SUM_THREADS, SUM_VECTOR = 128, 8
"""Threads of a thread block of the last launch, and columns of a thread."""
SPACE = {"first_tile": TILES, "second_tile": TILES}
"""Tiles of both products: rows of an expert x rows of the expert's weights."""


# ---- the parts: programs of other entries -------------------------------------------------------


def _multiplier(problem: Problem) -> Implementation:
    """What computes both products."""
    return packed.IMPLEMENTATION if problem["format"] in FP4 else wgmma.IMPLEMENTATION


def _tiles(config: Config) -> tuple[Config, Config]:
    return Config(tile=config["first_tile"]), Config(tile=config["second_tile"])


# ---- the whole ----------------------------------------------------------------------------------


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    route = _by_default(moe_route.BITMASK, router(problem), gpu)
    first, second = (
        renamed(_multiplier(problem).program(product, tile, gpu), product_names(problem, number))
        for number, product, tile in zip((1, 2), products(problem), _tiles(config), strict=True)
    )
    quantize = [_quantize(part, name, gpu) for part, name in quantizations(problem)]
    return composed(
        *quantize[:1],
        renamed(route, ROUTER_NAMES),
        first,
        *quantize[1:],
        second,
        Program((_sum(problem),)),
        workspaces=workspaces(problem),
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
    return renamed(program, quantization_names(name))


def _by_default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Program:
    return implementation.program(problem, implementation.default(problem, gpu), gpu)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    routing = router(problem)
    why = moe_route.ENTRY.constraint(routing) or moe_route.BITMASK.why_not(
        moe_route.BITMASK.default(routing, gpu), routing, gpu
    )
    if why:
        return f"the router: {why}"
    for product, tile in zip(products(problem), _tiles(config), strict=True):
        if why := _multiplier(problem).why_not(tile, product, gpu):
            return why
    if problem["hidden"] % SUM_VECTOR:
        return f"hidden={problem['hidden']} must be a multiple of {SUM_VECTOR}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    for product, tile in zip(products(problem), _tiles(config), strict=True):
        if why := _multiplier(problem).unpromising(tile, product, gpu):
            return why
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    routing = router(problem)
    us = moe_route.BITMASK.estimate(routing, moe_route.BITMASK.default(routing, gpu), gpu)
    for product, tile in zip(products(problem), _tiles(config), strict=True):
        us += _multiplier(problem).estimate(product, tile, gpu)
    for part, _ in quantizations(problem):
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
