"""`paged_attn` in CuTe DSL: a warp for each query, and flash-decoding on tensor cores.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.jit.cute import CuteSource
from kernelcat.model import LAUNCH_US, TENSOR_EFFICIENCY, WAVE_LATENCY_US, copy_us
from kernelcat.reference.paged_attn import ENTRY, lengths, sm_scale
from kernelcat.spec import Problem

FP8 = "float8_e4m3fn"
TENSORS = (
    "q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q", "sinks", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip


def _constants(problem: Problem) -> dict[str, int | str | bool]:
    """What is compiled in."""
    scales = "page" if problem["page_scales"] else "tensor"
    return {
        "dtype": problem["dtype"],
        "fp8": problem["kv_dtype"] == FP8,
        "head_dim": problem["head_dim"],
        "page_size": problem["page_size"],
        "window": problem["window"] > 0,
        "softcap": problem["softcap"] > 0,
        "sinks": problem["has_sinks"],
        "scales": scales if problem["has_scales"] else "none",
    }


def _kinds(problem: Problem) -> tuple[str, ...]:
    """Of the tensors; float8 as bytes."""
    dtype = "*" + problem["dtype"]
    cache = "*uint8" if problem["kv_dtype"] == FP8 else dtype
    return (dtype, cache, cache, *["*int32"] * 3, *["*float32"] * 3, dtype, "*float32")


def _params(problem: Problem, scratch: tuple[Param, ...], *numbers: int) -> tuple[Param, ...]:
    """Tensors, sizes, what a variant wants to know besides, and the numbers of the softmax."""
    sizes = (problem[name] for name in ("batch", "tokens", "heads", "kv_heads", "table_width"))
    return (
        *map(Pointer, TENSORS),
        *scratch,
        *map(Int32, sizes),
        *map(Int32, numbers),
        Int32(problem["window"]),
        Float32(sm_scale(problem)),
        Float32(float(problem["softcap"])),
    )


def _is_empty(problem: Problem) -> bool:
    return problem["batch"] == 0 or problem["tokens"] == 0


def _why_not(problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8"
    if max(problem["pages"], problem["table_width"] + 1) * problem["page_size"] >= 1 << 31:
        return "more slots than 32-bit indices reach"
    return None


# naive ------------------------------------------------------------------------------------------

NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    kinds = (*_kinds(problem), *["int32"] * 6, "float32", "float32")
    source = CuteSource("paged_attn.naive:Naive", kinds, tuple(_constants(problem).items()))
    grid = (problem["tokens"], ceil(problem["heads"] / NAIVE_WARPS), 1)
    return Program((Step(source, grid, _params(problem, ()), block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="paged_attn",
    language="cute",
    variant="naive",
    summary="one warp, one query of one head, key after key; any shape",
    archs=("sm_80+",),
    space={},
    reject=lambda config, problem, gpu: _why_not(problem, gpu),
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
    unverified="not yet run on a GPU",
)

# split ------------------------------------------------------------------------------------------

THREADS = 128


def _row_tiles(problem: Problem, config: Config) -> int:
    """Tiles of the rows of one key-value head, of the longest sequence."""
    return ceil(problem["max_q"] * problem["heads"] // problem["kv_heads"] / config["block_m"])


def _split_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    splits, row_tiles = config["splits"], _row_tiles(problem, config)
    constants = _constants(problem) | {
        "block_m": config["block_m"],
        "block_n": config["block_n"],
        "stages": config["stages"],
        "split": splits > 1,
    }
    kinds = (*_kinds(problem), "*float32", "*int32", *["int32"] * 8, "float32", "float32")
    source = CuteSource("paged_attn.split:Split", kinds, tuple(constants.items()))
    grid = (row_tiles * problem["kv_heads"] * splits, problem["batch"], 1)
    workspaces: dict[str, int] = {}
    scratch: tuple[Param, ...] = (Int64(0), Int64(0))
    if splits > 1:
        tiles = row_tiles * problem["kv_heads"] * problem["batch"]
        row_bytes = 4 * (problem["head_dim"] + 4)
        workspaces = {
            "partial": tiles * splits * config["block_m"] * row_bytes,
            "counters": 4 * tiles,
        }
        scratch = tuple(Pointer(name) for name in workspaces)
    params = _params(problem, scratch, row_tiles, splits)
    return Program((Step(source, grid, params, block=THREADS),), workspaces)
