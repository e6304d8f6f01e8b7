"""`gemm` for few rows of A: rows of B stream once through rings in shared memory.

The product of `out_router` and `qkv_rope_write`, with gemm's epilogue. They know that no kernel
writes weights, and load them before the kernel before them has ended; B may be what that kernel
wrote, so here nothing is loaded before.
"""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Implementation, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.common.streamed_product import (
    SPACE,
    StreamedProduct,
    unpromising_product,
    why_no_room,
    why_not_streamed,
)
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, epilogue
from kernelcat.runtime.gpu import Gpu

EXTRA_BYTES = 8
"""Bytes of GemmOutput::Extra: two biases and two elements of the residual."""


def _product(problem: Problem, config: Config, gpu: Gpu) -> StreamedProduct:
    return StreamedProduct.of(problem["N"], problem["K"], problem["M"], EXTRA_BYTES, config, gpu)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["M"] or not problem["N"]:
        return Program(())
    product = _product(problem, config, gpu)
    source = instance(
        "gemm/streamed.cu", "gemm_streamed", problem["dtype"], *epilogue(problem),
        *product.constants,
    )  # fmt: skip
    params = (Pointer("a"), Pointer("b"), *EPILOGUE, *sizes(problem))
    step = Step(source, (product.grid, 1, 1), params, product.num_threads, product.shared_bytes,
                programmatic=True)  # fmt: skip
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] == 0:
        return "K=0: there are no rows of B to stream"
    if why := why_not_streamed(problem["M"], config, K=problem["K"]):
        return why
    return why_no_room(_product(problem, config, gpu), gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_product(_product(problem, config, gpu))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _product(problem, config, gpu).us(gpu)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="streamed",
    summary="few rows of A: bulk copies of rows of B into a ring, mma.sync",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "bulk copies": "UBLKCP",
        "mbarrier": "SYNCS",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)
