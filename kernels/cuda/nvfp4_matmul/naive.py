"""The baseline of `nvfp4_matmul`: one thread for each element of D, for A in 16 or 8 bits."""

from __future__ import annotations

from dataclasses import replace

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Pointer, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import grid_stride_launch, instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    WEIGHTS,
    activation,
    is_nvfp4,
    out_type,
    why_not_decoded,
)
from kernelcat.reference.nvfp4_matmul import ENTRY
from kernelcat.runtime.gpu import Gpu

THREADS = 256
FLOPS = 0.1e12
"""Operations a second, a guess: every thread decodes each weight that it multiplies."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    source = instance(
        "nvfp4_matmul/naive.cu",
        "nvfp4_matmul_naive",
        *(problem["dtype"], out_type(problem), is_nvfp4(problem)),
        *(problem["packing"] == "tiles", activation(problem)),
    )
    d_cols = problem["N"] // (2 if problem["activation"] == "swiglu" else 1)
    return grid_stride_launch(
        source,
        (Pointer("a"), *WEIGHTS, *EPILOGUE, *sizes(problem)),
        problem["M"] * d_cols,
        items_per_block=THREADS,
        threads=THREADS,
    )


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu) + ENTRY.flops(problem) / FLOPS * 1e6


IMPLEMENTATION = replace(
    baseline(
        "nvfp4_matmul",
        "one thread for each element, for weights in rows or in tiles",
        _program,
        _estimate,
        {"fused multiply-add": "FFMA"},
    ),
    illegal=lambda config, problem, gpu: why_not_decoded(problem),
)
