"""`nvfp4_dequantize` in CUDA C++: a thread a block of scales, and words of eight codes."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_dequantize import ENTRY
from kernelcat.runtime.gpu import Gpu

MAX_GRID = 2**31 - 1
THREADS = 256
CODES = 8
"""Codes of a word."""

SPACE = {"unroll": (1, 2, 4, 8)}
"""Words that a thread has in flight."""


def _launch(problem: Problem, kernel: str, blocks: int, *constants: int) -> Program:
    if problem["M"] * problem["K"] == 0:
        return Program(())
    flags = (problem["format"] == "nvfp4", problem["scale_layout"] == "swizzled")
    words = [f"kernelcat::{problem['dtype']}", *(str(flag).lower() for flag in flags)]
    name = ", ".join([*words, *map(str, constants)])
    source = CudaSource(
        f"nvfp4_dequantize/{kernel}.cu", f"kernelcat::nvfp4_dequantize_{kernel}<{name}>"
    )
    params = (
        *map(Pointer, ("q", "scale", "global_scale", "x")),
        Int32(problem["M"]),
        Int32(problem["K"]),
    )
    return Program((Step(source, (blocks, 1, 1), params, THREADS),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = problem["M"] * problem["K"] // block_of(problem.values)
    return _launch(problem, "naive", min(ceil(blocks / THREADS), MAX_GRID))


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] * problem["K"] / (CODES * THREADS * config["unroll"]))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _launch(problem, "vectorized", _num_blocks(problem, config), config["unroll"])


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_blocks(problem, config) > MAX_GRID:
        return f"the grid would have more than {MAX_GRID} blocks"
    unroll = config["unroll"]
    if unroll > 1 and CODES * THREADS * unroll >= 2 * problem["M"] * problem["K"]:
        return f"{unroll} words a thread are mostly none"
    return None


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, which many blocks give as well as large ones."""
    in_flight = min(_num_blocks(problem, config) / gpu.sms, 8) * config["unroll"]
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * min(1.0, 0.4 + in_flight / 40))


def _default_vectorized(problem: Problem, gpu: Gpu) -> Config:
    serving = VECTORIZED.configs(problem, gpu)
    best = min(serving, key=lambda c: _vectorized_us(problem, c, gpu), default=None)
    return best or Config(unroll=1)


VECTORIZED = Implementation(
    entry="nvfp4_dequantize",
    language="cuda",
    variant="vectorized",
    summary="eight values a thread and turn, 16-byte stores",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_reject_vectorized,
    default=_default_vectorized,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={"16-byte stores": "STG*128"},
    rank=1,
)

IMPLEMENTATIONS = (
    Implementation(
        entry="nvfp4_dequantize",
        language="cuda",
        variant="naive",
        summary="a thread a block of scales, value by value",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=_naive,
        estimate=lambda problem, config, gpu: (
            LAUNCH_US + 8 * copy_us(ENTRY.bytes_moved(problem), gpu)
        ),
        rank=0,
    ),
    VECTORIZED,
)
