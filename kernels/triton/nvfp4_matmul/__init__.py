"""`nvfp4_matmul` in Triton: naive, and tiled (weights decoded in registers, pipelined, split-K)."""

from math import ceil

from kernelcat import model
from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Program
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.arguments import GROUP_M, Tile
from kernelcat.kernels.triton.gemm.variants import implementation, reject_naive
from kernelcat.reference.nvfp4_matmul import ENTRY, FP8, OUT
from kernelcat.spec import Problem

KERNELS = "kernelcat.kernels.triton.nvfp4_matmul.device:"
UNVERIFIED = "not yet run on a GPU"


def _is_empty(problem: Problem) -> bool:
    return problem["M"] == 0 or problem["N"] == 0


def _arguments(problem: Problem) -> dict[str, triton.Argument]:
    out = OUT.where(problem.values)
    types = {
        "a": problem["dtype"], "w": "uint8", "w_scale": "uint8", "global_scale": "float32",
        "a_scale": "float32", "bias": out, "d": out,
    }  # fmt: skip
    return {name: triton.pointer(name, kind) for name, kind in types.items()}


def _sizes(problem: Problem) -> dict[str, triton.Argument]:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return {
        "M": triton.integer(m, divisor=1), "N": triton.integer(n), "K": triton.integer(k),
    }  # fmt: skip


def _flags(problem: Problem) -> dict[str, bool | str]:
    return {
        "NVFP4": problem["format"] == "nvfp4",
        "TILES": problem["packing"] == "tiles",
        "HAS_A_SCALE": problem["dtype"] == FP8,
        "HAS_BIAS": problem["bias"],
        "ACTIVATION": problem["activation"],
    }


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tile = Tile.of(config)
    if _is_empty(problem):
        return Program(())
    step = triton.step(
        KERNELS + "naive",
        (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1),
        _arguments(problem) | _sizes(problem),
        {**_flags(problem), **tile.constants},
        num_warps=4,
        num_stages=1,
    )
    return Program((step,))


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    tile, split = Tile.of(config), config["split_k"]
    tiles, depth = tile.count(problem), ceil(problem["K"] / split / tile.k) * tile.k
    arguments = {
        **_arguments(problem),
        "partials": triton.pointer("partials", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        **_sizes(problem),
        "split_depth": triton.integer(depth),
    }
    step = triton.step(
        KERNELS + "tiled",
        (tiles, split, 1),
        arguments,
        {**_flags(problem), **tile.constants, "GROUP_M": GROUP_M, "SPLIT_K": split},
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    partials = tiles * split * tile.m * tile.n if split > 1 else 0
    return Program((step,), {"partials": 4 * partials, "arrivals": 4 * tiles})


def _reject_arch(problem: Problem, gpu: Gpu) -> str | None:
    if problem["dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.arch} does not convert from {FP8}"
    return None


def _reject_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _reject_arch(problem, gpu) or reject_naive(config, problem, gpu)


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, split = Tile.of(config), config["stages"], config["split_k"]
    if problem["packing"] == "tiles":
        return "only weights in rows are read by whole lines"
    m, tiles = problem["M"], tile.count(problem)
    shared = (2 * tile.m + tile.n) * tile.k * stages + 1024
    if shared > gpu.shared_bytes:
        return f"{stages} stages take {shared} bytes of shared memory, {gpu.sku} has less"
    if tile.m > 16 and tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    if m > (128 if tile.m == 64 else tile.m) and tile.m <= 64:
        return f"tiles of {tile.m} rows decode W more often than M={m} needs"
    if split > 1 and tiles * split > 4 * gpu.sms:
        return f"{tiles} tiles fill {gpu.sms} SMs without split_k={split}"
    if split > 1 and problem["K"] < 2 * tile.k * split:
        return f"K={problem['K']} is too short for split_k={split}"
    return _reject_arch(problem, gpu)


DECODES_A_SECOND = 4e9 * 132
"""Weights an SM decodes, about 4 a nanosecond, times those of an H200."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory or decoding or products, whichever is longest, over the SMs that have work."""
    tile, split = Tile.of(config), config.get("split_k", 1)
    m, n, k = problem["M"], problem["N"], problem["K"]
    programs = max(tile.count(problem) * split, 1)
    waves = ceil(programs / gpu.sms)
    idle = waves * gpu.sms / programs
    decode_us = ceil(m / tile.m) * n * k / DECODES_A_SECOND * (132 / gpu.sms) * idle * 1e6
    dtype = "float16" if problem["dtype"] == "float16" else "bfloat16"
    math_us = 2 * ceil(m / tile.m) * tile.m * n * k / gpu.flops[dtype] * idle * 1e6 / 0.6
    partials = 8 * m * n * split if split > 1 else 0
    memory_us = model.copy_us(ENTRY.bytes_moved(problem) + partials, gpu) * max(1.0, idle / 2)
    slow = 1.0 if "stages" in config else 4.0
    return slow * max(decode_us + math_us, memory_us) + model.WAVE_LATENCY_US * waves


NAIVE = implementation(
    entry="nvfp4_matmul",
    variant="naive",
    summary="one small tile a program, weights decoded in registers, either packing",
    archs=("sm_80+",),
    space={"tile": ("16x32x32", "32x64x32")},
    reject=_reject_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
    unverified=UNVERIFIED,
)

TILED = implementation(
    entry="nvfp4_matmul",
    variant="tiled",
    summary="transposed products of weights decoded in registers, pipelined, split-K",
    archs=("sm_80+",),
    space={
        "tile": (
            "16x64x128", "16x128x128", "32x64x128", "32x128x128", "64x128x64", "64x64x128",
            "128x128x64",
        ),
        "stages": (3, 4),
        "split_k": (1, 2, 4, 8),
    },
    reject=_reject_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
    unverified=UNVERIFIED,
)  # fmt: skip

IMPLEMENTATIONS = (NAIVE, TILED)
