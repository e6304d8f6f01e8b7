"""`fp8_quantize` in CUDA C++: a warp for each block of scales; one pass with 16-byte loads."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import why_no_grid
from kernelcat.kernels.cuda.common.quantizer import launch, launch_naive, naive
from kernelcat.runtime.gpu import Gpu

BLOCK = 128
"""Columns of a block of scales, and its rows where blocks are square."""
NUM_WARPS = 8
ROW_STEP = 16
"""Rows that a thread block of `vectorized` reads at once."""

SPACE = {"unroll": (1, 2, 4, 8)}
"""unroll : vectors of 16 bytes that a thread has in flight"""


def _block_rows(problem: Problem) -> int:
    return 1 if problem["block"] == "1x128" else BLOCK


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, k, rows = problem["M"], problem["K"], _block_rows(problem)
    return launch_naive(problem, (m, k), rows, num_scales=ceil(m / rows) * ceil(k / BLOCK))


def _rows(config: Config) -> int:
    """Rows that a thread block quantizes."""
    return int(ROW_STEP * config["unroll"])


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / _rows(config)) * ceil(problem["K"] / BLOCK)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return launch(
        problem,
        "vectorized",
        (problem["M"], problem["K"]),
        _block_rows(problem),
        config["unroll"],
        num_blocks=_num_blocks(problem, config),
        num_warps=NUM_WARPS,
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["block"] == "128x128" and _rows(config) != BLOCK:
        return (
            f"a thread block quantizes {_rows(config)} rows, not the {BLOCK} of a block of scales"
        )
    return why_no_grid(_num_blocks(problem, config))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, m = _rows(config), problem["M"]
    if problem["block"] == "1x128" and rows > ROW_STEP and rows >= 2 * m:
        return f"{rows} rows for each thread block are mostly empty at M={m}"
    return None


def _bytes_moved(problem: Problem) -> int:
    return 3 * int(problem["M"] * problem["K"])


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, i.e. thread blocks of an SM times ``unroll``."""
    in_flight = min(_num_blocks(problem, config) / gpu.sms, 6) * config["unroll"]
    return copy_us(_bytes_moved(problem), gpu, 0.9 * min(1.0, 0.4 + in_flight / 40))


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The most vectors for each thread that leave two thread blocks for every SM."""
    configs = list(VECTORIZED.configs(problem, gpu)) or [Config(unroll=1)]
    busy = [c for c in configs if _num_blocks(problem, c) >= 2 * gpu.sms]
    return busy[-1] if busy else configs[0]


VECTORIZED = Implementation(
    entry="fp8_quantize",
    language="cuda",
    variant="vectorized",
    summary="one pass with 16-byte loads; maxima by shuffles that divide the rows among lanes",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    default=_default,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={
        "16-byte loads": "LDG*128",
        "8-byte stores": "STG*64",
        "warp shuffle": "SHFL",
    },
    rank=1,
)

IMPLEMENTATIONS = (naive("fp8_quantize", _naive, _bytes_moved), VECTORIZED)
