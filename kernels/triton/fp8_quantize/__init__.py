"""`fp8_quantize` in Triton: naive (the elements of one scale a program), tiled (many rows).

One kernel: a maximum over registers, two correctly rounded divisions, one conversion.
"""

from math import ceil

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common.architectures import FLOAT8
from kernelcat.kernels.triton.common.quantizer import TECHNIQUES, launch, launch_us
from kernelcat.reference.fp8_quantize import BLOCK, block_rows
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.fp8_quantize.device:quantize"


def _program(problem: Problem, rows: int, warps: int) -> Program:
    constants = {"BLOCK_ROWS": block_rows(problem.values), "ROWS": rows}
    return launch(KERNEL, problem, "K", constants, rows=rows, cols=BLOCK, warps=warps)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, block_rows(problem.values), config["warps"])


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], config["warps"])


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["block"] == "128x128" and config["rows"] != 128:
        return (
            f"rows={config['rows']} must be 128 for blocks of 128 rows: one program scales a block"
        )
    return None


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, per_thread = config["rows"], config["rows"] * BLOCK // (32 * config["warps"])
    if not 8 <= per_thread <= 64:
        return f"{per_thread} elements a thread: 8 fill one load, more than 64 the registers"
    if problem["block"] == "1x128" and rows == 128:
        return "programs of 128 rows are for blocks of 128 rows"
    if rows > 4 and rows >= 2 * problem["M"]:
        return f"programs of {rows} rows are at least half empty for M={problem['M']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows = config.get("rows", block_rows(problem.values))
    num_programs = ceil(problem["M"] / rows) * ceil(problem["K"] / BLOCK)
    per_thread = rows * BLOCK / (32 * config["warps"])
    return launch_us(3 * problem["M"] * problem["K"], num_programs, per_thread / 32, gpu)


def _default_tiled(problem: Problem, gpu: Gpu) -> Config:
    """16 to 32 elements a thread, and rows so many that there are four programs for every SM."""
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
    archs=FLOAT8,
    space={"warps": (4,)},
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TILED = Implementation(
    entry="fp8_quantize",
    language="triton",
    variant="tiled",
    summary="many rows a program, 16-byte loads, whole lines of scales; in registers throughout",
    archs=FLOAT8,
    space={"rows": (4, 8, 16, 32, 64, 128), "warps": (2, 4, 8, 16)},
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    default=_default_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques=TECHNIQUES,
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
