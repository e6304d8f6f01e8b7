"""`rms_norm` in Triton: naive (one row a program), tiled (several rows a program, few warps).

One kernel: a row stays in registers from its loads to the stored result.
"""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference.rms_norm import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.rms_norm.device:rms_norm"
ARCHS = ("sm_80+",)
MAX_N = 1 << 16
"""The longest row of one program: Triton's limit is higher, but registers are too few."""
MAX_PER_THREAD = 64
"""Elements that a thread of `tiled` holds at most: more fill the registers."""
RESULTS = {"same": ("y", "scale"), "fp8": ("q", "scale"), "nvfp4": ("codes", "block_scale")}
"""The result and the scales of each format; without scales the pointer is null."""


REDUCTION_US, WARP_US, ELEMENT_US = 0.08, 0.005, 0.002
"""What a reduction over a row takes, each of its warps, and each element of a thread."""


def _padded_row(problem: Problem) -> int:
    """Columns of a program: a power of two, at least a block of float8."""
    return max(128, next_power_of_two(problem["N"]))


def _program(problem: Problem, rows: int, warps: int) -> Program:
    m, n, dtype, out_format = (problem[axis] for axis in ("M", "N", "dtype", "out_format"))
    if m == 0 or n == 0:
        return Program(())
    out, scale = RESULTS[out_format]
    out_type = {"same": dtype, "fp8": "float8_e4m3fn", "nvfp4": "uint8"}[out_format]
    arguments = {
        "x": triton.pointer("x", dtype),
        "weight": triton.pointer("weight", dtype),
        "global_scale": triton.pointer("global_scale", "float32"),
        "out": triton.pointer(out, out_type),
        "scale": triton.pointer(scale, "uint8" if out_format == "nvfp4" else "float32"),
        "residual": triton.pointer("residual", dtype),
        "M": triton.integer(m, divisor=1),
        "N": triton.integer(n),
        "eps": triton.real(problem["eps"]),
    }
    constants = {
        "OUT_FORMAT": out_format,
        "RESIDUAL": problem["residual"],
        "ROWS": rows,
        "COLS": _padded_row(problem),
    }
    step = triton.step(KERNEL, (ceil(m / rows), 1, 1), arguments, constants, num_warps=warps)
    return Program((step,))


def _naive_warps(problem: Problem) -> int:
    """Warps whose threads have 32 elements each, where that are no more than 32 warps."""
    return min(32, ceil(_padded_row(problem) / 1024))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, 1, _naive_warps(problem))


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], config["warps"])


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["N"] > MAX_N:
        return f"N={problem['N']} is more than the {MAX_N} elements of a row that a program holds"
    return illegal_float8(gpu) if problem["out_format"] == "fp8" else None


def _per_thread(config: Config, problem: Problem) -> int:
    """Elements of a thread."""
    return int(config["rows"] * _padded_row(problem) // (32 * config["warps"]))


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    per_thread = _per_thread(config, problem)
    if per_thread > MAX_PER_THREAD:
        return f"{per_thread} elements a thread are more than {MAX_PER_THREAD}: use more warps"
    return _illegal_naive(config, problem, gpu)


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, per_thread = config["rows"], _per_thread(config, problem)
    if per_thread < 8:
        return f"{per_thread} elements a thread: fewer than one load of 16 bytes"
    if rows > 1 and rows * gpu.sms > problem["M"]:
        return f"M={problem['M']} are fewer than {rows} rows for each of {gpu.sms} SMs"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, and for each round of resident programs the sums, which nothing hides.

    A row's float8 or FP4 scale is a second reduction. Registers limit how many programs an SM
    holds. A program begins only when the kernel before it has ended.
    """
    rows, warps = config.get("rows", 1), config.get("warps", _naive_warps(problem))
    per_thread = rows * _padded_row(problem) / (32 * warps)
    programs = max(1, ceil(problem["M"] / rows))
    registers = 32 + per_thread * (2 + problem["residual"])
    resident = max(1, min(64 // warps, 65536 // int(32 * warps * registers)))
    reductions = 1 if problem["out_format"] == "same" else 2
    sum_us = REDUCTION_US * reductions + WARP_US * warps + ELEMENT_US * per_thread
    us = cost_model.stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=programs, rounds=programs / (gpu.sms * resident),
        waits_us=sum_us,
    )  # fmt: skip
    return us + cost_model.DEPENDENT_US


NAIVE = Implementation(
    entry="rms_norm",
    language="triton",
    variant="naive",
    summary="one row a program",
    archs=ARCHS,
    space={},
    illegal=_illegal_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TILED = Implementation(
    entry="rms_norm",
    language="triton",
    variant="tiled",
    summary="whole rows in registers, several a program where they are short; 16-byte loads",
    archs=ARCHS,
    space={"rows": (1, 2, 4), "warps": (1, 2, 4, 8, 16, 32)},
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"16-byte loads": "LDG*128"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
