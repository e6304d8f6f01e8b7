"""`nvfp4_matmul` in Triton: naive, tiled (weights decoded in registers), block_scaled (W4A4)."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import split_k
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.product import (
    GROUP_M,
    Tile,
    illegal_naive,
    illegal_stages,
    is_empty,
    sizes,
    unpromising_rows,
)
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_matmul import ENTRY, FP4, FP8, OUT
from kernelcat.runtime.gpu import Gpu

MODULE = "kernelcat.kernels.triton.nvfp4_matmul."
KERNELS = MODULE + "device:"


def _pointers(problem: Problem) -> dict[str, triton.Argument]:
    out = OUT.where(problem.values)
    types = {
        "a": "uint8" if problem["dtype"] == FP4 else problem["dtype"], "w": "uint8",
        "w_scale": "uint8", "global_scale": "float32", "a_scale": "float32",
        "a_block_scale": "uint8", "bias": out, "d": out,
    }  # fmt: skip
    return {name: triton.pointer(name, kind) for name, kind in types.items()}


def _flags(problem: Problem) -> dict[str, bool | str]:
    return {
        "NVFP4": problem["format"] == "nvfp4",
        "W_IN_TILES": problem["packing"] == "tiles",
        "A_IN_FP4": problem["dtype"] == FP4,
        "HAS_A_SCALE": problem["dtype"] == FP8,
        "HAS_BIAS": problem["bias"],
        "ACTIVATION": problem["activation"],
    }


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tile = Tile.of(config)
    if is_empty(problem):
        return Program(())
    step = triton.step(
        KERNELS + "naive",
        (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1),
        _pointers(problem) | sizes(problem),
        {**_flags(problem), **tile.constants},
        num_warps=4,
        num_stages=1,
    )
    return Program((step,))


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile, splits = Tile.of(config), config["split_k"]
    arguments = {
        **_pointers(problem),
        **split_k.arguments(),
        **sizes(problem),
        "split_depth": triton.integer(split_k.depth(tile, problem, splits)),
    }
    step = triton.step(
        KERNELS + "tiled",
        (tile.count(problem), splits, 1),
        arguments,
        {**_flags(problem), **tile.constants, "GROUP_M": GROUP_M, "SPLIT_K": splits},
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    return Program((step,), split_k.workspaces(tile, problem, splits))


def _block_scaled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile, pointers, flags = Tile.of(config), _pointers(problem), _flags(problem)
    size, half_k = block_of(problem.values), problem["K"] // 2
    scale_type = "float8_e4m3fn" if problem["format"] == "nvfp4" else "uint8"
    scale_bytes = ceil(problem["K"] / size / 4) * 512

    def codes(name: str, rows: int, block: int) -> triton.Argument:
        return triton.descriptor(name, "uint8", (rows, half_k), (block, tile.k // 2))

    def scales(name: str, rows: int, block: int) -> triton.Argument:
        box = (block // 128, tile.k // size // 4 * 512)
        return triton.descriptor(name, scale_type, (ceil(rows / 128), scale_bytes), box)

    step = triton.step(
        MODULE + "block_scaled:block_scaled",
        (tile.count(problem), 1, 1),
        {
            "a": codes("a", problem["M"], tile.m),
            "a_block_scale": scales("a_block_scale", problem["M"], tile.m),
            "w": codes("w", problem["N"], tile.n),
            "w_scale": scales("w_scale", problem["N"], tile.n),
            **{name: pointers[name] for name in ("global_scale", "bias", "d")},
            **sizes(problem),
        },
        {
            **{name: flags[name] for name in ("NVFP4", "HAS_BIAS", "ACTIVATION")},
            **tile.constants,
            "GROUP_M": GROUP_M,
        },
        num_warps=4 if tile.m == 128 else 8,
        num_stages=config["stages"],
    )
    return Program((step,))


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal_type(problem: Problem, gpu: Gpu) -> str | None:
    return illegal_float8(gpu) if problem["dtype"] == FP8 else None


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _illegal_type(problem, gpu) or illegal_naive(config, problem, gpu)


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages = Tile.of(config), config["stages"]
    if problem["dtype"] == FP4:
        return "takes A in 16 bits or float8: A in 4 bits is for naive and block_scaled"
    if problem["packing"] == "tiles":
        return "takes weights in rows: packing must be rows"
    program_bytes = (2 * tile.m + tile.n) * tile.k * stages + 1024
    return illegal_stages(stages, program_bytes, gpu) or _illegal_type(problem, gpu)


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, splits = Tile.of(config), config["split_k"]
    return unpromising_rows(tile, problem, min_m=16, weights="W") or split_k.unpromising_splits(
        tile, problem, splits, gpu, max_waves=4, min_k_blocks=2
    )


def _illegal_block_scaled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, k = Tile.of(config), config["stages"], problem["K"]
    if problem["dtype"] != FP4 or problem["packing"] != "rows":
        return "takes A in 4 bits, and weights in rows"
    if k % 32 or k == 0:
        return f"K={k} must be a positive multiple of 32: TMA needs rows of a multiple of 16 bytes"
    stage_bytes = (tile.m + tile.n) * (tile.k // 2 + tile.k // block_of(problem.values))
    return illegal_stages(stages, stage_bytes * stages + 2048, gpu)


def _unpromising_block_scaled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, m = Tile.of(config), problem["M"]
    if tile.m >= 2 * max(m, 128):
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    return None


# ---- estimates -----------------------------------------------------------------------------------


def _estimate_block_scaled(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Time of a 16-bit product of a quarter of the depth: bytes and time of products agree."""
    tile = Tile.of(config)
    return cost_model.tiled_gemm_us(
        problem["M"], problem["N"], problem["K"] // 4, block_m=tile.m, block_n=tile.n, split_k=1,
        gpu=gpu, dtype="bfloat16", efficiency=0.6,
    )  # fmt: skip


