"""`moe_gemm` by Blackwell's tensor cores: float8 operands with block scales, or 16-bit operands."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute.moe_gemm.blackwell import program
from kernelcat.reference._experts import FP8
from kernelcat.runtime.gpu import Gpu


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    format, act_dtype, k = problem["format"], problem["act_dtype"], problem["K"]
    if format != act_dtype and (format, act_dtype) != ("fp8", FP8):
        return f"weights in {format} and activations in {act_dtype} are not multiplied here"
    divisor = 16 // dtypes.itemsize(act_dtype)
    if k == 0 or k % divisor:
        return (
            f"K={k} must be a positive multiple of {divisor}: TMA needs rows of a multiple of 16 "
            "bytes"
        )
    return program.illegal(config, problem, gpu)


IMPLEMENTATION = Implementation(
    entry="moe_gemm",
    language="cute",
    variant="tcgen05",
    summary="Blackwell: TMA and gather4, tcgen05 into tensor memory; float8 sums promoted",
    archs=("sm_100a", "sm_103a"),
    space=program.SPACE,
    illegal=_illegal,
    unpromising=program.unpromising,
    program=program.program,
    estimate=program.estimate,
    techniques={
        "tma": "UTMALDG",
        "tma gather": "UTMALDG.2D.GATHER4",
        "tcgen05": "UTCHMMA",
        "tensor memory": "LDTM",
        "dependent launch": "ACQBULK",
    },
    rank=2,
    unverified="needs a Blackwell GPU",
)
