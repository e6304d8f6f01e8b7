"""What the Blackwell variants of `moe_gemm` share on the host: launches, limits, the cost model."""

from __future__ import annotations

from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.cost_model import (
    L2_TO_DRAM,
    LAUNCH_US,
    TENSOR_EFFICIENCY,
    WAVE_LATENCY_US,
    copy_us,
)
from kernelcat.catalog.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.moe_gemm.weighted_sum import VECTOR, weighted_sum
from kernelcat.reference._assignments import active
from kernelcat.reference.moe_gemm import ENTRY, out_cols
from kernelcat.runtime.gpu import Gpu

BLOCK_N = 128
"""Rows of an expert's weights in a tile."""
SPACE = {"block_m": (128, 64, 32)}
"""block_m : rows of an expert in a tile"""
BLOCK_K = 128
"""Bytes of a row of a stage."""
CODES_BLOCK_K = 128
"""Codes of a row of 4-bit weights in a stage."""
MAX_TILES = 1 << 30

TENSORS = ("a", "a_scale", "w", "w_scale", "bias", "offsets", "order")


def num_rows(problem: Problem) -> int:
    """Rows that are grouped by expert, those of dropped assignments included."""
    return int(problem["tokens"] * problem["top_k"])


def _col_blocks(problem: Problem) -> int:
    return ceil(problem["N"] / BLOCK_N)


def max_tiles(problem: Problem, config: Config) -> int:
    """The most tiles that any offsets make."""
    rows = num_rows(problem)
    return (rows // config["block_m"] + min(problem["experts"], rows)) * _col_blocks(problem)


def _num_tiles(problem: Problem, config: Config) -> float:
    """Tiles, estimated: on average half of an expert's last block of rows is empty."""
    experts = active(problem)
    blocks = max(num_rows(problem) / config["block_m"] + experts / 2, experts)
    return blocks * _col_blocks(problem)


def illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why no Blackwell variant serves the problem, whatever its types."""
    if problem["combine"] and problem["activation"] != "none":
        return (
            f"activation={problem['activation']} with combine: rows that are summed into tokens "
            "are stored without an activation; use `naive`"
        )
    if problem["experts"] * problem["N"] >= 1 << 31 or max_tiles(problem, config) > MAX_TILES:
        return (
            f"{problem['experts']} x {problem['N']} rows of weights and {num_rows(problem)} rows "
            "of A are more than 32-bit indices reach; use `naive`"
        )
    return None


def unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why blocks of so many rows are not worth a try."""
    block_m, rows = config["block_m"], num_rows(problem) / max(active(problem), 1)
    if block_m > 32 and block_m >= 4 * rows:
        return f"blocks of {block_m} rows are mostly empty at {rows:.3g} rows an expert"
    if block_m < 128 and rows > 4 * block_m:
        return f"blocks of {block_m} rows read weights too often at {rows:.3g} rows an expert"
    return None


def program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    """The grouped product; with ``combine`` into partial rows, which a second kernel adds up."""
    cols = int(out_cols(problem.values))
    d_rows = problem["tokens"] if problem["combine"] else num_rows(problem)
    if d_rows * cols == 0:
        return Program(())
    pitch = ceil(cols / VECTOR) * VECTOR if problem["combine"] else cols
    product = _product(problem, config, gpu, pitch)
    if not problem["combine"]:
        return Program((product,))
    dtype = problem["dtype"]
    sums = weighted_sum(problem, "partial", "d", dtype, cols)
    row_bytes = dtypes.itemsize(dtype) * num_rows(problem) * pitch
    return Program((product, sums), {"partial": row_bytes})


def _product(problem: Problem, config: Config, gpu: Gpu, pitch: int) -> Step:
    dtype, format, combine = problem["dtype"], problem["format"], problem["combine"]
    is_packed = format == "mxfp4"
    constants = {
        "dtype": dtype,
        "format": format,
        "activation": problem["activation"],
        "bias": problem["bias"],
        "gather": problem["gather"],
        "clear": not combine,
        "is_even": pitch % 2 == 0,
        "experts": problem["experts"],
        "k_tail": problem["K"] % CODES_BLOCK_K if is_packed else 0,
        "block_m": config["block_m"],
    }
    operands = {
        "mxfp4": ("*float8_e4m3fn", "*uint8", "*uint8"),
        "fp8": ("*float8_e4m3fn", "*float8_e4m3fn", "*float32"),
    }
    a, w, w_scale = operands.get(format, (f"*{dtype}", f"*{dtype}", "*float32"))
    wide = f"*{dtype}"
    kinds = (a, "*float32", w, w_scale, wide, "*int32", "*int32", wide, *("int32",) * 7)
    source = CuteSource("moe_gemm.blackwell.product:Product", kinds, tuple(constants.items()))
    a_rows = problem["tokens"] if problem["gather"] else num_rows(problem)
    num_ctas = min(max_tiles(problem, config), gpu.sms)
    sizes = (
        num_rows(problem), a_rows, problem["top_k"], problem["N"], problem["K"], pitch, num_ctas
    )  # fmt: skip
    params = (
        *map(Pointer, TENSORS),
        Pointer("partial" if combine else "d"),
        *map(Int32, sizes),
    )
    block = 384 if config["block_m"] == 128 else 256
    return Step(source, (num_ctas, 1, 1), params, block=block, programmatic=True)


# ---- the cost model ----------------------------------------------------------------------------

_READ_CYCLES = {"mxfp4": 1.25, "fp8": 2.25}
"""Instructions by which a thread scales and adds a product, counted in the machine code."""
_BLOCK_CYCLES = 120
"""Cycles of barriers and latencies of a k-block that is promoted, a guess."""
_CLOCK = 1.85e9


def estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles, each at the pace of its products, promotion or operands; or the memory."""
    block_m, act_dtype = config["block_m"], problem["act_dtype"]
    size, format = dtypes.itemsize(act_dtype), problem["format"]
    num_k_blocks = ceil(problem["K"] * size / BLOCK_K)
    peak = gpu.flops.get(act_dtype, gpu.flops["bfloat16"]) / gpu.sms * TENSOR_EFFICIENCY
    math_us = 2 * BLOCK_N * block_m * (BLOCK_K // size) / peak * 1e6
    w_bytes = BLOCK_N * BLOCK_K // (2 if format == "mxfp4" else 1)
    load_us = (w_bytes + block_m * BLOCK_K) / (gpu.bandwidth * L2_TO_DRAM) * gpu.sms * 1e6
    read_us = 0.0
    if format in _READ_CYCLES:
        read_us = (_BLOCK_CYCLES + _READ_CYCLES[format] * block_m) / _CLOCK * 1e6
    waves = max(_num_tiles(problem, config) / gpu.sms, 1.0)
    tile_us = num_k_blocks * max(math_us, load_us, read_us) + WAVE_LATENCY_US * block_m / 128
    us = max(waves * tile_us, copy_us(ENTRY.bytes_moved(problem), gpu)) + LAUNCH_US
    if not problem["combine"]:
        return us
    return us + copy_us(2 * num_rows(problem) * out_cols(problem.values), gpu) - LAUNCH_US / 2
