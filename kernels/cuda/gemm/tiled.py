"""`gemm` by mma.sync, one block a tile of D: `tiled`, and what `tma` has in common with it."""

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
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, epilogue, sizes
from kernelcat.runtime.gpu import Gpu

GROUP_M = 8

SPACE = {"block_m": (32, 64, 128), "block_n": (64, 128), "num_stages": (3, 4)}


# ---- one block a tile --------------------------------------------------------------------------


def launch(
    variant: str,
    problem: Problem,
    config: Config,
    operands: tuple[Param, ...],
    *,
    threads: int,
    shared_bytes: int,
) -> Program:
    """A block a tile; ``operands`` are A and B, as ``variant`` takes them."""
    block_m, block_n, stages = config["block_m"], config["block_n"], config["num_stages"]
    tiles = ceil(problem["M"] / block_m) * ceil(problem["N"] / block_n)
    if tiles == 0:
        return Program(())
    arguments = (
        f"kernelcat::{problem['dtype']}, {block_m}, {block_n}, {stages}, {epilogue(problem)}"
    )
    source = CudaSource(f"gemm/{variant}.cu", f"kernelcat::gemm_{variant}<{arguments}>")
    params = (*operands, *EPILOGUE, *sizes(problem), Int32(GROUP_M))
    return Program((Step(source, (tiles, 1, 1), params, threads, shared_bytes),))


def reject_tile(config: Config, problem: Problem, gpu: Gpu, shared_bytes: int) -> str | None:
    if shared_bytes > gpu.shared_bytes:
        return f"{shared_bytes} bytes of shared memory; {gpu.name} has {gpu.shared_bytes}"
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


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["block_n"] > 2 * config["block_m"]:
        return "more threads than there are 16-byte units in a stage of A"
    return reject_tile(config, problem, gpu, _shared_bytes(config))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """mma.sync reaches about 0.6 of Hopper's rate, and 0.3 where rows are not aligned."""
    blocks_per_sm, efficiency = (2, 0.6) if is_big(config) else (4, 0.45)
    efficiency *= 1.0 if problem["K"] % 8 == 0 else 0.5
    return tile_us(problem, config, gpu, blocks_per_sm=blocks_per_sm, efficiency=efficiency)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model; four stages where they fit."""
    stages = 4 if gpu.shared_bytes >= 4 * 256 * 80 else 3
    candidates = (
        Config(block_m=m, block_n=n, num_stages=stages)
        for m in SPACE["block_m"]
        for n in SPACE["block_n"]
    )
    serving = [c for c in candidates if _reject(c, problem, gpu) is None]
    return min(serving, key=lambda c: _estimate(problem, c, gpu))


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="tiled",
    summary="mma.sync from cp.async stages; any shape and alignment",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={"mma.sync": "HMMA", "ldmatrix": "LDSM", "cp.async": "LDGSTS"},
    rank=1,
)
