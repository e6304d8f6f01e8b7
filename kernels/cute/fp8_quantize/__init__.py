"""`fp8_quantize` in CuTe DSL: warp by warp, and in vectors that stay in registers.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.runtime.gpu import Gpu

BLOCK = 128
VECTOR = 8
"""Elements of x in 16 bytes."""

SQUARE_TILE = 128 * 128 // VECTOR
"""Vectors of a 128 x 128 block: one CTA holds them all."""

TENSORS = (Pointer("x"), Pointer("q"), Pointer("scale"))


def _square(problem: Problem) -> bool:
    return bool(problem["block"] == "128x128")


def _nothing(problem: Problem) -> bool:
    return problem["M"] * problem["K"] == 0


def _moved(problem: Problem) -> int:
    return 3 * problem["M"] * problem["K"]


def _params(problem: Problem, words: str) -> tuple[str, ...]:
    return ("*" + problem["dtype"], words, "*float32", "int32", "int32")


def _step(source: CuteSource, grid: tuple[int, int, int], problem: Problem, block: int) -> Program:
    sizes = (Int32(problem["M"]), Int32(problem["K"]))
    return Program((Step(source, grid, (*TENSORS, *sizes), block=block),))


# naive ------------------------------------------------------------------------------------------


def _naive_blocks(problem: Problem) -> int:
    rows = BLOCK if _square(problem) else 1
    return ceil(problem["M"] / rows) * ceil(problem["K"] / BLOCK)


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _nothing(problem):
        return Program(())
    constants = (("dtype", problem["dtype"]), ("block_rows", BLOCK if _square(problem) else 1))
    source = CuteSource("fp8_quantize.naive:Naive", _params(problem, "*uint8"), constants)
    return _step(source, (ceil(_naive_blocks(problem) / 4), 1, 1), problem, block=128)


def _naive_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _naive_blocks(problem) >= 1 << 31:
        return "more blocks than 32-bit indices reach"
    return None


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(_moved(problem), gpu, 0.1 if _square(problem) else 0.3)


# vectorized -------------------------------------------------------------------------------------


def _tiles(problem: Problem, config: Config) -> int:
    """CTAs: tiles of 128 columns and as many rows as the threads hold."""
    block_m = config["threads"] * VECTOR // BLOCK * config["unroll"]
    return ceil(problem["K"] / BLOCK) * ceil(problem["M"] / block_m)


def _vectorized_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] % VECTOR:
        return f"K={problem['K']} must be a multiple of 8: rows are read 16 bytes at a time"
    if _square(problem):
        if config["threads"] * config["unroll"] != SQUARE_TILE:
            return "a CTA holds a block of 128 x 128: threads x unroll must be 2048"
    elif config["threads"] != 256:
        return "blocks of one row need no more than 256 threads a CTA"
    if _tiles(problem, config) >= 1 << 31:
        return "more tiles than 32-bit indices reach"
    return None


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _nothing(problem):
        return Program(())
    constants = (("dtype", problem["dtype"]), ("square", _square(problem)), *config.items())
    kinds = _params(problem, "*uint32")
    source = CuteSource("fp8_quantize.vectorized:Vectorized", kinds, constants)
    return _step(source, (_tiles(problem, config), 1, 1), problem, block=config["threads"])


def _vectorized_default(problem: Problem, gpu: Gpu) -> Config:
    if _square(problem):
        return Config(threads=512, unroll=4)
    return Config(threads=256, unroll=2 if _moved(problem) > 1 << 23 else 1)


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    efficiency = {1: 0.80, 2: 0.84, 4: 0.83, 8: 0.80}[config["unroll"]]
    return copy_us(_moved(problem), gpu, efficiency)


IMPLEMENTATIONS = (
    Implementation(
        entry="fp8_quantize",
        language="cute",
        variant="naive",
        summary="one warp, one block, read twice; any shape",
        archs=("sm_89+",),
        space={},
        illegal=_naive_reject,
        default=lambda problem, gpu: Config(),
        program=_naive_program,
        estimate=_naive_estimate,
        techniques={"fp8 conversion": "F2FP.SATFINITE.E4M3"},
        rank=0,
    ),
    Implementation(
        entry="fp8_quantize",
        language="cute",
        variant="vectorized",
        summary="vectors of 16 bytes, read once and kept in registers",
        archs=("sm_89+",),
        space={"threads": (256, 512, 1024), "unroll": (1, 2, 4, 8)},
        illegal=_vectorized_reject,
        default=_vectorized_default,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG.E.128", "fp8 conversion": "F2FP.SATFINITE.E4M3"},
        rank=1,
    ),
)