DECODES_A_SECOND = 12e9 * 132
"""Weights that the 132 SMs of an H200 decode, about 12 in a nanosecond each."""
DECODE_OVERLAP = 0.3
"""Share of the shorter time, of decoding or of products, that the longer does not hide."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, or decoding and products, whichever takes longer on the SMs that have work."""
    tile, split = Tile.of(config), config.get("split_k", 1)
    m, n, k = problem["M"], problem["N"], problem["K"]
    num_programs = max(tile.count(problem) * split, 1)
    waves = ceil(num_programs / gpu.sms)
    idle = waves * gpu.sms / num_programs
    decode_us = ceil(m / tile.m) * n * k / DECODES_A_SECOND * (132 / gpu.sms) * idle * 1e6
    dtype = "float16" if problem["dtype"] == "float16" else "bfloat16"
    math_us = 2 * ceil(m / tile.m) * tile.m * n * k / gpu.flops[dtype] * idle * 1e6 / 0.6
    partials = 8 * m * n * split if split > 1 else 0
    memory_us = cost_model.copy_us(ENTRY.bytes_moved(problem) + partials, gpu) * max(1.0, idle / 2)
    busy_us = max(decode_us, math_us) + DECODE_OVERLAP * min(decode_us, math_us)
    slow = 1.0 if "stages" in config else 4.0
    return slow * max(busy_us, memory_us) + cost_model.WAVE_LATENCY_US * waves


NAIVE = Implementation(
    entry="nvfp4_matmul",
    language="triton",
    variant="naive",
    summary="one small tile a program, weights decoded in registers, either packing",
    archs=("sm_80+",),
    space={"tile": ("16x32x32", "32x64x32")},
    illegal=_illegal_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TILED = Implementation(
    entry="nvfp4_matmul",
    language="triton",
    variant="tiled",
    summary="transposed products of weights decoded in registers, pipelined, split-K",
    archs=("sm_80+",),
    space={
        "stages": (4, 3),  # of equal estimates the first is the default
        "tile": (
            "16x64x128", "16x128x128", "32x64x128", "32x128x128", "64x128x64", "64x64x128",
            "128x128x64",
        ),
        "split_k": (1, 2, 4, 8),
    },
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
)  # fmt: skip

BLOCK_SCALED = Implementation(
    entry="nvfp4_matmul",
    language="triton",
    variant="block_scaled",
    summary="W4A4: TMA of codes and swizzled scales, block-scaled tensor cores",
    archs=("sm_100a", "sm_103a", "sm_120a"),
    space={
        "stages": (4, 3, 2),
        "tile": ("128x128x256", "128x256x256", "256x128x256", "128x128x128"),
    },
    illegal=_illegal_block_scaled,
    unpromising=_unpromising_block_scaled,
    program=_block_scaled,
    estimate=_estimate_block_scaled,
    techniques={"tma": "UTMALDG", "block scales": "*OMMA"},
    rank=2,
    unverified="compiled, not run: needs a Blackwell GPU",
)

IMPLEMENTATIONS = (NAIVE, TILED, BLOCK_SCALED)
