"""`out_router` for tens of tokens: `gemm`'s tensor cores, then the second launch of `streamed`.

The first launch adds the projection to the residual, in place. The second one normalizes the
residual and computes the logits.
"""

from __future__ import annotations

from kernelcat.catalog.composition import composed, renamed
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.streamed_product import MAX_TOKENS
from kernelcat.kernels.cuda.gemm import wgmma
from kernelcat.kernels.cuda.out_router.streamed import later_waves_us, route_step
from kernelcat.runtime.gpu import Gpu

PRODUCT_NAMES = {"a": "attn", "b": "wo", "bias": "bo", "d": "residual"}
"""Name in `gemm` -> name here. A thread reads an element of the residual before its tile is
stored, and no other tile reads the element."""
SPACE = {
    "tile": ("64x64", "64x16", "64x32", "64x48", "128x16", "128x32", "128x48", "128x64"),
    "split_k": wgmma.SPACE["split_k"],
}
"""
Of the projection: BLOCK_M x BLOCK_N of Z^T, and splits of attn's columns.
"""
ROUTE_US = 4.0
"""The launch that normalizes. The projection leaves it no room on the SMs, so the router's weights
arrive after its end, unlike those of `streamed`.
"""


def _product(problem: Problem) -> Problem:
    """The projection."""
    return Problem.of(
        "gemm", M=problem["tokens"], N=problem["hidden"], K=problem["width"],
        dtype=problem["dtype"], bias=problem["bias"], activation="none", residual=True,
    )  # fmt: skip


def _part(config: Config) -> Config:
    """The configuration of `gemm`: operands change places, so that weights fill 64 rows."""
    return Config(
        tile=config["tile"], schedule="cooperative", swap=True, cluster="1x1",
        split_k=config["split_k"],
    )  # fmt: skip


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    product = wgmma.IMPLEMENTATION.program(_product(problem), _part(config), gpu)
    return composed(renamed(product, PRODUCT_NAMES), Program((route_step(problem),)), workspaces={})


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tokens, hidden = problem["tokens"], problem["hidden"]
    if tokens > MAX_TOKENS:
        return f"tokens={tokens} are more than the {MAX_TOKENS} of the launch that normalizes"
    if hidden == 0 or hidden % 8:
        return f"hidden={hidden} must be a positive multiple of 8: loads move whole 16 bytes"
    why = wgmma.IMPLEMENTATION.why_not(_part(config), _product(problem), gpu)
    return f"the projection: {why}" if why else None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return wgmma.IMPLEMENTATION.unpromising(_part(config), _product(problem), gpu)


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return wgmma.IMPLEMENTATION.too_slow(_part(config), _product(problem), gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    us = wgmma.IMPLEMENTATION.estimate(_product(problem), _part(config), gpu)
    return us + ROUTE_US + later_waves_us(problem, gpu)


IMPLEMENTATION = Implementation(
    entry="out_router",
    language="cuda",
    variant="products",
    summary="for tens of tokens: gemm's wgmma, then norm and logits; two launches that overlap",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    too_slow=_too_slow,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mma.sync": "HMMA",
        "mbarrier": "SYNCS",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)
