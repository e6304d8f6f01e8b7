"""`fp8_swiglu` in CUDA C++: a warp a block of scales, and one pass with 16-byte loads."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Int32, Param, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.model import LAUNCH_US, copy_us
from kernelcat.spec import Problem

BLOCK = 256
"""Columns of x whose results share a scale."""
NAIVE_WARPS = 8
MAX_GRID = 2**31 - 1

SPACE = {"num_warps": (2, 4, 8), "unroll": (1, 2, 4, 8)}
"""``unroll`` is how many rows a warp has in flight, 16 bytes a thread and row."""


def _step(
    problem: Problem, variant: str, arguments: str, *, blocks: int, num_warps: int
) -> Program:
    if blocks == 0:
        return Program(())
    kernel = f"kernelcat::fp8_swiglu_{variant}<kernelcat::{problem['dtype']}{arguments}>"
    params: tuple[Param, ...] = (
        *map(Pointer, ("x", "q", "scale")),
        *(Int32(problem[axis]) for axis in ("M", "N")),
    )
    source = CudaSource(f"fp8_swiglu/{variant}.cu", kernel)
    return Program((Step(source, (blocks, 1, 1), params, 32 * num_warps),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    scales = problem["M"] * ceil(problem["N"] / BLOCK)
    blocks = min(ceil(scales / NAIVE_WARPS), MAX_GRID)
    return _step(problem, "naive", "", blocks=blocks, num_warps=NAIVE_WARPS)


def _rows(config: Config) -> int:
    return int(config["num_warps"] * config["unroll"])


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / _rows(config)) * ceil(problem["N"] / BLOCK)


def _fused(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_warps, blocks = config["num_warps"], _num_blocks(problem, config)
    arguments = f", {num_warps}, {config['unroll']}"
    return _step(problem, "fused", arguments, blocks=blocks, num_warps=num_warps)


def _reject_fused(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_blocks(problem, config) > MAX_GRID:
        return f"the grid would have more than {MAX_GRID} blocks"
    if _rows(config) > 2 and _rows(config) >= 2 * problem["M"]:
        return f"{_rows(config)} rows at a time are mostly empty at M={problem['M']}"
    return None


def _bytes_moved(problem: Problem) -> int:
    return int(problem["M"] * problem["N"]) * 5 // 2


def _fused_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, which many warps give as well as long ones."""
    warps = _num_blocks(problem, config) * config["num_warps"] / gpu.sms
    in_flight = min(warps, 48) * config["unroll"]
    return copy_us(_bytes_moved(problem), gpu, 0.9 * min(1.0, 0.4 + in_flight / 320))


def _default_fused(problem: Problem, gpu: Gpu) -> Config:
    """As many rows a warp as leave 16 warps an SM."""
    serving = [Config(num_warps=4, unroll=unroll) for unroll in SPACE["unroll"]]
    serving = [c for c in serving if _reject_fused(c, problem, gpu) is None]
    busy = [c for c in serving if _num_blocks(problem, c) >= 4 * gpu.sms]
    if busy:
        return busy[-1]
    return Config(num_warps=4 if serving else 2, unroll=1)


IMPLEMENTATIONS = (
    Implementation(
        entry="fp8_swiglu",
        language="cuda",
        variant="naive",
        summary="a warp a block of scales, element by element, in two passes",
        archs=("sm_80+",),
        space={},
        reject=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=_naive,
        estimate=lambda problem, config, gpu: LAUNCH_US + 8 * copy_us(_bytes_moved(problem), gpu),
        techniques={"warp shuffle": "SHFL"},
        unverified="not yet run on a GPU",
        rank=0,
    ),
    Implementation(
        entry="fp8_swiglu",
        language="cuda",
        variant="fused",
        summary="one pass with 16-byte loads; a warp a block of scales, its maximum by redux",
        archs=("sm_80+",),
        space=SPACE,
        reject=_reject_fused,
        default=_default_fused,
        program=_fused,
        estimate=_fused_us,
        techniques={"16-byte loads": "LDG*128", "warp reduction": "*REDUX"},
        unverified="not yet run on a GPU",
        rank=1,
    ),
)
