"""`nvfp4_matmul` in CuTe DSL: naive, tiled (weights decoded in registers), block_scaled (W4A4).

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, WAVE_LATENCY_US, copy_us, tiled_gemm_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest, is_empty, span, why_not_naive
from kernelcat.reference.nvfp4_matmul import ENTRY, FP4, FP8, OUT
from kernelcat.runtime.gpu import Gpu

BLOCK_K = 128


def _constants(problem: Problem) -> dict[str, bool | str]:
    return {
        "kind": problem["dtype"],
        "out": OUT.where(problem.values),
        "nvfp4": problem["format"] == "nvfp4",
        "bias": problem["bias"],
        "activation": problem["activation"],
    }


def _pointers(*names: str) -> tuple[Pointer, ...]:
    return tuple(map(Pointer, names))


def _sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


def _why_not_float8(problem: Problem, gpu: Gpu) -> str | None:
    if problem["dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.arch} does not convert from {FP8}"
    return None


# naive ------------------------------------------------------------------------------------------


def _naive_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _why_not_float8(problem, gpu) or why_not_naive(config, problem, gpu)


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    wide = "*" + OUT.where(problem.values)
    a = "*uint8" if problem["dtype"] in (FP8, FP4) else wide
    kinds = (a, "*uint8", "*uint8", "*float32", "*float32", "*uint8", wide, wide, *("int32",) * 3)
    constants = {**_constants(problem), "tiles": problem["packing"] == "tiles"}
    source = CuteSource("nvfp4_matmul.naive:Naive", kinds, tuple(constants.items()))
    names = ("a", "w", "w_scale", "global_scale", "a_scale", "a_block_scale", "bias", "d")
    grid = (ceil(problem["N"] / span(problem) / 16), ceil(problem["M"] / 16), 1)
    return Program((Step(source, grid, (*_pointers(*names), *_sizes(problem)), block=256),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    work = 2 * problem["M"] * problem["N"] * problem["K"]
    return LAUNCH_US + work / (0.005 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="nvfp4_matmul",
    language="cute",
    variant="naive",
    summary="one thread, one element; any shape, either packing, every type of A",
    archs=("sm_80+",),
    space={},
    illegal=_naive_reject,
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    rank=0,
)

# tiled ------------------------------------------------------------------------------------------


def _tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / config["block_m"]) * ceil(problem["N"] / config["block_n"])


def _shared_bytes(problem: Problem, config: Config) -> int:
    block_m, block_n = config["block_m"], config["block_n"]
    element = 1 if problem["dtype"] == FP8 else 2
    stage = BLOCK_K * (block_n // 2 + block_m * element)
    return int(stage * config["stages"] + 4 * block_m * (block_n + 4) + 1024)


def _tiled_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    n, k = problem["N"], problem["K"]
    if problem["packing"] == "tiles" or problem["dtype"] == FP4:
        return "a lane reads 32 neighbouring weights of a row, and their linear scales"
    if k == 0 or k % 32 or n % (8 * span(problem)):
        return f"whole 16-byte units are copied: K={k} by 32, not 0, N={n} by {8 * span(problem)}"
    shared = _shared_bytes(problem, config)
    if shared > gpu.shared_bytes:
        return f"{shared} bytes of shared memory are more than the {gpu.shared_bytes} of {gpu.sku}"
    return _unfit(config, problem, gpu) or _why_not_float8(problem, gpu)


def _unfit(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why a tile or a split does not suit a problem's sizes."""
    m, k, block_m, split = problem["M"], problem["K"], config["block_m"], config["split_k"]
    smallest = min(128, max(8, 1 << (max(m, 1) - 1).bit_length()))
    if block_m not in (smallest, max(smallest // 2, 8)):
        return f"tiles of {block_m} rows do not suit M={m}"
    if config["stages"] != (3 if block_m == 128 else 4 if block_m >= 32 else 6):
        return "large tiles have fewer stages"
    if split > 1 and (block_m > 64 or _tiles(problem, config) * split > 8 * gpu.sms):
        return f"split_k={split} is for few tiles of at most 64 rows"
    if split > 1 and k < 4 * BLOCK_K * split:
        return f"K={k} is too short for split_k={split}"
    return None


def _tiled_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tiles, split = _tiles(problem, config), config["split_k"]
    wide, nvfp4 = "*" + OUT.where(problem.values), problem["format"] == "nvfp4"
    kinds = (
        "*uint32", "*uint32", "*uint16" if nvfp4 else "*uint8", "*float32", "*float32", wide, wide,
        "*float32", "*int32", *("int32",) * 4,
    )  # fmt: skip
    named = {name: config[name] for name in ("block_m", "block_n", "stages")}
    constants = {**_constants(problem), **named, "split": split > 1}
    source = CuteSource("nvfp4_matmul.tiled:Tiled", kinds, tuple(constants.items()))
    workspaces, scratch = {}, (Int64(0), Int64(0))
    if split > 1:
        sums = 4 * config["block_m"] * config["block_n"] * tiles * split
        workspaces = {"partial": sums, "counters": 4 * tiles}
        scratch = _pointers(*workspaces)
    names = ("a", "w", "w_scale", "global_scale", "a_scale", "bias", "d")
    params = (*_pointers(*names), *scratch, *_sizes(problem), Int32(split))
    block = 256 if config["block_m"] == 128 else 128
    return Program((Step(source, (tiles, split, 1), params, block=block),), workspaces)


DECODES_A_SECOND = 8e9
"""Weights that an SM decodes."""


def _tiled_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, decoding and products, whichever is longest, over the SMs that have work."""
    if is_empty(problem):
        return LAUNCH_US
    m, n, k, split = problem["M"], problem["N"], problem["K"], config["split_k"]
    block_m, block_n = config["block_m"], config["block_n"]
    ctas = _tiles(problem, config) * split
    resident = max(1, min(8, gpu.shared_bytes // _shared_bytes(problem, config)))
    waves = ceil(ctas / (gpu.sms * resident))
    depth = ceil(k / split)
    decode_us = block_n * depth / DECODES_A_SECOND * 1e6
    math_us = 2 * block_m * block_n * depth / (gpu.flops["bfloat16"] / gpu.sms * 0.5) * 1e6
    busy_us = max(decode_us, math_us) * ceil(ctas / gpu.sms)
    partial = 8 * m * n * split if split > 1 else 0
    idle = max(1.0, gpu.sms * min(resident, 4) / ctas) ** 0.5
    memory_us = copy_us(ENTRY.bytes_moved(problem) + partial, gpu, 0.8) * idle
    return max(busy_us, memory_us) + WAVE_LATENCY_US * (waves + (split > 1))


TILED = Implementation(
    entry="nvfp4_matmul",
    language="cute",
    variant="tiled",
    summary="cp.async stages, codes decoded in registers, transposed mma.sync, split-K",
    archs=("sm_80+",),
    space={
        "block_m": (8, 16, 32, 64, 128),
        "block_n": (128, 64),
        "stages": (3, 4, 6),
        "split_k": (1, 2, 4, 8, 16),
    },
    illegal=_tiled_reject,
    default=fastest(lambda: TILED),
    program=_tiled_program,
    estimate=_tiled_estimate,
    techniques={"cp.async": "LDGSTS", "mma.sync": "HMMA"},
    rank=1,
)

# block_scaled -----------------------------------------------------------------------------------

BLOCK_SCALED_TENSORS = ("a", "w", "a_block_scale", "w_scale", "global_scale", "bias", "d")


def _block_scaled_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    m, n, k = problem["M"], problem["N"], problem["K"]
    if problem["dtype"] != FP4 or problem["packing"] != "rows":
        return "block-scaled tensor cores take A in 4 bits, and W in rows"
    if k == 0 or k % 32:
        return f"TMA needs whole 16-byte units: K={k} must be a multiple of 32 and not 0"
    if n % (8 * span(problem)):
        return f"D is stored in 16-byte units: N={n} must be a multiple of {8 * span(problem)}"
    if config["ctas"] == 2 and config["block_n"] == 64:
        return "64 rows of W are too few for a pair of SMs"
    if config["ctas"] == 2 and m <= 128:
        return f"the second SM of a pair has no rows at M={m}"
    return None


def _block_scaled_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    wide, ctas = "*" + OUT.where(problem.values), config["ctas"]
    kinds = (*("*uint8",) * 4, "*float32", wide, wide, *("int32",) * 4)
    constants = {name: value for name, value in _constants(problem).items() if name != "kind"}
    source = CuteSource(
        "nvfp4_matmul.block_scaled:BlockScaled", kinds, tuple((constants | {**config}).items())
    )
    tiles = ceil(problem["M"] / (128 * ctas)) * ceil(problem["N"] / config["block_n"])
    num_ctas = min(tiles, gpu.sms // ctas) * ctas
    params = (*_pointers(*BLOCK_SCALED_TENSORS), *_sizes(problem), Int32(num_ctas))
    step = Step(source, (num_ctas, 1, 1), params, block=192, cluster=(ctas, 1, 1))
    return Program((step,))


def _block_scaled_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """As of 16 bits at a quarter of the depth: so many are the bytes, and the products' time.

    A pair of SMs is one of half as many, twice as fast.
    """
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"] // 4,
        block_m=128 * config["ctas"],
        block_n=config["block_n"],
        split_k=1,
        gpu=replace(gpu, sms=gpu.sms // config["ctas"]),
        dtype="bfloat16",
        efficiency=0.7,
    )


BLOCK_SCALED = Implementation(
    entry="nvfp4_matmul",
    language="cute",
    variant="block_scaled",
    summary="Blackwell, W4A4, persistent: TMA of codes and swizzled scales, block-scaled tcgen05",
    archs=("sm_100a",),
    space={"block_n": (256, 128, 64), "ctas": (2, 1)},
    illegal=_block_scaled_reject,
    default=fastest(lambda: BLOCK_SCALED),
    program=_block_scaled_program,
    estimate=_block_scaled_estimate,
    techniques={
        "tma": "UTMALDG",
        "block scales": "UTCOMMA",
        "scales to tensor memory": "UTCCP",
        "tensor memory": "LDTM",
    },
    rank=2,
    unverified="needs a Blackwell GPU",
)

IMPLEMENTATIONS = (NAIVE, TILED, BLOCK_SCALED)
