"""`moe_gemm` by Blackwell's block-scaled tensor cores: MXFP4 weights, float8 rows of A."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute.moe_gemm.blackwell import program
from kernelcat.reference._experts import FP8
from kernelcat.runtime.gpu import Gpu


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    format, act_dtype, k = problem["format"], problem["act_dtype"], problem["K"]
    if (format, act_dtype) != ("mxfp4", FP8):
        return (
            f"format={format}, act_dtype={act_dtype}: kind::mxf8f6f4 multiplies mxfp4 by {FP8}; "
            "scales for 16 codes and 16-bit operands are for other kinds"
        )
    if problem["packing"] != "rows":
        return (
            f"packing={problem['packing']}: tcgen05 reads W from shared memory, where TMA widens "
            "codes that are stored in rows; tiles are for registers. Use packing=rows"
        )
    if k < program.CODES_BLOCK_K or k % 64:
        return (
            f"K={k} must be a multiple of 64, at least {program.CODES_BLOCK_K}: TMA widens 128 "
            "codes at a time, from rows of a multiple of 32 bytes; pad K with zeros"
        )
    return program.illegal(config, problem, gpu)


IMPLEMENTATION = Implementation(
    entry="moe_gemm",
    language="cute",
    variant="block_scaled",
    summary="Blackwell: TMA widens MXFP4, gather4, block-scaled tcgen05, sums promoted",
    archs=("sm_100a", "sm_103a"),
    space=program.SPACE,
    illegal=_illegal,
    unpromising=program.unpromising,
    program=program.program,
    estimate=program.estimate,
    techniques={
        "tma": "UTMALDG",
        "tma gather": "UTMALDG.2D.GATHER4",
        "block scales": "UTCQMMA",
        "scales to tensor memory": "UTCCP",
        "tensor memory": "LDTM",
        "cp.async": "LDGSTS",
        "dependent launch": "ACQBULK",
    },
    rank=3,
    unverified="needs a Blackwell GPU",
)
