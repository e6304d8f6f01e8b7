"""`nvfp4_matmul` in Triton: naive, tiled (weights decoded in registers), block_scaled (W4A4)."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.arguments import GROUP_M, Tile
from kernelcat.kernels.triton.gemm.variants import implementation, reject_naive
from kernelcat.reference._fp4 import block_of
from kernelcat.reference.nvfp4_matmul import ENTRY, FP4, FP8, OUT
from kernelcat.runtime.gpu import Gpu

MODULE = "kernelcat.kernels.triton.nvfp4_matmul."
KERNELS = MODULE + "device:"


def _is_empty(problem: Problem) -> bool:
    return problem["M"] == 0 or problem["N"] == 0


def _arguments(problem: Problem) -> dict[str, triton.Argument]:
    out = OUT.where(problem.values)
    types = {
        "a": "uint8" if problem["dtype"] == FP4 else problem["dtype"], "w": "uint8",
        "w_scale": "uint8", "global_scale": "float32", "a_scale": "float32",
        "a_block_scale": "uint8", "bias": out, "d": out,
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
        "CODED": problem["dtype"] == FP4,
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
    if problem["dtype"] == FP4:
        return "A in 4 bits is for tensor cores that take it"
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


def _block_scaled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    tile, known, sizes = Tile.of(config), _arguments(problem), _sizes(problem)
    size, half_k = block_of(problem.values), problem["K"] // 2
    element = "float8_e4m3fn" if problem["format"] == "nvfp4" else "uint8"
    scale_bytes = ceil(problem["K"] / size / 4) * 512

    def codes(name: str, rows: int, block: int) -> triton.Argument:
        return triton.descriptor(name, "uint8", (rows, half_k), (block, tile.k // 2))

    def scales(name: str, rows: int, block: int) -> triton.Argument:
        box = (block // 128, tile.k // size // 4 * 512)
        return triton.descriptor(name, element, (ceil(rows / 128), scale_bytes), box)

    step = triton.step(
        MODULE + "block_scaled:block_scaled",
        (tile.count(problem), 1, 1),
        {
            "a": codes("a", problem["M"], tile.m),
            "a_block_scale": scales("a_block_scale", problem["M"], tile.m),
            "w": codes("w", problem["N"], tile.n),
            "w_scale": scales("w_scale", problem["N"], tile.n),
            **{name: known[name] for name in ("global_scale", "bias", "d")},
            **sizes,
        },
        {
            **{name: _flags(problem)[name] for name in ("NVFP4", "HAS_BIAS", "ACTIVATION")},
            **tile.constants,
            "GROUP_M": GROUP_M,
        },
        num_warps=4 if tile.m == 128 else 8,
        num_stages=config["stages"],
    )
    return Program((step,))


def _reject_block_scaled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, k = Tile.of(config), problem["K"]
    if problem["dtype"] != FP4 or problem["packing"] != "rows":
        return "block-scaled tensor cores take A in 4 bits, and W in rows"
    if k % 32 or k == 0:
        return f"TMA needs whole 16-byte units: K={k} must be a multiple of 32 and not 0"
    stage = (tile.m + tile.n) * (tile.k // 2 + tile.k // block_of(problem.values))
    if stage * config["stages"] + 2048 > gpu.shared_bytes:
        return f"{config['stages']} stages of {stage} bytes are more than {gpu.sku} shares"
    if tile.m >= 2 * max(problem["M"], 128):
        return f"tiles of {tile.m} rows are at least half empty for M={problem['M']}"
    return None


def _estimate_block_scaled(problem: Problem, config: Config, gpu: Gpu) -> float:
    """As of 16 bits at a quarter of the depth: so many are the bytes, and the products' time."""
    tile = Tile.of(config)
    return cost_model.tiled_gemm_us(
        problem["M"], problem["N"], problem["K"] // 4, block_m=tile.m, block_n=tile.n, split_k=1,
        gpu=gpu, dtype="bfloat16", efficiency=0.6,
    )  # fmt: skip


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
    memory_us = cost_model.copy_us(ENTRY.bytes_moved(problem) + partials, gpu) * max(1.0, idle / 2)
    slow = 1.0 if "stages" in config else 4.0
    return slow * max(decode_us + math_us, memory_us) + cost_model.WAVE_LATENCY_US * waves


NAIVE = implementation(
    entry="nvfp4_matmul",
    variant="naive",
    summary="one small tile a program, weights decoded in registers, either packing",
    archs=("sm_80+",),
    space={"tile": ("16x32x32", "32x64x32")},
    illegal=_reject_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
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
    illegal=_reject_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
)  # fmt: skip

BLOCK_SCALED = implementation(
    entry="nvfp4_matmul",
    variant="block_scaled",
    summary="W4A4: TMA of codes and swizzled scales, block-scaled tensor cores",
    archs=("sm_100a", "sm_103a", "sm_120a"),
    space={
        "tile": ("128x128x256", "128x256x256", "256x128x256", "128x128x128"),
        "stages": (2, 3, 4),
    },
    illegal=_reject_block_scaled,
    program=_block_scaled,
    estimate=_estimate_block_scaled,
    techniques={"tma": "UTMALDG", "block scales": "*OMMA"},
    rank=2,
    unverified="compiled, not run: needs a Blackwell GPU",
)

IMPLEMENTATIONS = (NAIVE, TILED, BLOCK_SCALED)
