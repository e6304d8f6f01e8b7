"""`nvfp4_dequantize` in CuTe DSL: naive (value by value), vectorized (words of eight codes).

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us, stream_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_dequantize import ENTRY
from kernelcat.runtime.gpu import Gpu

ARCHS = ("sm_80+",)
INSTRUCTIONS = {"linear": 18, "swizzled": 33}
"""Instructions of a thread for a code, by the layout of the scales."""
RESIDENT_THREADS = 2048
ADDRESS_US, ROUND_US, WORD_US = 0.15, 0.02, 0.05
"""Until a thread knows its place; what a round of resident threads and a thread's word wait for."""
CODES = 8
"""Codes in a word."""

TENSORS = tuple(Pointer(name) for name in ("q", "scale", "global_scale", "x"))


def _program(problem: Problem, kernel: str, config: Config, num_ctas: int, threads: int) -> Program:
    if problem["M"] * problem["K"] == 0:
        return Program(())
    kinds = ("*uint32", "*uint8", "*float32", "*" + problem["dtype"], "int32", "int32")
    constants = (
        ("dtype", problem["dtype"]),
        ("is_nvfp4", problem["format"] == "nvfp4"),
        ("is_swizzled", problem["scale_layout"] == "swizzled"),
        *config.items(),
    )
    source = CuteSource(f"nvfp4_dequantize.{kernel}", kinds, constants)
    sizes = (Int32(problem["M"]), Int32(problem["K"]))
    return Program((Step(source, (num_ctas, 1, 1), (*TENSORS, *sizes), block=threads),))


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks = problem["M"] * problem["K"] // block_of(problem.values)
    return _program(problem, "naive:Naive", Config(), ceil(num_blocks / 256), 256)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.1)


# vectorized -------------------------------------------------------------------------------------


def _num_ctas(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] * problem["K"] / (CODES * config["threads"] * config["unroll"]))


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_ctas = _num_ctas(problem, config)
    return _program(problem, "vectorized:Vectorized", config, num_ctas, config["threads"])


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_ctas(problem, config) >= 1 << 31:
        return f"{_num_ctas(problem, config)} thread blocks are more than a grid has"
    return None


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_codes = CODES * config["threads"] * config["unroll"]
    if config["unroll"] > 1 and num_codes >= 2 * problem["M"] * problem["K"]:
        return f"unroll={config['unroll']} leaves most threads without codes"
    return None


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory or instructions; each round of resident threads begins anew."""
    ctas, unroll = _num_ctas(problem, config), config["unroll"]
    resident = RESIDENT_THREADS // config["threads"]
    per_code = INSTRUCTIONS[problem["scale_layout"]]
    us = stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=ctas, rounds=ctas / (gpu.sms * resident),
        share=0.99, instructions=per_code * problem["M"] * problem["K"],
        waits_us=ROUND_US,
    )  # fmt: skip
    return us + ADDRESS_US + WORD_US * unroll


IMPLEMENTATIONS = (
    Implementation(
        entry="nvfp4_dequantize",
        language="cute",
        variant="naive",
        summary="a thread for each scale, value by value",
        archs=ARCHS,
        space={},
        program=_naive_program,
        estimate=_naive_estimate,
        rank=0,
    ),
    Implementation(
        entry="nvfp4_dequantize",
        language="cute",
        variant="vectorized",
        summary="words of eight codes, several of a thread in flight, 16-byte stores",
        archs=ARCHS,
        space={"threads": (256,), "unroll": (1, 2, 4, 8)},
        illegal=_illegal_vectorized,
        unpromising=_unpromising_vectorized,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector store": "STG.E.128"},
        rank=1,
    ),
)
