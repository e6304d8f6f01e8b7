"""`nvfp4_quantize` in CUDA C++: a thread a block of scales, and one pass with 16-byte loads."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_quantize import ENTRY
from kernelcat.runtime.gpu import Gpu

MAX_GRID = 2**31 - 1
VECTOR = 16
TILE_ROWS, PART_ROWS = 128, 32
"""Of swizzled scales: of a tile, and of one in a thread block."""
NAIVE_THREADS = 128
NORM_UNROLL = 4
"""Vectors of a row that a thread of `rms_norm` holds at most."""

ENOUGH = 85e3
"""Bytes in flight an SM from which on memory is the limit."""

ARRAYS = ("x", "global_scale", "weight", "signs", "seed", "q", "scale")
SPACE = {"threads": (128, 256, 512), "unroll": (1, 2, 4, 8)}


def _is_swizzled(problem: Problem) -> bool:
    return bool(problem["scale_layout"] == "swizzled")


def _constants(problem: Problem, *flags: bool) -> list[str]:
    """x's type, the format, then ``flags``."""
    flags = (problem["format"] == "nvfp4", *flags)
    return [f"kernelcat::{problem['dtype']}", *(str(flag).lower() for flag in flags)]


def _launch(
    problem: Problem, kernel: str, constants: list[str], blocks: int, threads: int, *last: Param
) -> Program:
    name = f"kernelcat::nvfp4_quantize_{kernel}<{', '.join(constants)}>"
    source = CudaSource(f"nvfp4_quantize/{kernel}.cu", name)
    sizes = (Int32(problem["M"]), Int32(problem["K"]))
    params = (*map(Pointer, ARRAYS), *sizes, *last)
    return Program((Step(source, (blocks, 1, 1), params, threads),))


def _nothing(problem: Problem) -> bool:
    return problem["M"] * problem["K"] == 0


def _padding_blocks(problem: Problem, threads: int) -> int:
    """Thread blocks that clear the padding of swizzled scales."""
    if not _is_swizzled(problem):
        return 0
    m, cols = problem["M"], problem["K"] // block_of(problem.values)
    cells = -m % 128 * (cols + -cols % 4) + m * (-cols % 4)
    return min(ceil(cells / threads), 128)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _nothing(problem):
        return Program(())
    options = (problem[option] for option in ("rms_norm", "hadamard", "stochastic"))
    constants = _constants(problem, _is_swizzled(problem), *options)
    blocks = min(ceil(problem["M"] / (NAIVE_THREADS // 32)), MAX_GRID)
    eps = Float32(problem["eps"])
    return _launch(problem, "naive", constants, blocks, NAIVE_THREADS, eps)


def _row_unroll(problem: Problem, threads: int) -> int:
    """A power of two of vectors a thread that hold a row."""
    return 1 << (ceil(problem["K"] / (VECTOR * threads)) - 1).bit_length()


def _main_blocks(problem: Problem, config: Config) -> int:
    if problem["rms_norm"]:
        return int(problem["M"])
    if _is_swizzled(problem):
        parts = ceil(problem["M"] / TILE_ROWS) * (TILE_ROWS // PART_ROWS)
        return parts * ceil(problem["K"] / (VECTOR * 32))
    return ceil(problem["M"] * problem["K"] / (VECTOR * config["threads"] * config["unroll"]))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _nothing(problem):
        return Program(())
    threads, unroll, blocks = config["threads"], config["unroll"], _main_blocks(problem, config)
    options = (problem["hadamard"], problem["stochastic"])
    if problem["rms_norm"]:
        constants = [*_constants(problem, _is_swizzled(problem), *options), f"{threads}"]
        is_whole = problem["K"] % (VECTOR * 32) == 0
        constants += [f"{_row_unroll(problem, threads)}", str(is_whole).lower()]
        blocks += _padding_blocks(problem, threads)
        eps = Float32(problem["eps"])
        return _launch(problem, "rms_norm", constants, blocks, threads, eps)
    kernel = "swizzled" if _is_swizzled(problem) else "vectorized"
    constants = [*_constants(problem, *options), f"{threads}", f"{unroll}"]
    return _launch(problem, kernel, constants, blocks, threads)


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, unroll = config["threads"], config["unroll"]
    if _main_blocks(problem, config) + 128 > MAX_GRID:
        return f"the grid would have more than {MAX_GRID} blocks"
    if problem["rms_norm"]:
        if unroll > NORM_UNROLL or unroll != _row_unroll(problem, threads):
            longest = VECTOR * threads * NORM_UNROLL
            return f"a row of K={problem['K']} is in registers once, and K at most {longest}"
    elif _is_swizzled(problem):
        if threads // 32 * unroll > PART_ROWS:
            return f"a thread block has {PART_ROWS} rows"
    elif unroll > 1 and VECTOR * threads * unroll >= 2 * problem["M"] * problem["K"]:
        return f"{unroll} vectors a thread are mostly none"
    return None


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes that an SM has in flight, of as many threads as registers
    serve; options have instructions, of which some are once a thread."""
    threads, unroll = config["threads"], config["unroll"]
    is_linear = not (problem["rms_norm"] or _is_swizzled(problem))
    ahead = min(unroll, 2 if is_linear else 4)
    held = min(
        _main_blocks(problem, config) / gpu.sms * threads, 2048, 65536 / (40 + VECTOR * ahead)
    )
    in_flight = held * ahead * 2 * VECTOR
    slow = 0.95 - 0.4 / unroll if problem["stochastic"] else 0.85 if problem["rms_norm"] else 1.0
    share = 0.85 * slow * min(1.0, 0.7 + 0.3 * in_flight / ENOUGH)
    return copy_us(ENTRY.bytes_moved(problem), gpu, share) + 1e-3 * threads / 128


def _default_vectorized(problem: Problem, gpu: Gpu) -> Config:
    serving = VECTORIZED.configs(problem, gpu)
    best = min(serving, key=lambda c: _vectorized_us(problem, c, gpu), default=None)
    return best or Config(threads=256, unroll=1)


VECTORIZED = Implementation(
    entry="nvfp4_quantize",
    language="cuda",
    variant="vectorized",
    summary="one pass with 16-byte loads, 16 elements a thread; rows in registers for RMSNorm",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_reject_vectorized,
    default=_default_vectorized,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={"16-byte loads": "LDG*128"},
    rank=1,
)

IMPLEMENTATIONS = (
    Implementation(
        entry="nvfp4_quantize",
        language="cuda",
        variant="naive",
        summary="a warp a row, a thread a block of scales, element by element",
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
