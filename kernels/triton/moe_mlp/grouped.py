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
from kernelcat.kernels.triton import fp8_quantize, moe_gemm, moe_route
from kernelcat.kernels.triton.common.architectures import HOPPER
from kernelcat.kernels.triton.common.dependent_launch import dependent
from kernelcat.kernels.triton.common.product import Tile
from kernelcat.reference._assignments import row_blocks
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
from kernelcat.reference.moe_route import ENTRY as ROUTER
from kernelcat.runtime.gpu import Gpu

TILES = tuple(dict.fromkeys(moe_gemm.TMA.space["tile"] + moe_gemm.TILED.space["tile"]))
SPACE = {"first_tile": TILES, "second_tile": TILES, "stages": moe_gemm.TILED.space["stages"]}
"""Tiles of both products, rows of an expert x rows of the expert's weights x k-block; and stages of
both."""
NO_ROUTER = {"router": 0, "router_bias": 0}
"""Optional inputs of `moe_route` that are absent: logits are given."""


def _multiplier(product: Problem) -> Implementation:
    """What computes a product: operands by TMA, if TMA can load them."""
    by_tma = moe_gemm.why_not_by_tma(product) is None
    return moe_gemm.TMA if by_tma else moe_gemm.TILED


def _tiles(config: Config) -> tuple[Config, Config]:
    stages = config["stages"]
    return tuple(Config(tile=config[name], stages=stages) for name in ("first_tile", "second_tile"))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    first, second = (
        renamed(_multiplier(product).program(product, tile, gpu), product_names(problem, number))
        for number, product, tile in zip((1, 2), products(problem), _tiles(config), strict=True)
    )
    quantize = [
        renamed(_by_default(fp8_quantize.TILED, part, gpu), quantization_names(name))
        for part, name in quantizations(problem)
    ]
    whole = composed(
        *quantize[:1],
        renamed(_by_default(moe_route.TILED, router(problem), gpu), ROUTER_NAMES),
        first,
        *quantize[1:],
        second,
        workspaces=workspaces(problem) | NO_ROUTER,
    )
    return dependent(whole)


def _by_default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Program:
    return implementation.program(problem, implementation.default(problem, gpu), gpu)


@lru_cache(16)  # all pairs of tiles ask
def _why_not_route(problem: Problem, gpu: Gpu) -> str | None:
    routing = router(problem)
    why = ROUTER.constraint(routing) or moe_route.TILED.why_not(
        moe_route.TILED.default(routing, gpu), routing, gpu
    )
    return f"the router: {why}" if why else None


@lru_cache(1024)  # a tile is in many pairs
def _why_not_multiply(product: Problem, tile: Config, gpu: Gpu) -> str | None:
    return _multiplier(product).why_not(tile, product, gpu)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    if why := _why_not_route(problem, gpu):
        return why
    for product, tile in zip(products(problem), _tiles(config), strict=True):
        if why := _why_not_multiply(product, tile, gpu):
            return why
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    for product, tile in zip(products(problem), _tiles(config), strict=True):
        if why := _multiplier(product).unpromising(tile, product, gpu):
            return why
    return None


FLOAT8_RATE = 0.2
"""Share of the peak of float8 products that are scaled and added after each k-block."""
WIDENED_A_SECOND = 24e9
"""Float8 weights that an SM widens to 16 bits in a second; products wait for them."""


def _product_us(product: Problem, config: Config, gpu: Gpu) -> float:
    """A product as in `moe_gemm`, with what float8 weights cost besides bytes."""
    us = _multiplier(product).estimate(product, config, gpu)
    if product["format"] != "fp8":
        return us
    block_m = Tile.of(config).m
    num_weights = row_blocks(product, block_m) * product["N"] * product["K"]
    if product["act_dtype"] == FP8:
        return max(us, 2e6 * block_m * num_weights / (FLOAT8_RATE * gpu.flops[FP8]))
    return us + 1e6 * num_weights / (WIDENED_A_SECOND * gpu.sms)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    routing = router(problem)
    us = moe_route.TILED.estimate(routing, moe_route.TILED.default(routing, gpu), gpu)
    for product, tile in zip(products(problem), _tiles(config), strict=True):
        us += _product_us(product, tile, gpu)
    for part, _ in quantizations(problem):
        us += fp8_quantize.TILED.estimate(part, fp8_quantize.TILED.default(part, gpu), gpu)
    return us


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="triton",
    variant="grouped",
    summary="for many tokens: moe_route, then moe_gemm's grouped products; the sum is ordered",
    archs=HOPPER,
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "tma": "UTMALDG",
        "asynchronous copies": "LDGSTS",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)
