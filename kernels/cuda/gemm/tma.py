"""`gemm` by mma.sync with TMA in place of cp.async: the step between `tiled` and `wgmma`."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.gemm import tiled
from kernelcat.kernels.cuda.gemm.operands import BLOCK_K, operand_map, why_not_tma
from kernelcat.runtime.gpu import KB, Gpu

SPACE = tiled.SPACE | {"num_stages": (3, 4, 6)}


def _shared_bytes(config: Config) -> int:
    """The stages, their alignment to 1 KB, and the barriers."""
    stage = (config["block_m"] + config["block_n"]) * BLOCK_K * 2
    return int(config["num_stages"] * stage + KB + 256)


def _blocks_per_sm(config: Config, gpu: Gpu) -> int:
    return max(min(gpu.shared_bytes // _shared_bytes(config), 4), 1)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    block_m, block_n = config["block_m"], config["block_n"]
    return tiled.launch(
        "tma",
        problem,
        config,
        (
            operand_map("a", problem, problem["M"], block_m),
            operand_map("b", problem, problem["N"], block_n),
        ),
        threads=2 * block_n + 32,
        shared_bytes=_shared_bytes(config),
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return tiled.why_no_room(_shared_bytes(config), gpu) or why_not_tma(problem)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """mma.sync reaches about 0.6 of Hopper's rate."""
    return tiled.tile_us(
        problem,
        config,
        gpu,
        blocks_per_sm=_blocks_per_sm(config, gpu),
        efficiency=0.62 if tiled.is_big(config) else 0.5,
    )


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="tma",
    summary="mma.sync from stages that one warp fills by TMA",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=tiled.unpromising_tile,
    program=_program,
    estimate=_estimate,
    techniques={"tma": "UTMALDG", "mbarrier": "SYNCS", "mma.sync": "HMMA", "ldmatrix": "LDSM"},
    rank=2,
)
