"""`nvfp4_dequantize` in CuTe DSL: value by value, and words of eight codes.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_dequantize import ENTRY
from kernelcat.runtime.gpu import Gpu

ARCHS = ("sm_80+",)
CODES = 8
"""Codes of a word."""

TENSORS = tuple(Pointer(name) for name in ("q", "scale", "global_scale", "x"))


def _program(problem: Problem, kernel: str, config: Config, ctas: int, threads: int) -> Program:
    if problem["M"] * problem["K"] == 0:
        return Program(())
    kinds = ("*uint32", "*uint8", "*float32", "*" + problem["dtype"], "int32", "int32")
    constants = (
        ("dtype", problem["dtype"]),
        ("nvfp4", problem["format"] == "nvfp4"),
        ("swizzled", problem["scale_layout"] == "swizzled"),
        *config.items(),
    )
    source = CuteSource(f"nvfp4_dequantize.{kernel}", kinds, constants)
    numbers = (Int32(problem["M"]), Int32(problem["K"]))
    return Program((Step(source, (ctas, 1, 1), (*TENSORS, *numbers), block=threads),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = problem["M"] * problem["K"] // block_of(problem.values)
    return _program(problem, "naive:Naive", Config(), ceil(blocks / 256), 256)


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.1)


def _ctas(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] * problem["K"] / (CODES * config["threads"] * config["unroll"]))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    ctas = _ctas(problem, config)
    return _program(problem, "vectorized:Vectorized", config, ctas, config["threads"])


def _vectorized_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, unroll = config["threads"], config["unroll"]
    if _ctas(problem, config) >= 1 << 31:
        return "more CTAs than a grid has"
    if unroll > 1 and CODES * threads * unroll >= 2 * problem["M"] * problem["K"]:
        return f"{unroll} words a thread are mostly none"
    return None


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, which many CTAs give as well as large ones."""
    in_flight = min(_ctas(problem, config) / gpu.sms, 8) * config["unroll"]
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.88 * min(1.0, 0.4 + in_flight / 40))


def _vectorized_default(problem: Problem, gpu: Gpu) -> Config:
    serving = VECTORIZED.configs(problem, gpu)
    best = min(serving, key=lambda c: _vectorized_us(problem, c, gpu), default=None)
    return best or Config(threads=256, unroll=1)


NAIVE = Implementation(
    entry="nvfp4_dequantize",
    language="cute",
    variant="naive",
    summary="a thread a block of scales, value by value",
    archs=ARCHS,
    space={},
    illegal=lambda config, problem, gpu: None,
    default=lambda problem, gpu: Config(),
    program=_naive,
    estimate=_naive_us,
    rank=0,
)

VECTORIZED = Implementation(
    entry="nvfp4_dequantize",
    language="cute",
    variant="vectorized",
    summary="eight values a thread and turn, 16-byte stores",
    archs=ARCHS,
    space={"threads": (256,), "unroll": (1, 2, 4, 8)},
    illegal=_vectorized_reject,
    default=_vectorized_default,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={"vector store": "STG.E.128"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, VECTORIZED)
