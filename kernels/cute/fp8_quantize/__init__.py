"""`fp8_quantize` in CuTe DSL: naive (a warp reads a block twice), vectorized (read once).

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.runtime.gpu import MB, Gpu

BLOCK = 128
VECTOR = 8
"""Elements of x in 16 bytes."""

SQUARE_VECTORS = BLOCK * BLOCK // VECTOR
"""Vectors of a 128 x 128 block: one thread block holds them all."""

LARGE = 8 * MB
"""Bytes moved from which two vectors a thread are better than one."""

TENSORS = (Pointer("x"), Pointer("q"), Pointer("scale"))


def _is_square(problem: Problem) -> bool:
    return bool(problem["block"] == "128x128")


def _bytes_moved(problem: Problem) -> int:
    """Bytes of x and of q; the scales are too few to matter."""
    return 3 * problem["M"] * problem["K"]


def _program(
    problem: Problem,
    kernel: str,
    codes: str,
    constants: tuple[tuple[str, int | str | bool], ...],
    num_ctas: int,
    threads: int,
) -> Program:
    """``codes`` is the kind of parameter by which q is written."""
    if problem["M"] * problem["K"] == 0:
        return Program(())
    kinds = ("*" + problem["dtype"], codes, "*float32", "int32", "int32")
    source = CuteSource(f"fp8_quantize.{kernel}", kinds, constants)
    sizes = (Int32(problem["M"]), Int32(problem["K"]))
    return Program((Step(source, (num_ctas, 1, 1), (*TENSORS, *sizes), block=threads),))


# naive ------------------------------------------------------------------------------------------


def _block_rows(problem: Problem) -> int:
    """Rows that share a scale."""
    return BLOCK if _is_square(problem) else 1


def _num_blocks(problem: Problem) -> int:
    """Blocks with a scale each; a warp computes one."""
    return ceil(problem["M"] / _block_rows(problem)) * ceil(problem["K"] / BLOCK)


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    constants = (("dtype", problem["dtype"]), ("block_rows", _block_rows(problem)))
    num_ctas = ceil(_num_blocks(problem) / 4)
    return _program(problem, "naive:Naive", "*uint8", constants, num_ctas, 128)


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_blocks(problem) >= 1 << 31:
        return f"{_num_blocks(problem)} blocks are more than 32-bit indices reach"
    return None


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(_bytes_moved(problem), gpu, 0.1 if _is_square(problem) else 0.3)


# vectorized -------------------------------------------------------------------------------------


def _num_tiles(problem: Problem, config: Config) -> int:
    """Tiles of 128 columns and as many rows as a thread block holds."""
    block_m = config["threads"] * VECTOR // BLOCK * config["unroll"]
    return ceil(problem["K"] / BLOCK) * ceil(problem["M"] / block_m)


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] % VECTOR:
        return f"K={problem['K']} must be a multiple of {VECTOR}: rows are read 16 bytes at a time"
    num_vectors = config["threads"] * config["unroll"]
    if _is_square(problem) and num_vectors != SQUARE_VECTORS:
        return f"threads x unroll must be {SQUARE_VECTORS}: a thread block holds a 128 x 128 block"
    if _num_tiles(problem, config) >= 1 << 31:
        return f"{_num_tiles(problem, config)} tiles are more than 32-bit indices reach"
    return None


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if not _is_square(problem) and config["threads"] != 256:
        return "more than 256 threads of a thread block gain nothing where a scale is of one row"
    return None


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    constants = (("dtype", problem["dtype"]), ("is_square", _is_square(problem)), *config.items())
    num_ctas, threads = _num_tiles(problem, config), config["threads"]
    return _program(problem, "vectorized:Vectorized", "*uint32", constants, num_ctas, threads)


def _vectorized_default(problem: Problem, gpu: Gpu) -> Config:
    if _is_square(problem):
        return Config(threads=512, unroll=4)
    return Config(threads=256, unroll=2 if _bytes_moved(problem) > LARGE else 1)


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    efficiency = {1: 0.80, 2: 0.84, 4: 0.83, 8: 0.80}[config["unroll"]]
    return copy_us(_bytes_moved(problem), gpu, efficiency)


IMPLEMENTATIONS = (
    Implementation(
        entry="fp8_quantize",
        language="cute",
        variant="naive",
        summary="a warp for each block, which it reads twice; any shape",
        archs=("sm_89+",),
        space={},
        illegal=_illegal_naive,
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
        illegal=_illegal_vectorized,
        unpromising=_unpromising_vectorized,
        default=_vectorized_default,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG.E.128", "fp8 conversion": "F2FP.SATFINITE.E4M3"},
        rank=1,
    ),
)
