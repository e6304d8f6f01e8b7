"""`gemm` in Triton: naive, tiled, persistent, specialized warps (Gluon), and tma with split-K.

The ladder follows Triton's own tutorials (grouped order, persistent descriptors); computing the
transposed product for few rows is CUTLASS's.
"""

from math import ceil

from kernelcat.catalog.implementation import Config, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.arguments import (
    GROUP_M,
    MIN_BYTES_IN_FLIGHT,
    Tile,
    by_descriptor,
    d_cols,
    described,
    flags,
    is_empty,
    operands,
    sizes,
)
from kernelcat.kernels.triton.gemm.gluon import GLUON
from kernelcat.kernels.triton.gemm.variants import (
    BLACKWELL,
    HOPPER,
    implementation,
    on_blackwell,
    reject_naive,
)
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.gemm.device:"


# ---- programs ----------------------------------------------------------------------------------


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tile = Tile.of(config)
    if is_empty(problem):
        return Program(())
    grid = (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1)
    arguments = operands(problem) | sizes(problem)
    constants = {**flags(problem), **tile.constants}
    return Program(
        (triton.step(KERNELS + "naive", grid, arguments, constants, num_warps=4, num_stages=1),)
    )


def _split(kernel: str, problem: Problem, config: Config, arguments: dict, **more: bool) -> Program:
    """One launch over (tiles, split_k); a workspace for partial tiles where K is split."""
    tile, split = Tile.of(config), config["split_k"]
    tiles = tile.count(problem)
    depth = ceil(problem["K"] / split / tile.k) * tile.k
    arguments = {
        **arguments,
        "partials": triton.pointer("partials", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        **sizes(problem, None if kernel == "tiled" else 1),
        "split_depth": triton.integer(depth),
    }
    constants = {**flags(problem), **tile.constants, "GROUP_M": GROUP_M}
    launch = triton.step(
        KERNELS + kernel,
        (tiles, split, 1),
        arguments,
        constants | {"SPLIT_K": split} | more,
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    partials = tiles * split * tile.m * tile.n if split > 1 else 0
    return Program((launch,), {"partials": 4 * partials, "arrivals": 4 * tiles})


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    return _split("tiled", problem, config, operands(problem))


def _tma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    by_tma = config["split_k"] == 1 and by_descriptor(problem)
    arguments = described(problem, tile, tile.n if by_tma else 0)
    swap = tile.m < 64
    return _split("tma", problem, config, arguments, SWAP=swap, DESCRIBED=by_tma)


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    by_tma = by_descriptor(problem)
    store_cols = tile.n // config["subtiles"] if by_tma else 0
    launch = triton.step(
        KERNELS + "persistent",
        (min(gpu.sms, tile.count(problem)), 1, 1),
        described(problem, tile, store_cols) | sizes(problem, 1),
        {
            **flags(problem),
            **tile.constants,
            "GROUP_M": GROUP_M,
            "NUM_PROGRAMS": gpu.sms,
            "SUBTILES": config["subtiles"],
            "DESCRIBED": by_tma,
            "WARP_SPECIALIZE": gpu.arch in BLACKWELL,
        },
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    return Program((launch,))


# ---- which configurations serve ----------------------------------------------------------------


def _reject_tile(
    tile: Tile, stages: int, problem: Problem, gpu: Gpu, epilogue: int = 0, least_m: int = 16
) -> str | None:
    """What holds for every pipelined variant; ``epilogue``: bytes of shared memory it takes."""
    shared = tile.stage_bytes * stages + epilogue + 1024  # barriers, and what Triton aligns
    if shared > gpu.shared_bytes:
        return f"{stages} stages take {shared} bytes of shared memory, {gpu.sku} has less"
    m = problem["M"]
    if tile.m > least_m and tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    if m > (128 if tile.m == 64 else tile.m) and tile.m <= 64:
        return f"tiles of {tile.m} rows read B more often than M={m} needs"
    return None


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, split = Tile.of(config), config["stages"], config["split_k"]
    if split > 1 and tile.count(problem) * split > 2 * gpu.sms:
        return f"{tile.count(problem)} tiles fill {gpu.sms} SMs without split_k={split}"
    if split > 1 and problem["K"] < 4 * tile.k * split:
        return f"K={problem['K']} is too short for split_k={split}"
    return _reject_tile(tile, stages, problem, gpu)


def _reject_depth(tile: Tile, stages: int, problem: Problem) -> str | None:
    """What descriptors ask for."""
    if problem["K"] == 0 or problem["K"] % 8:
        return f"K={problem['K']} must be a positive multiple of 8: TMA rows are 16-byte aligned"
    if tile.stage_bytes * stages < MIN_BYTES_IN_FLIGHT:
        return f"{stages} stages are too few to cover the latency of memory"
    return None


def _reject_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    reason = _reject_depth(Tile.of(config), config["stages"], problem)
    return reason or _reject_tiled(config, problem, gpu)


def _reject_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, subtiles = Tile.of(config), config["stages"], config["subtiles"]
    if not by_descriptor(problem) and (subtiles > 1 or tile.n > 128):
        return f"rows of D for N={problem['N']} take no multiple of 16 bytes: pointers would spill"
    epilogue = 2 * tile.m * d_cols(problem, tile.n) // subtiles * (1 + problem["residual"])
    reason = _reject_depth(tile, stages, problem)
    return reason or _reject_tile(tile, stages, problem, gpu, epilogue, least_m=64)


# ---- the ladder ----------------------------------------------------------------------------------


NAIVE = implementation(
    variant="naive",
    summary="one small tile a program, masked loads",
    archs=("sm_80+",),
    space={"tile": ("32x32x32", "32x64x32", "64x64x32")},
    illegal=reject_naive,
    program=_naive,
    rank=0,
)

TILED = implementation(
    variant="tiled",
    summary="grouped order, software-pipelined asynchronous copies, split-K; any shape",
    archs=("sm_80+",),
    space={
        "tile": (
            "16x64x128", "32x64x128", "64x64x64", "64x128x64",
            "128x128x32", "128x128x64", "128x256x64",
        ),
        "stages": (3, 4),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_reject_tiled,
    program=_tiled,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
)  # fmt: skip

TMA = implementation(
    variant="tma",
    summary="tensor descriptors, warpgroup products, few rows transposed, split-K",
    archs=HOPPER,
    space={
        "tile": (
            "16x64x128", "16x128x128", "32x64x128", "32x128x128", "64x64x128", "64x128x64",
            "128x128x64", "128x256x64", "256x128x64",
        ),
        "stages": (3, 4, 6),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_reject_tma,
    program=_tma,
    techniques={"tma": "UTMALDG", "wgmma": "HGMMA"},
    rank=4,  # above what cannot split K where tiles are few
)  # fmt: skip

PERSISTENT = implementation(
    variant="persistent",
    summary="a program an SM over many tiles, stores overlapped with the next tile's loads",
    archs=HOPPER,
    space={
        "tile": ("64x128x64", "128x128x64", "128x256x64", "256x128x64"),
        "stages": (3, 4, 6),
        "subtiles": (1, 2),
    },
    illegal=_reject_persistent,
    program=_persistent,
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
