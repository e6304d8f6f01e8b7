"""`moe_gemm` in CuTe DSL: naive for every format, WGMMA on Hopper, tcgen05 on Blackwell.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.moe_gemm.operands import (
    GROUPS,
    SUM,
    d_cols,
    d_rows,
    is_empty,
    sizes,
)
from kernelcat.kernels.cute.common.matmul import MAX_GRID_Y, NAIVE_BLOCK
from kernelcat.kernels.cute.moe_gemm import block_scaled, tcgen05
from kernelcat.kernels.cute.moe_gemm.hopper import WGMMA
from kernelcat.kernels.cute.moe_gemm.operands import (
    GROUP_KINDS,
    OPERANDS,
    element_kinds,
    sum_kinds,
)
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_gemm import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_FLOPS = 0.2e12
"""Operations a second, a guess from the baselines of gemm and nvfp4_matmul."""
CONSTANTS = ("dtype", "act_dtype", "format", "activation", "gather", "combine", "bias", "residual")
"""Axes that the naive kernel is compiled for."""


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*element_kinds(problem), *GROUP_KINDS, *sum_kinds(problem), *["int32"] * 5)
    constants = {axis: problem[axis] for axis in CONSTANTS}
    constants["in_tiles"] = problem["packing"] == "tiles"
    source = CuteSource("moe_gemm.naive:Naive", kinds, tuple(constants.items()))
    grid = (ceil(d_cols(problem) / NAIVE_BLOCK), ceil(d_rows(problem) / NAIVE_BLOCK), 1)
    params = (*OPERANDS, *GROUPS, *SUM, *sizes(problem))
    return Program((Step(source, grid, params, block=NAIVE_BLOCK * NAIVE_BLOCK),))


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows = d_rows(problem)
    if rows > MAX_GRID_Y * NAIVE_BLOCK:
        return f"{rows} rows of D need more than {MAX_GRID_Y} thread blocks of {NAIVE_BLOCK} rows"
    uses_float8 = problem["format"] == "fp8" or problem["act_dtype"] == FP8
    if uses_float8 and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8: format and act_dtype must be other types"
    return None


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    us = copy_us(ENTRY.bytes_moved(problem), gpu) + ENTRY.flops(problem) / NAIVE_FLOPS * 1e6
    return LAUNCH_US + us


NAIVE = Implementation(
    entry="moe_gemm",
    language="cute",
    variant="naive",
    summary="a thread for each element of D; every format",
    archs=("sm_80+",),
    space={},
    illegal=_illegal_naive,
    program=_naive_program,
    estimate=_naive_estimate,
    rank=0,
)

IMPLEMENTATIONS = (NAIVE, WGMMA, tcgen05.IMPLEMENTATION, block_scaled.IMPLEMENTATION)
