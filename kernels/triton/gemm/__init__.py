"""`gemm` in Triton: naive, tiled, persistent, specialized warps (Gluon), and tma with split-K.

The ladder follows Triton's own tutorials (grouped order, persistent descriptors). Computing the
transposed product for few rows is CUTLASS's idea.
"""

from math import ceil

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import split_k
from kernelcat.kernels.triton.common.architectures import BLACKWELL, HOPPER, on_blackwell
from kernelcat.kernels.triton.common.estimate import estimate
from kernelcat.kernels.triton.common.product import (
    GROUP_M,
    MIN_BYTES_IN_FLIGHT,
    Tile,
    illegal_naive,
    illegal_stages,
    is_empty,
    sizes,
    unpromising_rows,
)
from kernelcat.kernels.triton.gemm.arguments import (
    can_store_by_tma,
    d_cols,
    descriptors,
    flags,
    illegal_depth,
    pointers,
)
from kernelcat.kernels.triton.gemm.gluon import GLUON
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.gemm.device:"
RESERVED_BYTES = 1024
"""Shared memory of a program besides its stages: barriers, and what Triton aligns."""


# ---- programs ----------------------------------------------------------------------------------


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tile = Tile.of(config)
    if is_empty(problem):
        return Program(())
    grid = (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1)
    arguments = pointers(problem) | sizes(problem)
    constants = {**flags(problem), **tile.constants}
    return Program(
        (triton.step(KERNELS + "naive", grid, arguments, constants, num_warps=4, num_stages=1),)
    )


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    return _split("tiled", problem, config, pointers(problem), sizes(problem))


def _tma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    tma_store = config["split_k"] == 1 and can_store_by_tma(problem)
    arrays = descriptors(problem, tile, tile.n if tma_store else 0)
    constants = {"SWAP": tile.m < 64, "TMA_STORE": tma_store}
    return _split("tma", problem, config, arrays, sizes(problem, 1), **constants)


def _split(
    kernel: str,
    problem: Problem,
    config: Config,
    arrays: dict[str, triton.Argument],
    sizes: dict[str, triton.Argument],
    **constants: bool,
) -> Program:
    """One launch over (tiles, split_k)."""
    tile, splits = Tile.of(config), config["split_k"]
    depth = {"split_depth": triton.integer(split_k.depth(tile, problem, splits))}
    launch = triton.step(
        KERNELS + kernel,
        (tile.count(problem), splits, 1),
        arrays | split_k.arguments() | sizes | depth,
        flags(problem) | tile.constants | {"GROUP_M": GROUP_M, "SPLIT_K": splits} | constants,
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    return Program((launch,), split_k.workspaces(tile, problem, splits))


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    tma_store = can_store_by_tma(problem)
    store_cols = tile.n // config["subtiles"] if tma_store else 0
    launch = triton.step(
        KERNELS + "persistent",
        (min(gpu.sms, tile.count(problem)), 1, 1),
        descriptors(problem, tile, store_cols) | sizes(problem, 1),
        {
            **flags(problem),
            **tile.constants,
            "GROUP_M": GROUP_M,
            "NUM_PROGRAMS": gpu.sms,
            "SUBTILES": config["subtiles"],
            "TMA_STORE": tma_store,
            "WARP_SPECIALIZE": gpu.arch in BLACKWELL,
        },
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    return Program((launch,))


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    stages = config["stages"]
    return illegal_stages(stages, Tile.of(config).stage_bytes * stages + RESERVED_BYTES, gpu)


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile = Tile.of(config)
    return split_k.unpromising_splits(
        tile, problem, config["split_k"], gpu, max_waves=2, min_k_blocks=4
    ) or unpromising_rows(tile, problem, min_m=16)


def _illegal_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return illegal_depth(problem) or _illegal_tiled(config, problem, gpu)


def _unpromising_loads(config: Config) -> str | None:
    if Tile.of(config).stage_bytes * config["stages"] < MIN_BYTES_IN_FLIGHT:
        return f"{config['stages']} stages are too few to cover the latency of memory"
    return None


def _unpromising_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _unpromising_loads(config) or _unpromising_tiled(config, problem, gpu)


def _illegal_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, subtiles = Tile.of(config), config["stages"], config["subtiles"]
    d_bytes = 2 * tile.m * d_cols(problem, tile.n) // subtiles * (1 + problem["residual"])
    program_bytes = tile.stage_bytes * stages + d_bytes + RESERVED_BYTES
    return illegal_depth(problem) or illegal_stages(stages, program_bytes, gpu)


def _unpromising_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile = Tile.of(config)
    if not can_store_by_tma(problem) and (config["subtiles"] > 1 or tile.n > 128):
        return f"rows of D for N={problem['N']} are stored through pointers, which spill registers"
    return _unpromising_loads(config) or unpromising_rows(tile, problem, min_m=64)


# ---- the ladder ----------------------------------------------------------------------------------


NAIVE = Implementation(
    entry="gemm",
    language="triton",
    variant="naive",
    summary="one small tile a program, masked loads",
    archs=("sm_80+",),
    space={"tile": ("32x32x32", "32x64x32", "64x64x32")},
    illegal=illegal_naive,
    program=_naive,
    estimate=estimate,
    rank=0,
)

TILED = Implementation(
    entry="gemm",
    language="triton",
    variant="tiled",
    summary="grouped order, software-pipelined asynchronous copies, split-K; any shape",
    archs=("sm_80+",),
    space={
        "stages": (4, 3),  # of equal estimates the first is the default
        "tile": (
            "16x64x128", "32x64x128", "64x64x64", "64x128x64",
            "128x128x32", "128x128x64", "128x256x64",
        ),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=estimate,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
)  # fmt: skip

TMA = Implementation(
    entry="gemm",
    language="triton",
    variant="tma",
    summary="tensor descriptors, warpgroup products, few rows transposed, split-K",
    archs=HOPPER,
    space={
        "stages": (6, 4, 3),
        "tile": (
            "16x64x128", "16x128x128", "32x64x128", "32x128x128", "64x64x128", "64x128x64",
            "128x128x64", "128x256x64", "256x128x64",
        ),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_illegal_tma,
    unpromising=_unpromising_tma,
    program=_tma,
    estimate=estimate,
    techniques={"tma": "UTMALDG", "wgmma": "HGMMA"},
    rank=4,  # above variants that cannot split K where tiles are few
)  # fmt: skip

PERSISTENT = Implementation(
    entry="gemm",
    language="triton",
    variant="persistent",
    summary="one program an SM over many tiles, stores overlapped with the next tile's loads",
    archs=HOPPER,
    space={
        "stages": (6, 4, 3),
        "tile": ("64x128x64", "128x128x64", "128x256x64", "256x128x64"),
        "subtiles": (1, 2),
    },
    illegal=_illegal_persistent,
    unpromising=_unpromising_persistent,
    program=_persistent,
    estimate=estimate,
    techniques={"tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "HGMMA"},
    rank=2,
)


IMPLEMENTATIONS = (
    NAIVE,
    TILED,
    TMA,
    PERSISTENT,
    GLUON,
    on_blackwell(TMA, "UTCHMMA"),
    on_blackwell(PERSISTENT, "UTCHMMA"),
)
