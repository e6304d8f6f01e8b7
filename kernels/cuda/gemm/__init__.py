"""`gemm` in CUDA C++: from one thread an element to a warp-specialized Hopper kernel."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm import tma, wgmma
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, d_cols, epilogue, sizes
from kernelcat.model import copy_us, tiled_gemm_us
from kernelcat.spec import Problem

NAIVE_THREADS = 256
NAIVE_FLOPS = 0.5e12
"""What one thread an element reaches on an H200 (2.23 s for 8192^3)."""

POINTERS = (Pointer("a"), Pointer("b"), *EPILOGUE)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = ceil(problem["M"] * d_cols(problem) / NAIVE_THREADS)
    if blocks == 0:
        return Program(())
    arguments = f"kernelcat::{problem['dtype']}, {epilogue(problem)}"
    source = CudaSource("gemm/naive.cu", f"kernelcat::gemm_naive<{arguments}>")
    grid = (min(blocks, 2**31 - 1), 1, 1)
    return Program((Step(source, grid, (*POINTERS, *sizes(problem)), NAIVE_THREADS),))


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return copy_us(2 * (m * k + n * k + m * n), gpu) + 2 * m * n * k / NAIVE_FLOPS * 1e6


def _tiled_shared(config: Config) -> int:
    """Rows of 32 elements, padded to 80 bytes against bank conflicts."""
    return int(config["num_stages"] * (config["block_m"] + config["block_n"]) * 80)


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    block_m, block_n, stages = config["block_m"], config["block_n"], config["num_stages"]
    tiles = ceil(problem["M"] / block_m) * ceil(problem["N"] / block_n)
    if tiles == 0:
        return Program(())
    arguments = (
        f"kernelcat::{problem['dtype']}, {block_m}, {block_n}, {stages}, {epilogue(problem)}"
    )
    source = CudaSource("gemm/tiled.cu", f"kernelcat::gemm_tiled<{arguments}>")
    params = (*POINTERS, *sizes(problem), Int32(8))
    return Program((Step(source, (tiles, 1, 1), params, 2 * block_n, _tiled_shared(config)),))


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    shared = _tiled_shared(config)
    if shared > gpu.shared_bytes:
        return f"{shared} bytes of shared memory; {gpu.name} has {gpu.shared_bytes}"
    if config["block_n"] > 2 * config["block_m"]:
        return "more threads than there are 16-byte units in a stage of A"
    if problem["M"] <= 64 < config["block_m"]:
        return f"tiles of {config['block_m']} rows are mostly empty at M={problem['M']}"
    return None


def _tiled_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """mma.sync reaches about 0.6 of Hopper's rate, and 0.3 where rows are not aligned."""
    big = config["block_m"] * config["block_n"] >= 128 * 128
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=1,
        gpu=gpu,
        dtype=problem["dtype"],
        blocks_per_sm=2 if big else 4,
        efficiency=(0.6 if big else 0.45) * (1.0 if problem["K"] % 8 == 0 else 0.5),
    )


TILED_SPACE = {"block_m": (32, 64, 128), "block_n": (64, 128), "num_stages": (3, 4)}


def _default_tiled(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model; four stages where they fit."""
    stages = 4 if gpu.shared_bytes >= 4 * 256 * 80 else 3
    candidates = (
        Config(block_m=m, block_n=n, num_stages=stages)
        for m in TILED_SPACE["block_m"]
        for n in TILED_SPACE["block_n"]
    )
    serving = [c for c in candidates if _reject_tiled(c, problem, gpu) is None]
    return min(serving, key=lambda c: _tiled_us(problem, c, gpu))


IMPLEMENTATIONS = (
    Implementation(
        entry="gemm",
        language="cuda",
        variant="naive",
        summary="one thread an element",
        archs=("sm_80+",),
        space={},
        reject=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=_naive,
        estimate=_naive_us,
        techniques={"fused multiply-add": "FFMA"},
        rank=0,
    ),
    Implementation(
        entry="gemm",
        language="cuda",
        variant="tiled",
        summary="mma.sync from cp.async stages; any shape and alignment",
        archs=("sm_80+",),
        space=TILED_SPACE,
        reject=_reject_tiled,
        default=_default_tiled,
        program=_tiled,
        estimate=_tiled_us,
        techniques={"mma.sync": "HMMA", "ldmatrix": "LDSM", "cp.async": "LDGSTS"},
        rank=1,
    ),
    tma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
)
