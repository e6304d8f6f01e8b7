"""`rms_norm` in CUDA C++: naive (a warp for each row), registers (one pass, a row in registers)."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, stream_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline, element_by_element_us
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance, why_no_grid
from kernelcat.reference.rms_norm import ENTRY
from kernelcat.runtime.gpu import Gpu

VECTOR = 8
"""Elements that a thread loads at a time: 16 bytes."""
NAIVE_THREADS = 128
MAX_UNROLL = 8
"""Vectors of a row that a thread holds at most."""
MAX_THREADS = 1024
SM_REGISTERS = 65536
OUT_FORMATS = {
    "same": ("OutFormat::kSame", "y", "scale"),
    "fp8": ("OutFormat::kFp8", "q", "scale"),
    "nvfp4": ("OutFormat::kNvfp4", "codes", "block_scale"),
}
"""The format's name in C++, its result and its scales; without scales the pointer is null."""

SPACE = {"threads": (32, 64, 128, 256, 512, 1024), "rows": (1, 2, 4)}
"""threads : threads of a row; rows : rows of a thread block"""


def _launch(
    problem: Problem,
    kernel: str,
    *constants: int | bool,
    num_blocks: int,
    threads: int,
    programmatic: bool = False,
) -> Program:
    """A launch; ``constants`` follow type, format and residual among the template arguments."""
    if problem["M"] * problem["N"] == 0:
        return Program(())
    format_name, out, scale = OUT_FORMATS[problem["out_format"]]
    source = instance(
        f"rms_norm/{kernel}.cu",
        f"rms_norm_{kernel}",
        *(problem["dtype"], format_name, problem["residual"], *constants),
    )
    arrays = ("x", "weight", "global_scale", out, scale, "residual")
    sizes = (Int32(problem["M"]), Int32(problem["N"]), Float32(problem["eps"]))
    params = (*map(Pointer, arrays), *sizes)
    return Program((Step(source, (num_blocks, 1, 1), params, threads, programmatic=programmatic),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks = min(ceil(problem["M"] / (NAIVE_THREADS // 32)), MAX_BLOCKS)
    return _launch(problem, "naive", num_blocks=num_blocks, threads=NAIVE_THREADS)


def _unroll(problem: Problem, config: Config) -> int:
    """The power of two of vectors for each thread that hold a row."""
    return 1 << max(0, ceil(problem["N"] / (VECTOR * config["threads"])) - 1).bit_length()


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / config["rows"])


def has_dependent_launch(gpu: Gpu) -> bool:
    """Whether kernels can begin before the kernel before them ends: from sm_90 on."""
    return int(gpu.arch.removeprefix("sm_").rstrip("af")) >= 90


def _registers(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads, rows, is_dependent = config["threads"], config["rows"], has_dependent_launch(gpu)
    return _launch(
        problem,
        "registers",
        *(threads, rows, _unroll(problem, config), is_dependent),
        num_blocks=_num_blocks(problem, config),
        threads=threads * rows,
        programmatic=is_dependent,
    )


def _num_registers(problem: Problem, config: Config) -> int:
    """Registers of a thread: 4 for each vector of x, of the weight and of the residual, and 40."""
    return 40 + 4 * _unroll(problem, config) * (2 + problem["residual"])


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, rows = config["threads"], config["rows"]
    if threads * rows > MAX_THREADS:
        return f"{rows} rows of {threads} threads are more than the {MAX_THREADS} of a thread block"
    if _unroll(problem, config) > MAX_UNROLL:
        longest = VECTOR * threads * MAX_UNROLL
        return f"{threads} threads hold a row in registers: N at most {longest}"
    num_registers = threads * rows * _num_registers(problem, config)
    if num_registers > SM_REGISTERS:
        return f"{num_registers} registers are more than the {SM_REGISTERS} of an SM"
    return why_no_grid(_num_blocks(problem, config))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, rows = config["threads"], config["rows"]
    if threads > 32 and VECTOR * threads >= 2 * problem["N"]:
        return f"half of {threads} threads have no elements at N={problem['N']}"
    if rows > 1 and threads * rows > 256:
        return f"rows of {threads} threads fill a thread block without others"
    if rows > 1 and rows * gpu.sms > problem["M"]:
        return f"M={problem['M']} are fewer than {rows} rows for each of {gpu.sms} SMs"
    return None


_WARP_US = 0.01
"""What each warp of a thread block adds to the barrier of a row's sum."""


def _registers_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, and for each round of resident rows the barrier, which nothing hides.

    Registers limit how many thread blocks an SM holds. Threads without elements hold registers too.
    """
    threads, blocks = config["threads"] * config["rows"], max(_num_blocks(problem, config), 1)
    registers = SM_REGISTERS // (_num_registers(problem, config) * threads)
    resident = max(1, min(2048 // threads, registers))
    filled = problem["N"] / max(1, VECTOR * config["threads"] * _unroll(problem, config))
    return stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=blocks, rounds=blocks / (gpu.sms * resident),
        share=0.95 + 0.05 * filled, waits_us=_WARP_US * (threads / 32 + _unroll(problem, config)),
    )  # fmt: skip


REGISTERS = Implementation(
    entry="rms_norm",
    language="cuda",
    variant="registers",
    summary="one pass with 16-byte loads; a row stays in registers, several rows a thread block",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_registers,
    estimate=_registers_us,
    techniques={"16-byte loads": "LDG*128", "warp shuffle": "SHFL"},
    rank=1,
)

NAIVE = baseline(
    "rms_norm",
    "a warp for each row, element by element",
    _naive,
    lambda problem, config, gpu: (
        LAUNCH_US + 2 * element_by_element_us(ENTRY.bytes_moved)(problem, config, gpu)
    ),
)

IMPLEMENTATIONS = (NAIVE, REGISTERS)
