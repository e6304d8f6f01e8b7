"""`nvfp4_matmul` in CuTe DSL: naive, tiled (weights decoded in registers), block_scaled (W4A4).

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
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
from kernelcat.kernels.cute.common.matmul import (
    exceeds_shared,
    illegal_naive,
    is_empty,
    naive_program,
    naive_us,
    sizes,
    span,
)
from kernelcat.reference.nvfp4_matmul import ENTRY, FP4, FP8, OUT
from kernelcat.runtime.gpu import Gpu

BLOCK_K = 128
"""Columns of A and W in a stage of `tiled`."""


def _constants(problem: Problem) -> dict[str, bool | str]:
    """Arguments that every kernel of the entry is made with."""
    return {
        "kind": problem["dtype"],
        "out": OUT.where(problem.values),
        "nvfp4": problem["format"] == "nvfp4",
        "bias": problem["bias"],
        "activation": problem["activation"],
    }


def _pointers(*names: str) -> tuple[Pointer, ...]:
    return tuple(map(Pointer, names))


def _illegal_float8(problem: Problem, gpu: Gpu) -> str | None:
    if problem["dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.arch} does not convert from {FP8}"
    return None


# naive ------------------------------------------------------------------------------------------


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _illegal_float8(problem, gpu) or illegal_naive(config, problem, gpu)


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    wide = "*" + OUT.where(problem.values)
    a = "*uint8" if problem["dtype"] in (FP8, FP4) else wide
    kinds = (a, "*uint8", "*uint8", "*float32", "*float32", "*uint8", wide, wide, *("int32",) * 3)
    constants = {**_constants(problem), "tiles": problem["packing"] == "tiles"}
    source = CuteSource("nvfp4_matmul.naive:Naive", kinds, tuple(constants.items()))
    names = ("a", "w", "w_scale", "global_scale", "a_scale", "a_block_scale", "bias", "d")
    params = (*_pointers(*names), *sizes(problem))
    return naive_program(source, problem, params, problem["N"] // span(problem))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return naive_us(problem, gpu, 0.005)


NAIVE = Implementation(
    entry="nvfp4_matmul",
    language="cute",
    variant="naive",
    summary="a thread for each element; any shape, either packing, every type of A",
    archs=("sm_80+",),
    space={},
    illegal=_illegal_naive,
    program=_naive_program,
    estimate=_naive_estimate,
    rank=0,
)

# tiled ------------------------------------------------------------------------------------------

MAX_PARTIALS_PER_SM = 8
"""Tiles of partial sums that split-K may leave, for each SM."""


def _num_tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["M"] / config["block_m"]) * ceil(problem["N"] / config["block_n"])


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Stages of codes and of A, sums with padded rows, and 1024 bytes for their alignment."""
    block_m, block_n = config["block_m"], config["block_n"]
    element_bytes = 1 if problem["dtype"] == FP8 else 2
    stage_bytes = BLOCK_K * (block_n // 2 + block_m * element_bytes)
    return int(stage_bytes * config["stages"] + 4 * block_m * (block_n + 4) + 1024)


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    n, k = problem["N"], problem["K"]
    unit = 8 * span(problem)
    if problem["packing"] == "tiles" or problem["dtype"] == FP4:
        return (
            f"packing={problem['packing']}, dtype={problem['dtype']}: `tiled` reads W in rows "
            f"with scales in linear order, and A in 8 or 16 bits"
        )
    if k == 0 or k % 32 or n % unit:
        return (
            f"rows are copied in whole 16-byte units: K={k} must be a multiple of 32 and not 0, "
            f"N={n} a multiple of {unit}"
        )
    return (
        exceeds_shared(_shared_bytes(problem, config), gpu)
        or _illegal_split(config, problem, gpu)
        or _illegal_float8(problem, gpu)
    )


def _illegal_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    split_k = config["split_k"]
    if split_k == 1:
        return None
    if config["block_m"] > 64:
        return "partial sums are added up by one warpgroup: tiles of 128 rows have two"
    num_partials = _num_tiles(problem, config) * split_k
    if num_partials > MAX_PARTIALS_PER_SM * gpu.sms:
        return (
            f"split_k={split_k} leaves partial sums of {num_partials} tiles: "
            f"at most {MAX_PARTIALS_PER_SM} for each SM"
        )
    if ceil(problem["K"] / BLOCK_K) < split_k:
        return f"K={problem['K']} has no k-block for each of split_k={split_k}"
    return None


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    m, k, block_m, split_k = problem["M"], problem["K"], config["block_m"], config["split_k"]
    smallest = min(128, max(8, 1 << (max(m, 1) - 1).bit_length()))
    if block_m not in (smallest, max(smallest // 2, 8)):
        return f"block_m={block_m}: {smallest}, or half of it, suits M={m}"
    num_stages = 3 if block_m == 128 else 4 if block_m >= 32 else 6
    if config["stages"] != num_stages:
        return f"tiles of {block_m} rows have {num_stages} stages: the larger the tile, the fewer"
    if split_k > 1 and k < 4 * BLOCK_K * split_k:
        return f"K={k} is too short for split_k={split_k}"
    return None


def _tiled_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    num_tiles, split_k = _num_tiles(problem, config), config["split_k"]
    wide, is_nvfp4 = "*" + OUT.where(problem.values), problem["format"] == "nvfp4"
    kinds = (
        "*uint32", "*uint32", "*uint16" if is_nvfp4 else "*uint8", "*float32", "*float32",
        wide, wide, "*float32", "*int32", *("int32",) * 4,
    )  # fmt: skip
    block_m, block_n = config["block_m"], config["block_n"]
    tile = {"block_m": block_m, "block_n": block_n, "num_stages": config["stages"]}
    constants = {**_constants(problem), **tile, "is_split": split_k > 1}
    source = CuteSource("nvfp4_matmul.tiled:Tiled", kinds, tuple(constants.items()))
    workspaces, scratch = {}, (Int64(0), Int64(0))
    if split_k > 1:
        partial_bytes = 4 * block_m * block_n * num_tiles * split_k
        workspaces = {"partial": partial_bytes, "counters": 4 * num_tiles}
        scratch = _pointers(*workspaces)
    names = ("a", "w", "w_scale", "global_scale", "a_scale", "bias", "d")
    params = (*_pointers(*names), *scratch, *sizes(problem), Int32(split_k))
    block = 256 if block_m == 128 else 128
    return Program((Step(source, (num_tiles, split_k, 1), params, block=block),), workspaces)


WEIGHTS_PER_SECOND = 22e9
"""Weights that an SM decodes in a second."""
PRODUCT_RATE = 0.2
"""Share of the tensor cores' peak that mma.sync reaches beside decoding."""
DECODE_OVERLAP = 0.3
"""Share of the shorter time, of decoding or of products, that the longer does not hide."""


def _tiled_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The longest of memory, decoding and products, on the SMs that have work."""
    if is_empty(problem):
        return LAUNCH_US
    m, n, k, split_k = problem["M"], problem["N"], problem["K"], config["split_k"]
    block_m, block_n = config["block_m"], config["block_n"]
    num_ctas = _num_tiles(problem, config) * split_k
    resident = max(1, min(8, gpu.shared_bytes // _shared_bytes(problem, config)))
    waves = ceil(num_ctas / (gpu.sms * resident))
    depth = ceil(k / split_k)
    decode_us = block_n * depth / WEIGHTS_PER_SECOND * 1e6
    math_us = 2 * block_m * block_n * depth / (gpu.flops["bfloat16"] / gpu.sms * PRODUCT_RATE) * 1e6
    tile_us = max(decode_us, math_us) + DECODE_OVERLAP * min(decode_us, math_us)
    busy_us = tile_us * ceil(num_ctas / gpu.sms)
    partial_bytes = 8 * m * n * split_k if split_k > 1 else 0
    idle = max(1.0, gpu.sms * min(resident, 4) / num_ctas) ** 0.5
    memory_us = copy_us(ENTRY.bytes_moved(problem) + partial_bytes, gpu, 0.8) * idle
    return max(busy_us, memory_us) + WAVE_LATENCY_US * (waves + (split_k > 1))


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
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled_program,
    estimate=_tiled_estimate,
    techniques={"cp.async": "LDGSTS", "mma.sync": "HMMA"},
    rank=1,
)

# block_scaled -----------------------------------------------------------------------------------

BLOCK_SCALED_TENSORS = ("a", "w", "a_block_scale", "w_scale", "global_scale", "bias", "d")


def _illegal_block_scaled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    n, k = problem["N"], problem["K"]
    unit = 8 * span(problem)
    if problem["dtype"] != FP4 or problem["packing"] != "rows":
        return (
            f"packing={problem['packing']}, dtype={problem['dtype']}: "
            f"block-scaled tensor cores take A in 4 bits, and TMA takes W in rows"
        )
    if k == 0 or k % 32:
        return f"TMA needs whole 16-byte units: K={k} must be a multiple of 32 and not 0"
    if n % unit:
        return f"D is stored in 16-byte units: N={n} must be a multiple of {unit}"
    if config["ctas"] == 2 and config["block_n"] == 64:
        return "a pair of SMs needs more than 64 rows of W"
    return None


def _unpromising_block_scaled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["ctas"] == 2 and problem["M"] <= 128:
        return f"the second SM of a pair has no rows at M={problem['M']}"
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
    num_tiles = ceil(problem["M"] / (128 * ctas)) * ceil(problem["N"] / config["block_n"])
    num_ctas = min(num_tiles, gpu.sms // ctas) * ctas
    params = (*_pointers(*BLOCK_SCALED_TENSORS), *sizes(problem), Int32(num_ctas))
    step = Step(source, (num_ctas, 1, 1), params, block=192, cluster=(ctas, 1, 1))
    return Program((step,))


def _block_scaled_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """A quarter of K in 16-bit elements takes as many bytes, and about as long to multiply.

    A GPU of SM pairs has half as many SMs, each twice as fast.
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
    illegal=_illegal_block_scaled,
    unpromising=_unpromising_block_scaled,
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
