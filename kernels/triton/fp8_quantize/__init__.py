"""`fp8_quantize` in Triton: naive (one block of scales a program), tiled (many rows a program).

One kernel: a maximum over registers, two correctly rounded divisions, one conversion.
"""

from math import ceil

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.fp8_quantize.quantizer import ARCHS, TECHNIQUES, launch, launch_us
from kernelcat.reference.fp8_quantize import BLOCK, block_rows
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.fp8_quantize.device:quantize"


def _program(problem: Problem, rows: int, warps: int) -> Program:
    constants = {"BLOCK_ROWS": block_rows(problem.values), "ROWS": rows}
    return launch(KERNEL, problem, "K", constants, rows=rows, width=BLOCK, warps=warps)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, block_rows(problem.values), config["warps"])


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], config["warps"])


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, per_thread = config["rows"], config["rows"] * BLOCK // (32 * config["warps"])
    if not 8 <= per_thread <= 64:
        return f"{per_thread} elements a thread: 8 fill one load, more than 64 the registers"
    if problem["block"] == "128x128" and rows != 128:
        return "blocks of 128 rows take programs of 128 rows"
    if problem["block"] == "1x128" and rows == 128:
        return "128 rows a program only serve blocks of 128 rows"
    if rows > 4 and rows >= 2 * problem["M"]:
        return f"programs of {rows} rows are at least half empty for M={problem['M']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows = config.get("rows", block_rows(problem.values))
    programs = ceil(problem["M"] / rows) * ceil(problem["K"] / BLOCK)
    per_thread = rows * BLOCK / (32 * config["warps"])
    return launch_us(3 * problem["M"] * problem["K"], programs, per_thread / 32, gpu)


def _default_naive(problem: Problem, gpu: Gpu) -> Config:
    return Config(warps=4)


def _default_tiled(problem: Problem, gpu: Gpu) -> Config:
    """16 to 32 elements a thread; fewer rows where they would not give every SM four programs."""
    if problem["block"] == "128x128":
        return Config(rows=128, warps=16)
    k_blocks = max(1, ceil(problem["K"] / BLOCK))
    for rows in (32, 16, 8):
        if ceil(problem["M"] / rows) * k_blocks >= 4 * gpu.sms:
            return Config(rows=rows, warps=max(2, rows // 8))
    return Config(rows=4, warps=2)


NAIVE = Implementation(
    entry="fp8_quantize",
    language="triton",
    variant="naive",
    summary="the elements of one scale a program",
    archs=ARCHS,
    space={"warps": (4,)},
    illegal=lambda config, problem, gpu: None,
    default=_default_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TILED = Implementation(
    entry="fp8_quantize",
    language="triton",
    variant="tiled",
    summary="many rows a program, 16-byte loads, whole lines of scales; in registers throughout",
    archs=ARCHS,
    space={"rows": (4, 8, 16, 32, 64, 128), "warps": (2, 4, 8, 16)},
    illegal=_reject_tiled,
    default=_default_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques=TECHNIQUES,
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
