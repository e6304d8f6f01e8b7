"""`nvfp4_matmul`'s baseline: one thread an element of D, of A in 16 or 8 bits."""

from __future__ import annotations

from dataclasses import replace

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Pointer, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.naive import baseline, launch
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    WEIGHTS,
    activation,
    cpp,
    is_nvfp4,
    sizes,
    types,
    why_not_coded,
)
from kernelcat.reference.nvfp4_matmul import ENTRY
from kernelcat.runtime.gpu import Gpu

FLOPS = 0.1e12
"""A guess: every thread decodes what it multiplies."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    arguments = (
        *types(problem),
        is_nvfp4(problem),
        cpp(problem["packing"] == "tiles"),
        activation(problem),
    )
    kernel = f"kernelcat::nvfp4_matmul_naive<{', '.join(arguments)}>"
    source = CudaSource("nvfp4_matmul/naive.cu", kernel)
    pair = 2 if problem["activation"] == "swiglu" else 1
    elements = problem["M"] * (problem["N"] // pair)
    return launch(source, elements, (Pointer("a"), *WEIGHTS, *EPILOGUE, *sizes(problem)))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu) + ENTRY.flops(problem) / FLOPS * 1e6


IMPLEMENTATION = replace(
    baseline("nvfp4_matmul", "one thread an element; either packing", _program, _estimate),
    illegal=lambda config, problem, gpu: why_not_coded(problem),
)
