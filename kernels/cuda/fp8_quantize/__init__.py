"""`fp8_quantize` in CUDA C++: a warp a block of scales, and one pass with 16-byte loads."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.fp8_quantize.quantizer import MAX_GRID, launch, launch_naive, naive
from kernelcat.runtime.gpu import Gpu

BLOCK = 128
NUM_WARPS = 8
ROW_STEP = 16
"""Rows that a thread block of `vectorized` reads at once."""

SPACE = {"unroll": (1, 2, 4, 8)}
"""Vectors of 16 bytes that a thread has in flight."""


def _block_rows(problem: Problem) -> int:
    return 1 if problem["block"] == "1x128" else BLOCK


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, k, rows = problem["M"], problem["K"], _block_rows(problem)
    return launch_naive(problem, (m, k), rows, num_scales=ceil(m / rows) * ceil(k / BLOCK))


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / (ROW_STEP * config["unroll"])) * ceil(problem["K"] / BLOCK)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return launch(
        problem,
        "vectorized",
        (problem["M"], problem["K"]),
        _block_rows(problem),
        config["unroll"],
        blocks=_num_blocks(problem, config),
        num_warps=NUM_WARPS,
    )


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows = ROW_STEP * config["unroll"]
    if _num_blocks(problem, config) > MAX_GRID:
        return f"the grid would have more than {MAX_GRID} blocks"
    if problem["block"] == "128x128":
        return None if rows == BLOCK else f"{rows} rows at a time are no block of scales"
    if rows > ROW_STEP and rows >= 2 * problem["M"]:
        return f"{rows} rows at a time are mostly empty at M={problem['M']}"
    return None


def _bytes_moved(problem: Problem) -> int:
    return 3 * int(problem["M"] * problem["K"])


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, which many blocks give as well as large ones."""
    in_flight = min(_num_blocks(problem, config) / gpu.sms, 6) * config["unroll"]
    return copy_us(_bytes_moved(problem), gpu, 0.9 * min(1.0, 0.4 + in_flight / 40))


def _default_vectorized(problem: Problem, gpu: Gpu) -> Config:
    """As many vectors as leave two thread blocks an SM."""
    if problem["block"] == "128x128":
        return Config(unroll=8)
    serving = [Config(unroll=unroll) for unroll in SPACE["unroll"]]
    serving = [c for c in serving if _reject_vectorized(c, problem, gpu) is None]
    busy = [c for c in serving if _num_blocks(problem, c) >= 2 * gpu.sms]
    return busy[-1] if busy else Config(unroll=1)


IMPLEMENTATIONS = (
    naive("fp8_quantize", _naive, _bytes_moved),
    Implementation(
        entry="fp8_quantize",
        language="cuda",
        variant="vectorized",
        summary="one pass with 16-byte loads; maxima by shuffles that split the rows",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_reject_vectorized,
        default=_default_vectorized,
        program=_vectorized,
        estimate=_vectorized_us,
        techniques={
            "16-byte loads": "LDG*128",
            "8-byte stores": "STG*64",
            "warp shuffle": "SHFL",
        },
        rank=1,
    ),
)
