"""`nvfp4_quantize` in CUDA C++: a thread for each block of scales; 16 elements for each thread."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import stream_us
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
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance, why_no_grid
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_quantize import ENTRY
from kernelcat.runtime.gpu import Gpu

VECTOR = 16
"""Elements that a thread quantizes at a time: 32 bytes."""
TILE_ROWS, PART_ROWS = 128, 32
"""Rows of a tile of swizzled scales, and those of them that one thread block quantizes."""
NAIVE_THREADS = 128
MAX_ROW_UNROLL = 4
"""Vectors of a row that a thread of `rms_norm` holds at most."""
MAX_PADDING_BLOCKS = 128
"""Thread blocks that clear the padding of swizzled scales."""

ARRAYS = ("x", "global_scale", "weight", "signs", "seed", "q", "scale")
SPACE = {"threads": (128, 256, 512), "unroll": (1, 2, 4, 8)}
"""unroll : vectors that a thread quantizes; of swizzled scales rows that a warp has in flight"""


def _is_swizzled(problem: Problem) -> bool:
    return bool(problem["scale_layout"] == "swizzled")


def _is_empty(problem: Problem) -> bool:
    return bool(problem["M"] * problem["K"] == 0)


# ---- naive -------------------------------------------------------------------------------------


def _launch(
    problem: Problem,
    kernel: str,
    constants: tuple[int | bool, ...],
    *more_params: Param,
    num_blocks: int,
    threads: int,
) -> Program:
    """A launch; x's type, the format and then ``constants`` are the kernel's template arguments."""
    source = instance(
        f"nvfp4_quantize/{kernel}.cu",
        f"nvfp4_quantize_{kernel}",
        *(problem["dtype"], problem["format"] == "nvfp4", *constants),
    )
    params = (*map(Pointer, ARRAYS), Int32(problem["M"]), Int32(problem["K"]), *more_params)
    return Program((Step(source, (num_blocks, 1, 1), params, threads),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    options = (problem[option] for option in ("rms_norm", "hadamard", "stochastic"))
    return _launch(
        problem,
        "naive",
        (_is_swizzled(problem), *options),
        Float32(problem["eps"]),
        num_blocks=min(ceil(problem["M"] / (NAIVE_THREADS // 32)), MAX_BLOCKS),
        threads=NAIVE_THREADS,
    )


# ---- vectorized: three kernels -----------------------------------------------------------------


def _row_unroll(problem: Problem, threads: int) -> int:
    """The power of two of vectors for each thread that hold a row."""
    return 1 << (ceil(problem["K"] / (VECTOR * threads)) - 1).bit_length()


def _main_blocks(problem: Problem, config: Config) -> int:
    """Thread blocks that quantize."""
    if problem["rms_norm"]:
        return int(problem["M"])
    if _is_swizzled(problem):
        parts = ceil(problem["M"] / TILE_ROWS) * (TILE_ROWS // PART_ROWS)
        return parts * ceil(problem["K"] / (VECTOR * 32))
    return ceil(problem["M"] * problem["K"] / (VECTOR * config["threads"] * config["unroll"]))


def _padding_blocks(problem: Problem, threads: int) -> int:
    """Thread blocks of `rms_norm` that clear the padding of swizzled scales."""
    if not _is_swizzled(problem):
        return 0
    m, cols = problem["M"], problem["K"] // block_of(problem.values)
    num_scales = -m % 128 * (cols + -cols % 4) + m * (-cols % 4)
    return min(ceil(num_scales / threads), MAX_PADDING_BLOCKS)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    threads, num_blocks = config["threads"], _main_blocks(problem, config)
    options = (problem["hadamard"], problem["stochastic"])
    if problem["rms_norm"]:
        fills_warps = problem["K"] % (VECTOR * 32) == 0
        return _launch(
            problem,
            "rms_norm",
            (_is_swizzled(problem), *options, threads, _row_unroll(problem, threads), fills_warps),
            Float32(problem["eps"]),
            num_blocks=num_blocks + _padding_blocks(problem, threads),
            threads=threads,
        )
    kernel = "swizzled" if _is_swizzled(problem) else "vectorized"
    constants = (*options, threads, config["unroll"])
    return _launch(problem, kernel, constants, num_blocks=num_blocks, threads=threads)


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads = config["threads"]
    if problem["rms_norm"]:
        if _row_unroll(problem, threads) > MAX_ROW_UNROLL:
            longest = VECTOR * threads * MAX_ROW_UNROLL
            return f"{threads} threads hold a row in registers: K at most {longest}"
    elif _is_swizzled(problem) and threads // 32 * config["unroll"] > PART_ROWS:
        return (
            f"{threads // 32} warps with {config['unroll']} rows each have more than the "
            f"{PART_ROWS} rows of a thread block"
        )
    return why_no_grid(_main_blocks(problem, config) + MAX_PADDING_BLOCKS)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, unroll = config["threads"], config["unroll"]
    if problem["rms_norm"]:
        if unroll != _row_unroll(problem, threads):
            return f"a row fixes how much is unrolled: the same as {_row_unroll(problem, threads)}"
    elif not _is_swizzled(problem):
        block_size, size = VECTOR * threads * unroll, problem["M"] * problem["K"]
        if unroll > 1 and block_size >= 2 * size:
            return f"a thread block quantizes {block_size} elements, and there are {size}"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_INSTRUCTIONS, _RMS_INSTRUCTIONS, _ROUNDING_INSTRUCTIONS = 19.5, 25, 5
"""Instructions of a thread for an element; with RMSNorm; those of random rounding in addition."""
_NAIVE_INSTRUCTIONS = {"nvfp4": 37.5, "mxfp4": 71}
"""Instructions of a thread of the baseline for an element: it has a block of 16 elements, or 32."""
_ROUND_US, _WARP_US = 0.02, 0.03
"""What a round of resident thread blocks waits for; a warp at the barriers of a row's sum."""


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory or instructions, and the sums of whole rows, which nothing hides.

    Registers limit the resident threads.
    """
    threads, blocks = config["threads"], _main_blocks(problem, config)
    is_linear = not (problem["rms_norm"] or _is_swizzled(problem))
    ahead = min(config["unroll"], 2 if is_linear else 4)
    resident = max(1, min(2048, 65536 // (40 + VECTOR * ahead)) // threads)
    per_element = _RMS_INSTRUCTIONS if problem["rms_norm"] else _INSTRUCTIONS
    per_element += _ROUNDING_INSTRUCTIONS * problem["stochastic"]
    waits_us = _ROUND_US + 1e-5 * threads
    us = stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=blocks, rounds=blocks / (gpu.sms * resident),
        instructions=per_element * problem["M"] * problem["K"], waits_us=waits_us,
    )  # fmt: skip
    return us + (_WARP_US * threads / 32 if problem["rms_norm"] else 0.0)


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    elements = problem["M"] * problem["K"]
    blocks = ceil(problem["M"] * 32 / NAIVE_THREADS)
    per_element = _NAIVE_INSTRUCTIONS[problem["format"]] * (1.5 if problem["stochastic"] else 1.0)
    return stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=blocks, instructions=per_element * elements
    )


VECTORIZED = Implementation(
    entry="nvfp4_quantize",
    language="cuda",
    variant="vectorized",
    summary="one pass with 16-byte loads; for RMSNorm a row stays in registers",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={"16-byte loads": "LDG*128"},
    rank=1,
)

NAIVE = baseline(
    "nvfp4_quantize",
    "a warp for each row, a thread for each block of scales, element by element",
    _naive,
    _naive_us,
)

IMPLEMENTATIONS = (NAIVE, VECTORIZED)
