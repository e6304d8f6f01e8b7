"""`moe_mlp` for many tokens: the programs of `moe_route` and `moe_gemm`, one after the other.

Float8 activations are quantized before each product by `fp8_quantize`. The second product sums rows
in the order of slots, so that results are reproducible bit by bit.
"""

from __future__ import annotations

from functools import lru_cache

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute.moe_gemm.hopper import STAGES, WGMMA
from kernelcat.kernels.cute.moe_mlp import parts
from kernelcat.kernels.cute.moe_mlp.parts import Part
from kernelcat.reference._moe_parts import is_empty, product_names, products
from kernelcat.runtime.gpu import Gpu

TILES = WGMMA.space["tile"]
SPACE = {"first_tile": TILES, "second_tile": TILES}
"""Tiles of both products: rows of an expert x rows of the expert's weights."""


@lru_cache(64)  # a tile is in many pairs
def _product(problem: Problem, tile: str, gpu: Gpu) -> Config:
    """The configuration of a product with this tile that is promising, or else legal."""
    configs = [Config(tile=tile, stages=stages) for stages in STAGES]
    legal = [each for each in configs if WGMMA.why_not(each, problem, gpu) is None]
    promising = [each for each in legal if WGMMA.unpromising(each, problem, gpu) is None]
    return min(promising or legal or configs, key=lambda each: WGMMA.estimate(problem, each, gpu))


@lru_cache(16)  # each configuration of a choice asks three times
def _products(problem: Problem, config: Config, gpu: Gpu) -> tuple[Part, Part]:
    def part(number: int, name: str, product: Problem, tile: str) -> Part:
        return name, WGMMA, product, _product(product, tile, gpu), product_names(problem, number)

    first, second = products(problem)
    return (
        part(1, "the first product", first, config["first_tile"]),
        part(2, "the second product", second, config["second_tile"]),
    )


def _parts(problem: Problem, config: Config, gpu: Gpu) -> tuple[Part, ...]:
    first, second = _products(problem, config, gpu)
    quantize = parts.quantizing(problem, "vectorized", gpu)
    route = parts.routing(problem, "bitmask", gpu)
    return *quantize[:1], route, first, *quantize[1:], second


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    return parts.program(problem, _parts(problem, config, gpu), gpu)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return None if is_empty(problem) else parts.why_not(problem, _parts(problem, config, gpu), gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    for _, _, product, tile, _ in _products(problem, config, gpu):
        if why := WGMMA.unpromising(tile, product, gpu):
            return why
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    return parts.estimate(_parts(problem, config, gpu), gpu)


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="cute",
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
