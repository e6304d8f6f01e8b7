"""`nvfp4_dequantize` in CUDA C++: a thread for each block of scales; words of eight codes."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import stream_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.baseline import baseline, element_by_element_us
from kernelcat.kernels.cuda.common.launch import grid_stride_launch, instance, why_no_grid
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_dequantize import ENTRY
from kernelcat.runtime.gpu import Gpu

THREADS = 256
INSTRUCTIONS = {"linear": 15, "swizzled": 18}
"""Instructions of a thread for a code, by the layout of the scales."""
RESIDENT_THREADS = 2048
ROUND_US, WORD_US = 0.02, 0.05
"""What a round of resident threads and what a word of a thread waits for."""
WORD_CODES = 8
"""Codes in a word of 32 bits."""

SPACE = {"unroll": (1, 2, 4, 8)}
"""unroll : words that a thread has in flight"""


def _source(problem: Problem, variant: str, *constants: int) -> CudaSource:
    flags = (problem["format"] == "nvfp4", problem["scale_layout"] == "swizzled")
    return instance(
        f"nvfp4_dequantize/{variant}.cu",
        f"nvfp4_dequantize_{variant}",
        *(problem["dtype"], *flags, *constants),
    )


def _params(problem: Problem) -> tuple[Param, ...]:
    pointers = map(Pointer, ("q", "scale", "global_scale", "x"))
    return *pointers, Int32(problem["M"]), Int32(problem["K"])


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_scales = problem["M"] * problem["K"] // block_of(problem.values)
    return grid_stride_launch(
        _source(problem, "naive"),
        _params(problem),
        num_scales,
        items_per_block=THREADS,
        threads=THREADS,
    )


def _block_codes(config: Config) -> int:
    """Codes of a thread block."""
    return int(WORD_CODES * THREADS * config["unroll"])


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] * problem["K"] / _block_codes(config))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks = _num_blocks(problem, config)
    if num_blocks == 0:
        return Program(())
    source = _source(problem, "vectorized", config["unroll"])
    return Program((Step(source, (num_blocks, 1, 1), _params(problem), THREADS),))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return why_no_grid(_num_blocks(problem, config))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    size = problem["M"] * problem["K"]
    if config["unroll"] > 1 and _block_codes(config) >= 2 * size:
        return f"a thread block reads {_block_codes(config)} codes, and there are {size}"
    return None


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory; each round of resident threads begins anew, and each word of a thread takes turns."""
    blocks, unroll = _num_blocks(problem, config), config["unroll"]
    resident = RESIDENT_THREADS // THREADS
    us = stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=blocks, rounds=blocks / (gpu.sms * resident),
        instructions=INSTRUCTIONS[problem["scale_layout"]] * problem["M"] * problem["K"],
        waits_us=ROUND_US,
    )  # fmt: skip
    return us + WORD_US * unroll


VECTORIZED = Implementation(
    entry="nvfp4_dequantize",
    language="cuda",
    variant="vectorized",
    summary="words of eight codes, 16-byte stores",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={"16-byte stores": "STG*128"},
    rank=1,
)

NAIVE = baseline(
    "nvfp4_dequantize",
    "a thread for each block of scales, value by value",
    _naive,
    element_by_element_us(ENTRY.bytes_moved),
)

IMPLEMENTATIONS = (NAIVE, VECTORIZED)
