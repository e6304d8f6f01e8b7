"""`fp8_swiglu` in CUDA C++: a warp for each block of scales; one pass with 16-byte loads."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import why_no_grid
from kernelcat.kernels.cuda.common.quantizer import launch, launch_naive, naive
from kernelcat.runtime.gpu import Gpu

BLOCK = 256
"""Columns of x whose results share a scale."""

SPACE = {"num_warps": (2, 4, 8), "unroll": (1, 2, 4, 8)}
"""unroll : rows that a warp has in flight, of which a thread loads 16 bytes each"""


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, n = problem["M"], problem["N"]
    return launch_naive(problem, (m, n), num_scales=m * ceil(n / BLOCK))


def _rows(config: Config) -> int:
    """Rows of a thread block."""
    return int(config["num_warps"] * config["unroll"])


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / _rows(config)) * ceil(problem["N"] / BLOCK)


def _fused(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_warps = config["num_warps"]
    return launch(
        problem,
        "fused",
        (problem["M"], problem["N"]),
        num_warps,
        config["unroll"],
        num_blocks=_num_blocks(problem, config),
        num_warps=num_warps,
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return why_no_grid(_num_blocks(problem, config))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _rows(config) > 2 and _rows(config) >= 2 * problem["M"]:
        return f"{_rows(config)} rows for each thread block are mostly empty at M={problem['M']}"
    return None


def _bytes_moved(problem: Problem) -> int:
    return int(problem["M"] * problem["N"]) * 5 // 2


NEXT_ROW_US = 0.06
"""Each row of a warp after its first: their maxima are found one after the other."""


def _fused_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, i.e. warps of an SM times ``unroll``."""
    warps = _num_blocks(problem, config) * config["num_warps"] / gpu.sms
    in_flight = min(warps, 48) * config["unroll"]
    us = copy_us(_bytes_moved(problem), gpu, 0.9 * min(1.0, 0.4 + in_flight / 320))
    return us + NEXT_ROW_US * (config["unroll"] - 1)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The most rows for each of four warps that leave 16 warps for every SM."""
    configs = [c for c in FUSED.configs(problem, gpu) if c["num_warps"] == 4]
    busy = [c for c in configs if _num_blocks(problem, c) >= 4 * gpu.sms]
    if busy:
        return busy[-1]
    return configs[0] if configs else Config(num_warps=2, unroll=1)


FUSED = Implementation(
    entry="fp8_swiglu",
    language="cuda",
    variant="fused",
    summary="one pass with 16-byte loads; a warp for each block of scales, its maximum by redux",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    default=_default,
    program=_fused,
    estimate=_fused_us,
    techniques={"16-byte loads": "LDG*128", "warp reduction": "*REDUX"},
    rank=1,
)

IMPLEMENTATIONS = (
    naive("fp8_swiglu", _naive, _bytes_moved, unverified="not yet run on a GPU"),
    FUSED,
)
