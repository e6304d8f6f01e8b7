"""`fp8_swiglu` in CuTe DSL: naive (pair by pair), fused (vectors that stay in registers).

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
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


def _num_blocks(problem: Problem) -> int:
    """Blocks with a scale each; a warp computes one."""
    return int(problem["M"] * BLOCKS.of(problem.values))


def _bytes_moved(problem: Problem) -> int:
    """Bytes of x and of q; the scales are too few to matter."""
    return int(5 * problem["M"] * problem["N"] // 2)


def _exceeds_indices(problem: Problem, warps: int) -> str | None:
    """Why 32 bits do not hold every index of a row, a column or a block, past the end included."""
    if max(problem["M"], problem["N"], _num_blocks(problem)) + 32 * warps >= 1 << 31:
        return "more rows, columns or blocks than 32-bit indices reach"
    return None


def _program(
    problem: Problem, kernel: str, codes: str, config: Config, num_ctas: int, warps: int
) -> Program:
    """``codes`` is the kind of parameter by which q is written."""
    if problem["M"] * problem["N"] == 0:
        return Program(())
    kinds = ("*" + problem["dtype"], codes, "*float32", "int32", "int32")
    source = CuteSource(kernel, kinds, (("dtype", problem["dtype"]), *config.items()))
    params = (Pointer("x"), Pointer("q"), Pointer("scale"))
    sizes = (Int32(problem["M"]), Int32(problem["N"]))
    return Program((Step(source, (num_ctas, 1, 1), (*params, *sizes), block=32 * warps),))


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_ctas = ceil(_num_blocks(problem) / NAIVE_WARPS)
    return _program(problem, "fp8_swiglu.naive:Naive", "*uint8", config, num_ctas, NAIVE_WARPS)


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _exceeds_indices(problem, NAIVE_WARPS)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(_bytes_moved(problem), gpu, 0.3)


# fused ------------------------------------------------------------------------------------------


def _block_m(config: Config) -> int:
    """Rows of a thread block."""
    return int(config["warps"] * config["unroll"])


def _illegal_fused(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["N"] % VECTOR:
        return f"N={problem['N']} must be a multiple of {VECTOR}: rows are read 16 bytes at a time"
    return _exceeds_indices(problem, _block_m(config))


def _unpromising_fused(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m = _block_m(config)
    if block_m > VECTOR and block_m >= 2 * problem["M"]:
        return f"thread blocks of {block_m} rows are at least half empty at M={problem['M']}"
    return None


def _fused_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_ctas = ceil(problem["M"] / _block_m(config)) * BLOCKS.of(problem.values)
    kernel = "fp8_swiglu.fused:Fused"
    return _program(problem, kernel, "*uint32", config, num_ctas, config["warps"])


def _fused_default(problem: Problem, gpu: Gpu) -> Config:
    """Several rows a warp where every SM still has as many warps as it can hold."""
    for unroll in (4, 2):
        if problem["M"] >= 8 * unroll and _num_blocks(problem) >= 64 * unroll * gpu.sms:
            return Config(warps=8, unroll=unroll)
    return Config(warps=4, unroll=1)


def _fused_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time; longer where a warp has few loads in flight, or warps do not fill the SMs."""
    efficiency = {1: 0.78, 2: 0.83, 4: 0.85, 8: 0.82}[config["unroll"]]
    busy = min(1.0, max(1, _num_blocks(problem)) / (config["unroll"] * 16 * gpu.sms))
    return copy_us(_bytes_moved(problem), gpu, efficiency * busy)


IMPLEMENTATIONS = (
    Implementation(
        entry="fp8_swiglu",
        language="cute",
        variant="naive",
        summary="a warp for each block, pair by pair; any shape",
        archs=("sm_89+",),
        space={},
        illegal=_illegal_naive,
        program=_naive_program,
        estimate=_naive_estimate,
        techniques={"fp8 conversion": "F2FP.SATFINITE.E4M3"},
        rank=0,
    ),
    Implementation(
        entry="fp8_swiglu",
        language="cute",
        variant="fused",
        summary="vectors of 16 bytes, read once; a warp computes the scales of several blocks",
        archs=("sm_89+",),
        space={"warps": (2, 4, 8), "unroll": (1, 2, 4, 8)},
        illegal=_illegal_fused,
        unpromising=_unpromising_fused,
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
