"""`gemm` by mma.sync with TMA in place of cp.async: the step between `tiled` and `wgmma`."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import KB, Gpu
from kernelcat.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.operands import (
    BLOCK_K,
    EPILOGUE,
    epilogue,
    operand_map,
    sizes,
    why_not_tma,
)
from kernelcat.model import tiled_gemm_us
from kernelcat.spec import Problem

SPACE = {"block_m": (32, 64, 128), "block_n": (64, 128), "num_stages": (3, 4, 6)}


def _shared_bytes(config: Config) -> int:
    """The stages, the barriers and the alignment."""
    stage = (config["block_m"] + config["block_n"]) * BLOCK_K * 2
    return int(config["num_stages"] * stage + KB + 256)


def _blocks_per_sm(config: Config, gpu: Gpu) -> int:
    return max(min(gpu.shared_bytes // _shared_bytes(config), 4), 1)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, n = problem["M"], problem["N"]
    block_m, block_n, stages = config["block_m"], config["block_n"], config["num_stages"]
    tiles = ceil(m / block_m) * ceil(n / block_n)
    if tiles == 0:
        return Program(())
    arguments = (
        f"kernelcat::{problem['dtype']}, {block_m}, {block_n}, {stages}, {epilogue(problem)}"
    )
    params = (
        operand_map("a", problem, m, block_m),
        operand_map("b", problem, n, block_n),
        *EPILOGUE,
        *sizes(problem),
        Int32(8),
    )
    source = CudaSource("gemm/tma.cu", f"kernelcat::gemm_tma<{arguments}>")
    step = Step(source, (tiles, 1, 1), params, 2 * block_n + 32, _shared_bytes(config))
    return Program((step,))


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    shared = _shared_bytes(config)
    if shared > gpu.shared_bytes:
        return f"{shared} bytes of shared memory; {gpu.name} has {gpu.shared_bytes}"
    if problem["M"] <= 64 < config["block_m"]:
        return f"tiles of {config['block_m']} rows are mostly empty at M={problem['M']}"
    return why_not_tma(problem)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """mma.sync reaches about 0.6 of Hopper's rate."""
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=1,
        gpu=gpu,
        dtype=problem["dtype"],
        blocks_per_sm=_blocks_per_sm(config, gpu),
        efficiency=0.62 if config["block_m"] * config["block_n"] >= 128 * 128 else 0.5,
    )


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    serving = IMPLEMENTATION.configs(problem, gpu)
    fallback = Config(block_m=32, block_n=64, num_stages=3)
    return min(serving, key=lambda config: _estimate(problem, config, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="tma",
    summary="mma.sync from stages that one warp fills by TMA",
    archs=("sm_90+",),
    space=SPACE,
    reject=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={"tma": "UTMALDG", "mbarrier": "SYNCS", "mma.sync": "HMMA", "ldmatrix": "LDSM"},
    rank=2,
)
