"""`fp8_swiglu` in CuTe DSL: pair by pair, and in vectors that stay in registers.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.reference.fp8_swiglu import BLOCKS
from kernelcat.runtime.gpu import Gpu

VECTOR = 8
"""Elements of x in 16 bytes."""

NAIVE_WARPS = 4


def _blocks(problem: Problem) -> int:
    """Scales, each the work of a warp."""
    return int(problem["M"] * BLOCKS.of(problem.values))


def _moved(problem: Problem) -> int:
    return int(5 * problem["M"] * problem["N"] // 2)


def _too_large(problem: Problem, warps: int) -> str | None:
    """Indices of rows, columns and warps run to the end of the last CTA, in 32 bits."""
    if max(problem["M"], problem["N"], _blocks(problem)) + 32 * warps >= 1 << 31:
        return "more rows, columns or blocks than 32-bit indices reach"
    return None


def _program(
    problem: Problem, kernel: str, words: str, config: Config, ctas: int, warps: int
) -> Program:
    if problem["M"] * problem["N"] == 0:
        return Program(())
    kinds = ("*" + problem["dtype"], words, "*float32", "int32", "int32")
    source = CuteSource(kernel, kinds, (("dtype", problem["dtype"]), *config.items()))
    params = (Pointer("x"), Pointer("q"), Pointer("scale"))
    sizes = (Int32(problem["M"]), Int32(problem["N"]))
    return Program((Step(source, (ctas, 1, 1), (*params, *sizes), block=32 * warps),))


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    ctas = ceil(_blocks(problem) / NAIVE_WARPS)
    return _program(problem, "fp8_swiglu.naive:Naive", "*uint8", config, ctas, NAIVE_WARPS)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(_moved(problem), gpu, 0.3)


# fused ------------------------------------------------------------------------------------------


def _fused_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["N"] % VECTOR:
        return f"N={problem['N']} must be a multiple of 8: rows are read 16 bytes at a time"
    block_m = config["warps"] * config["unroll"]
    if block_m > VECTOR and block_m >= 2 * problem["M"]:
        return f"CTAs of {block_m} rows are at least half empty for M={problem['M']}"
    return _too_large(problem, block_m)


def _fused_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    block_m = config["warps"] * config["unroll"]
    ctas = ceil(problem["M"] / block_m) * BLOCKS.of(problem.values)
    kernel = "fp8_swiglu.fused:Fused"
    return _program(problem, kernel, "*uint32", config, ctas, config["warps"])


def _fused_default(problem: Problem, gpu: Gpu) -> Config:
    """Several rows a warp where that leaves every SM as many warps as it can hold."""
    for unroll in (4, 2):
        if problem["M"] >= 8 * unroll and _blocks(problem) >= 64 * unroll * gpu.sms:
            return Config(warps=8, unroll=unroll)
    return Config(warps=4, unroll=1)


def _fused_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time; longer where a warp has few loads in flight, or warps do not fill the SMs."""
    efficiency = {1: 0.78, 2: 0.83, 4: 0.85, 8: 0.82}[config["unroll"]]
    busy = min(1.0, max(1, _blocks(problem)) / (config["unroll"] * 16 * gpu.sms))
    return copy_us(_moved(problem), gpu, efficiency * busy)


IMPLEMENTATIONS = (
    Implementation(
        entry="fp8_swiglu",
        language="cute",
        variant="naive",
        summary="one warp, one block, pair by pair; any shape",
        archs=("sm_89+",),
        space={},
        illegal=lambda config, problem, gpu: _too_large(problem, NAIVE_WARPS),
        default=lambda problem, gpu: Config(),
        program=_naive_program,
        estimate=_naive_estimate,
        techniques={"fp8 conversion": "F2FP.SATFINITE.E4M3"},
        rank=0,
    ),
    Implementation(
        entry="fp8_swiglu",
        language="cute",
        variant="fused",
        summary="vectors of 16 bytes, read once; a warp reduces and divides for several blocks",
        archs=("sm_89+",),
        space={"warps": (2, 4, 8), "unroll": (1, 2, 4, 8)},
        illegal=_fused_reject,
        default=_fused_default,
        program=_fused_program,
        estimate=_fused_estimate,
        techniques={
            "vector load": "LDG.E.128",
            "warp reduction": "*REDUX",  # CREDUX on Blackwell
            "fp8 conversion": "F2FP.SATFINITE.E4M3",
        },
        rank=1,
    ),
)
