"""`moe_mlp` for many tokens: the programs of `moe_route` and `moe_gemm`, one after the other.

Float8 activations are quantized before each product by `fp8_quantize`. The second product sums rows
in the order of slots, so that results are reproducible bit by bit.
"""

from __future__ import annotations

from functools import lru_cache

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda import fp8_quantize, moe_route
from kernelcat.kernels.cuda.moe_gemm import decoded, wgmma
from kernelcat.reference._experts import FP8
from kernelcat.reference._moe_parts import (
    ROUTER_NAMES,
    is_empty,
    product_names,
    products,
    quantization_names,
    quantizations,
    router,
    workspaces,
)
from kernelcat.runtime.gpu import Gpu

TILES = tuple(dict.fromkeys(wgmma.SPACE["tile"] + decoded.SPACE["tile"]))
SPACE = {"first_tile": TILES, "second_tile": TILES}
"""Tiles of both products: rows of an expert x rows of the expert's weights."""


# ---- the parts: programs of other entries -------------------------------------------------------


def _multiplier(problem: Problem) -> Implementation:
    """What computes both products."""
    format, act_dtype = problem["format"], problem["act_dtype"]
    has_equal_types = act_dtype == (FP8 if format == "fp8" else format)
    return wgmma.IMPLEMENTATION if has_equal_types else decoded.IMPLEMENTATION


def _configs(problem: Problem, config: Config) -> tuple[Config, Config]:
    """Configurations of both products."""
    return _parts(config, _multiplier(problem) is wgmma.IMPLEMENTATION)


@lru_cache(256)
def _parts(config: Config, combines: bool) -> tuple[Config, Config]:
    """Configurations of both products; with ``combines`` they say how rows are summed."""
    more = {"combine": "ordered"} if combines else {}
    first, second = config["first_tile"], config["second_tile"]
    return Config(more, tile=first), Config(more, tile=second)


# ---- the whole ----------------------------------------------------------------------------------


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    route = _by_default(moe_route.BITMASK, router(problem), gpu)
    first, second = (
        renamed(_multiplier(problem).program(product, part, gpu), product_names(problem, number))
        for number, product, part in zip(
            (1, 2), products(problem), _configs(problem, config), strict=True
        )
    )
    quantize = [
        renamed(_by_default(fp8_quantize.VECTORIZED, part, gpu), quantization_names(name))
        for part, name in quantizations(problem)
    ]
    return composed(
        *quantize[:1],
        renamed(route, ROUTER_NAMES),
        first,
        *quantize[1:],
        second,
        workspaces=workspaces(problem),
    )


def _by_default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Program:
    return implementation.program(problem, implementation.default(problem, gpu), gpu)


@lru_cache(16)  # all pairs of tiles ask
def _why_not_route(problem: Problem, gpu: Gpu) -> str | None:
    routing = router(problem)
    why = moe_route.ENTRY.constraint(routing) or moe_route.BITMASK.why_not(
        moe_route.BITMASK.default(routing, gpu), routing, gpu
    )
    return f"the router: {why}" if why else None


@lru_cache(1024)  # a tile is in many pairs
def _why_not_multiply(problem: Problem, product: Problem, part: Config, gpu: Gpu) -> str | None:
    return _multiplier(problem).why_not(part, product, gpu)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    if why := _why_not_route(problem, gpu):
        return why
    for product, part in zip(products(problem), _configs(problem, config), strict=True):
        if why := _why_not_multiply(problem, product, part, gpu):
            return why
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    for product, part in zip(products(problem), _configs(problem, config), strict=True):
        if why := _multiplier(problem).unpromising(part, product, gpu):
            return why
    return None


@lru_cache(16)  # the same for all pairs of tiles
def _other_us(problem: Problem, gpu: Gpu) -> float:
    """Microseconds of the router and of quantizing."""
    routing = router(problem)
    us = moe_route.BITMASK.estimate(routing, moe_route.BITMASK.default(routing, gpu), gpu)
    for part, _ in quantizations(problem):
        quantize = fp8_quantize.VECTORIZED
        us += quantize.estimate(part, quantize.default(part, gpu), gpu)
    return us


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    us = _other_us(problem, gpu)
    for product, part in zip(products(problem), _configs(problem, config), strict=True):
        us += _multiplier(problem).estimate(product, part, gpu)
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
