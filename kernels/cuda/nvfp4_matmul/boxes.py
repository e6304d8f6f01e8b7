"""`nvfp4_matmul` for several waves of tiles: they leave by bulk copies while others are multiplied.

With few k-blocks, half of the time of `wgmma` is that of stores from registers, in which nothing is
multiplied. Here a tile takes the way that TMA offers: through shared memory, that of its own last
stage.
"""

from __future__ import annotations

from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.packed_weights import STAGE_ROWS, weight_maps
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.nvfp4_matmul import wgmma
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    activation,
    is_empty,
    is_nvfp4,
    k_tiles,
    math_dtype,
    out_type,
    row_tiles,
)
from kernelcat.kernels.cuda.nvfp4_matmul.wgmma import CONSUMERS, GROUP_M, Plan, _widen_rows
from kernelcat.reference.nvfp4_matmul import FP8
from kernelcat.runtime.gpu import Gpu

SPACE = {"tile": wgmma.SPACE["tile"]}
"""tile : rows of W x rows of A"""


def _as_wgmma(config: Config) -> Config:
    """The configuration of `wgmma` with the same tiles."""
    return Config(tile=config["tile"], split_k=1)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan = Plan.of(_as_wgmma(config), problem, gpu)
    m, k, dtype = problem["M"], problem["K"], math_dtype(problem)
    is_float8, columns = problem["dtype"] == FP8, STAGE_ROWS // CONSUMERS
    map_a = TensorMap(
        "wide" if is_float8 else "a", dtype, (k, m), (2 * k,), (64, plan.block_n), 128,
        l2_promotion=128,
    )  # fmt: skip
    map_d = TensorMap(
        "d", out_type(problem), (plan.n, m), (2 * plan.n,), (columns, plan.block_n), 2 * columns
    )
    source = instance(
        "nvfp4_matmul/boxes.cu",
        "nvfp4_matmul_boxes",
        *(dtype, out_type(problem), is_nvfp4(problem), activation(problem), is_float8),
        *(plan.block_n, plan.num_stages(gpu)),
    )
    step = Step(
        source,
        (min(plan.tiles, plan.clusters), 1, 1),
        (
            map_a,
            *weight_maps(row_tiles(problem), k_tiles(problem), plan.scale_block),
            map_d,
            *EPILOGUE[:-1],
            *sizes(problem),
            Int32(GROUP_M),
        ),
        (CONSUMERS + 1) * 128,
        plan.shared_bytes(gpu),
        programmatic=True,
    )
    if not is_float8:
        return Program((step,))
    return Program((_widen_rows(m * k // 16, gpu), step), {"wide": 2 * m * k})


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["activation"] == "swiglu":
        return "tiles of swiglu have half as many columns as the boxes: wgmma serves"
    if problem["N"] % 8:
        return f"rows of N={problem['N']} elements are no multiple of 16 bytes, which TMA needs"
    return wgmma.IMPLEMENTATION.illegal(_as_wgmma(config), problem, gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = Plan.of(_as_wgmma(config), problem, gpu)
    if plan.tiles <= plan.clusters:
        return "there is one wave of tiles: nothing is multiplied while they leave"
    return wgmma.IMPLEMENTATION.unpromising(_as_wgmma(config), problem, gpu)


# ---- which one without measuring ---------------------------------------------------------------

_TILE_US = 1.0
"""Writing a tile of 128 x 256 to its boxes while nothing is multiplied, fitted to 25 times."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """As that of `wgmma`, with less time for the stores."""
    return wgmma.estimate(problem, _as_wgmma(config), gpu, _TILE_US)


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="boxes",
    summary="several waves of tiles: each leaves by TMA while the next one is multiplied",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={**wgmma.IMPLEMENTATION.techniques, "tma store": "UTMASTG"},
    rank=2,
)
