"""The baseline of `moe_gemm`: one thread for each element of D, for every format."""

from __future__ import annotations

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Pointer, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import grid_stride_launch, instance
from kernelcat.kernels.cuda.moe_gemm.operands import (
    GROUPS,
    SUM,
    d_cols,
    d_rows,
    gating,
    sizes,
    weight_format,
)
from kernelcat.reference.moe_gemm import ENTRY
from kernelcat.runtime.gpu import Gpu

THREADS = 256
FLOPS = 0.2e12
"""Operations a second, a guess from the baselines of gemm and nvfp4_matmul."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    source = instance(
        "moe_gemm/naive.cu",
        "moe_gemm_naive",
        *(problem["dtype"], problem["act_dtype"], weight_format(problem)),
        *(problem["packing"] == "tiles", gating(problem), problem["gather"], problem["combine"]),
    )
    weights = map(Pointer, ("a", "a_scale", "w", "w_scale", "w_global_scale", "bias"))
    return grid_stride_launch(
        source,
        (*weights, *GROUPS, *SUM, *sizes(problem)),
        d_rows(problem) * d_cols(problem),
        items_per_block=THREADS,
        threads=THREADS,
    )


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu) + ENTRY.flops(problem) / FLOPS * 1e6


IMPLEMENTATION = baseline(
    "moe_gemm",
    "one thread for each element of D; every format",
    _program,
    _estimate,
    {"fused multiply-add": "FFMA"},
)
