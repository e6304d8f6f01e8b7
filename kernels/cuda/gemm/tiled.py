"""`gemm` by mma.sync, a thread block for each tile of D: `tiled`, and what `tma` shares with it."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import tiled_gemm_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, epilogue
from kernelcat.runtime.gpu import Gpu

GROUP_M = 8
"""Rows of tiles that make a group in the order of tiles."""

SPACE = {"block_m": (32, 64, 128), "block_n": (64, 128), "num_stages": (4, 3)}
"""The estimate is the same with four stages and with three; the default takes four."""


# ---- shared with `tma` -------------------------------------------------------------------------


def launch(
    variant: str,
    problem: Problem,
    config: Config,
    operands: tuple[Param, ...],
    *,
    threads: int,
    shared_bytes: int,
) -> Program:
    """One thread block for each tile; ``operands`` are A and B, as ``variant`` takes them."""
    block_m, block_n = config["block_m"], config["block_n"]
    num_tiles = ceil(problem["M"] / block_m) * ceil(problem["N"] / block_n)
    if num_tiles == 0:
        return Program(())
    source = instance(
        f"gemm/{variant}.cu",
        f"gemm_{variant}",
        *(problem["dtype"], block_m, block_n, config["num_stages"], *epilogue(problem)),
    )
    params = (*operands, *EPILOGUE, *sizes(problem), Int32(GROUP_M))
    return Program((Step(source, (num_tiles, 1, 1), params, threads, shared_bytes),))


def why_no_room(shared_bytes: int, gpu: Gpu) -> str | None:
    """Why a thread block's shared memory does not fit, or None."""
    if shared_bytes > gpu.shared_bytes:
        return f"{shared_bytes} bytes of shared memory; {gpu.name} has {gpu.shared_bytes}"
    return None


def unpromising_tile(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["M"] <= 64 < config["block_m"]:
        return f"tiles of {config['block_m']} rows are mostly empty at M={problem['M']}"
    return None


def is_big(config: Config) -> bool:
    """Whether a tile is large enough for mma.sync to come near the best that it reaches."""
    return bool(config["block_m"] * config["block_n"] >= 128 * 128)


def tile_us(
    problem: Problem, config: Config, gpu: Gpu, *, blocks_per_sm: int, efficiency: float
) -> float:
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=1,
        gpu=gpu,
        dtype=problem["dtype"],
        blocks_per_sm=blocks_per_sm,
        efficiency=efficiency,
    )


# ---- tiled -------------------------------------------------------------------------------------


def _shared_bytes(config: Config) -> int:
    """Rows of 32 elements, padded to 80 bytes against bank conflicts."""
    return int(config["num_stages"] * (config["block_m"] + config["block_n"]) * 80)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return launch(
        "tiled",
        problem,
        config,
        (Pointer("a"), Pointer("b")),
        threads=2 * config["block_n"],
        shared_bytes=_shared_bytes(config),
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["block_n"] > 2 * config["block_m"]:
        return (
            f"{2 * config['block_n']} threads are more than the {4 * config['block_m']} 16-byte "
            "units of A in a stage"
        )
    return why_no_room(_shared_bytes(config), gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """mma.sync reaches about 0.6 of Hopper's rate, and 0.3 where rows are not aligned."""
    blocks_per_sm, efficiency = (2, 0.6) if is_big(config) else (4, 0.45)
    efficiency *= 1.0 if problem["K"] % 8 == 0 else 0.5
    return tile_us(problem, config, gpu, blocks_per_sm=blocks_per_sm, efficiency=efficiency)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="tiled",
    summary="mma.sync from cp.async stages; any shape and alignment",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=unpromising_tile,
    program=_program,
    estimate=_estimate,
    techniques={"mma.sync": "HMMA", "ldmatrix": "LDSM", "cp.async": "LDGSTS"},
    rank=1,
)
