"""`fp8_swiglu` in Triton: naive (the elements of one scale a program), fused (many rows).

Both read x once; silu(gate) * up stays in registers between the maximum and the quantization.
"""

from math import ceil

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common.architectures import FLOAT8
from kernelcat.kernels.triton.common.quantizer import TECHNIQUES, launch, launch_us
from kernelcat.reference.fp8_quantize import BLOCK
from kernelcat.runtime.gpu import Gpu

DEVICE = "kernelcat.kernels.triton.fp8_swiglu.device"


def _num_blocks(problem: Problem) -> int:
    """Scales of a row."""
    return ceil(problem["N"] / (2 * BLOCK))


def _program(kernel: str, problem: Problem, rows: int, warps: int, **constants: int) -> Program:
    kernel = f"{DEVICE}:{kernel}"
    return launch(kernel, problem, "N", constants, rows=rows, cols=2 * BLOCK, warps=warps)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program("naive", problem, rows=1, warps=config["warps"])


def _fused(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rows, lanes = config["rows"], config["lanes"]
    return _program("fused", problem, rows, config["warps"], ROWS=rows, LANES=lanes)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_scales = problem["M"] * _num_blocks(problem)
    if num_scales >= 1 << 31:
        return f"{num_scales} scales are more than 32-bit indices reach"
    return None


def _unpromising_fused(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, lanes, warps = config["rows"], config["lanes"], config["warps"]
    if rows > 8 * warps:
        return f"{rows // warps} vectors a thread: more than 8 fill the registers"
    if rows * lanes < 32 * warps:
        return f"{warps} warps have more threads than {rows} rows of {lanes} lanes"
    if rows > 2 and rows >= 2 * problem["M"]:
        return f"programs of {rows} rows are at least half empty for M={problem['M']}"
    return None


FEW_VECTORS = 4
"""Vectors that a thread holds without loss. Each more takes 1/64 of the time: fewer warps fit."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows, vectors = config.get("rows", 1), config.get("rows", 1) / config["warps"]
    num_programs = ceil(problem["M"] / rows) * _num_blocks(problem)
    us = launch_us(problem["M"] * problem["N"] * 5 // 2, num_programs, vectors / 5, gpu)
    return us * (1 + max(0.0, vectors - FEW_VECTORS) / 64)


def _default_fused(problem: Problem, gpu: Gpu) -> Config:
    """Four vectors a thread, or one where that makes fewer than two programs for every SM."""
    for rows in (16, 8, 4):
        if ceil(problem["M"] / rows) * _num_blocks(problem) >= 2 * gpu.sms:
            return Config(rows=rows, lanes=8, warps=rows // 4)
    return Config(rows=2, lanes=32, warps=2)


NAIVE = Implementation(
    entry="fp8_swiglu",
    language="triton",
    variant="naive",
    summary="the elements of one scale a program; any shape",
    archs=FLOAT8,
    space={"warps": (4,)},
    illegal=_illegal,
    program=_naive,
    estimate=_estimate,
    techniques=TECHNIQUES,
    rank=0,
)

FUSED = Implementation(
    entry="fp8_swiglu",
    language="triton",
    variant="fused",
    summary="many rows a program, 16-byte loads; in registers from load to store",
    archs=FLOAT8,
    space={"rows": (2, 4, 8, 16, 32, 64), "lanes": (8, 16, 32), "warps": (1, 2, 4, 8)},
    illegal=_illegal,
    unpromising=_unpromising_fused,
    default=_default_fused,
    program=_fused,
    estimate=_estimate,
    techniques={"16-byte loads": "LDG*128", **TECHNIQUES},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, FUSED)
