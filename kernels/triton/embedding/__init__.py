"""`embedding` in Triton: a part of one row a program (naive), or a tile of rows (tiled)."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference.embedding import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.embedding.device:gather"
MAX_GRID = 2**31 - 1
NAIVE = Config(rows=1, cols=256, warps=1)
SPACE = {"rows": (1, 2, 4, 8), "cols": (256, 512, 1024, 2048), "warps": (1, 2, 4, 8)}
"""rows x cols : the tile of out that a program computes"""


def _num_programs(problem: Problem, config: Config) -> int:
    return ceil(problem["tokens"] / config["rows"]) * ceil(problem["hidden"] / config["cols"])


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_programs = _num_programs(problem, config)
    if num_programs == 0:
        return Program(())
    pointers = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    values = {
        "tokens": triton.integer(problem["tokens"], divisor=1),
        "vocab": triton.integer(problem["vocab"], divisor=1),
        "hidden": triton.integer(problem["hidden"]),
        "scale": triton.real(problem["scale"]),
    }
    constants = {"ROWS": config["rows"], "COLS": config["cols"]}
    step = triton.step(
        KERNEL, (num_programs, 1, 1), pointers | values, constants, num_warps=config["warps"]
    )
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_programs = _num_programs(problem, config)
    if num_programs > MAX_GRID:
        return f"{num_programs} programs are more than the {MAX_GRID} of a grid"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    elements = config["rows"] * config["cols"] // (32 * config["warps"])
    if not 8 <= elements <= 64:
        return f"{elements} elements a thread: 8 fill one load, more than 64 the registers"
    if config["rows"] > 1 and config["rows"] >= 2 * problem["tokens"]:
        return f"tiles of {config['rows']} rows are mostly empty at tokens={problem['tokens']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time, longer where tiles are partly empty, small, or fewer than SMs."""
    rows, cols, hidden = config["rows"], config["cols"], max(problem["hidden"], 1)
    filled = hidden / (ceil(hidden / cols) * cols)
    in_flight = min(1.0, 0.3 + rows * cols / (32 * config["warps"]) / 24)
    busy = min(1.0, max(_num_programs(problem, config), 1) / gpu.sms)
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * in_flight * busy * (0.7 + 0.3 * filled))


IMPLEMENTATIONS = (
    Implementation(
        entry="embedding",
        language="triton",
        variant="naive",
        summary="256 columns of one row a program",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: _illegal(NAIVE, problem, gpu),
        program=lambda problem, config, gpu: _program(problem, NAIVE, gpu),
        estimate=lambda problem, config, gpu: 4 * _estimate(problem, NAIVE, gpu),
        rank=0,
    ),
    Implementation(
        entry="embedding",
        language="triton",
        variant="tiled",
        summary="a tile of rows a program, 16-byte loads and stores",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        program=_program,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
