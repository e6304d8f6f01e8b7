"""`paged_attn` in Triton: naive, tiled (for prefill), split (for decode, in equal ranges).

Programs gather the rows of cached tokens by pointers through the block table, so that any page size
serves. Where pages are no smaller than a tile, TMA loads them instead: tma and split_tma.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, e, log2
from typing import Any

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference._kv_cache import FP8, NVFP4, cache_row, row_bytes
from kernelcat.reference.paged_attn import ENTRY, sm_scale
from kernelcat.runtime.gpu import Gpu

PACKAGE = "kernelcat.kernels.triton.paged_attn"
MAX_BATCH = 4096
"""Sequences at most whose lengths a program of `split` holds in registers."""


def _group(problem: Problem) -> int:
    """Query heads that share a key-value head."""
    return int(problem["heads"] // problem["kv_heads"])


def _max_rows(problem: Problem) -> int:
    """Rows that a sequence has at most for one key-value head: query tokens and their heads."""
    return int(problem["max_q"] * _group(problem))


def _is_empty(problem: Problem) -> bool:
    return not problem["batch"] or not problem["tokens"]


def _dtype(name: str, dtype: str) -> str:
    """Triton's type of the elements of array ``name``: bytes for NVFP4, which Triton lacks.

    Block scales are bytes too: before sm_89 Triton compiles not even a null pointer to float8.
    """
    return "uint8" if dtype == NVFP4 or name.endswith("block_scale") else dtype


def _arrays(problem: Problem, tma_rows: int = 0) -> dict[str, triton.Argument]:
    """Every tensor of the entry, null pointers for absent ones.

    With ``tma_rows`` the caches are descriptors, and a load has ``tma_rows`` tokens of one head.
    """
    arguments = {
        tensor.name: triton.pointer(tensor.name, _dtype(tensor.name, tensor.dtype_of(problem)))
        for tensor in ENTRY.tensors
    }
    if tma_rows:
        dtype, row = _dtype("k_cache", problem["kv_dtype"]), cache_row(problem.values)
        shape = (problem["pages"] * problem["page_size"], problem["kv_heads"] * row)
        for name in ("k_cache", "v_cache"):
            arguments[name] = triton.descriptor(name, dtype, shape, (tma_rows, row))
    return arguments


def _numbers(problem: Problem) -> dict[str, triton.Argument]:
    scale = sm_scale(problem) * log2(e)
    return {
        "width": triton.integer(problem["table_width"], divisor=1),
        "window": triton.integer(problem["window"], divisor=1),
        "scale": triton.real(scale),
        "softcap": triton.real(problem["softcap"]),
    }


def _constants(problem: Problem) -> dict[str, ConfigValue]:
    return {
        "GROUP": _group(problem),
        "KV_HEADS": problem["kv_heads"],
        "HEAD_DIM": problem["head_dim"],
        "PAGE_SIZE": problem["page_size"],
        "WINDOW": problem["window"] > 0,
        "SOFTCAP": problem["softcap"] > 0,
        "HAS_SINKS": problem["has_sinks"],
        "HAS_SCALES": problem["has_scales"],
        "PAGE_SCALES": problem["page_scales"],
        "NVFP4": problem["kv_dtype"] == NVFP4,
    }


def _tile_constants(config: Config, tma: bool) -> dict[str, ConfigValue]:
    return {
        "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], "STAGES": config["stages"],
        "TMA": tma,
    }  # fmt: skip


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    max_q = {"max_q": triton.integer(problem["max_q"], divisor=1)}
    step = triton.step(
        f"{PACKAGE}.device:naive",
        (problem["batch"] * problem["max_q"], problem["heads"], 1),
        _arrays(problem) | max_q | _numbers(problem),
        _constants(problem),
        num_warps=4,
    )
    return Program((step,))


def _tiled(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    row_tiles = ceil(_max_rows(problem) / config["block_m"])
    step = triton.step(
        f"{PACKAGE}.device:tiled",
        (row_tiles, problem["kv_heads"], problem["batch"]),
        _arrays(problem, tma * config["block_n"]) | _numbers(problem),
        _constants(problem) | _tile_constants(config, tma),
        num_warps=config["warps"],
    )
    return Program((step,))


def _split(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    num_programs, block_m, batch = config["per_sm"] * gpu.sms, config["block_m"], problem["batch"]
    partial_rows = 2 * num_programs * block_m
    workspaces = {
        "partials": 4 * partial_rows * problem["head_dim"],
        "sums": 4 * partial_rows * 2,
        "arrivals": 4 * batch * problem["kv_heads"],
    }
    partials = {
        "partials": triton.pointer("partials", "float32"),
        "sums": triton.pointer("sums", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        "batch": triton.integer(batch, divisor=1),
    }
    step = triton.step(
        f"{PACKAGE}.split:split",
        (num_programs, 1, 1),
        _arrays(problem, tma * config["block_n"]) | partials | _numbers(problem),
        _constants(problem)
        | _tile_constants(config, tma)
        | {"BATCH": next_power_of_two(batch), "NUM_PROGRAMS": num_programs},
        num_warps=config["warps"],
    )
    return Program((step,), workspaces)


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    for axis in ("batch", "heads"):
        if problem[axis] > MAX_GRID_Y:
            return f"{axis}={problem[axis]} is more than {MAX_GRID_Y}, the most on a grid's axis"
    return illegal_float8(gpu) if problem["kv_dtype"] in (FP8, NVFP4) else None


def _illegal_tma(config: Config, problem: Problem) -> str | None:
    page_size, block_n = problem["page_size"], config["block_n"]
    if page_size < block_n:
        return f"page_size={page_size} must be at least block_n={block_n}: TMA loads from one page"
    if problem["pages"] * page_size >= 1 << 31:
        return "the slots of all pages are more than a descriptor's 32-bit coordinates reach"
    return None


def _illegal_tiled(tma: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_n, stages, dim = config["block_n"], config["stages"], problem["head_dim"]
    if tma and (reason := _illegal_tma(config, problem)):
        return reason
    stage_bytes = 2 * block_n * row_bytes(problem)
    q_bytes = 2 * config["block_m"] * dim
    decoded_bytes = 2 * block_n * dim if problem["kv_dtype"] == NVFP4 else 0
    if stage_bytes * stages + q_bytes + decoded_bytes > gpu.shared_bytes:
        return (
            f"{stages} stages of {stage_bytes} bytes and tiles of {q_bytes + decoded_bytes} bytes "
            f"do not fit in shared memory: {gpu.sku} has {gpu.shared_bytes} bytes"
        )
    return _illegal(config, problem, gpu)


def _illegal_split(tma: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["block_m"] < _max_rows(problem):
        return f"{_max_rows(problem)} rows are more than a tile of block_m={config['block_m']}"
    if problem["batch"] > MAX_BATCH:
        return f"batch={problem['batch']} must be at most {MAX_BATCH}"
    return _illegal_tiled(tma, config, problem, gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, block_n, dim = config["block_m"], config["block_n"], problem["head_dim"]
    if block_m > 16 and block_m >= 2 * _max_rows(problem):
        return f"tiles of {block_m} rows are at least half empty for {_max_rows(problem)}"
    if block_m * (dim + block_n) > 128 * 32 * config["warps"]:
        return (
            f"{config['warps']} warps spill registers for a tile of {block_m} x ({dim} + {block_n})"
        )
    return None


# ---- estimates -----------------------------------------------------------------------------------


def _work_us(problem: Problem, gpu: Gpu, busy: float) -> float:
    """Time of bytes or of products, the longer one, where a fraction ``busy`` of the SMs works."""
    math_us = ENTRY.flops(problem) / (gpu.flops[problem["dtype"]] * 0.5 * busy) * 1e6
    return max(cost_model.copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * busy), math_us)


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    return 50 * _group(problem) * _work_us(problem, gpu, 1.0)


def _estimate_tiled(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows = _max_rows(problem)
    programs = ceil(rows / config["block_m"]) * problem["kv_heads"] * problem["batch"]
    filled = min(1.0, rows / config["block_m"], config["block_m"] / 64 if rows > 64 else 1.0)
    return _work_us(problem, gpu, max(min(1.0, programs / gpu.sms) * filled, 1e-3))


def _estimate_split(problem: Problem, config: Config, gpu: Gpu) -> float:
    in_flight = config["per_sm"] * config["stages"] * config["block_n"] * problem["head_dim"] * 4
    return _work_us(problem, gpu, min(1.0, 0.3 + in_flight / (96 * 1024))) + 1.0


ARCHS = ("sm_80+",)

NAIVE = Implementation(
    entry="paged_attn",
    language="triton",
    variant="naive",
    summary="one query token and head a program; any shape",
    archs=ARCHS,
    space={},
    illegal=_illegal,
    program=_naive,
    estimate=_estimate_naive,
    rank=0,
)

# The first of equal estimates is the default: the most stages, which therefore come first.
TILED_SPACE = {
    "stages": (4, 3, 2), "block_m": (128, 64, 16), "block_n": (64, 128, 32), "warps": (4, 8),
}  # fmt: skip
SPLIT_SPACE = {
    "stages": (6, 5, 4, 3, 2), "block_m": (16, 32, 64, 128), "block_n": (64, 128, 32),
    "warps": (4, 8), "per_sm": (2, 1, 3, 4),
}  # fmt: skip


def _variant(
    variant: str,
    tma: bool,
    illegal: Callable[..., str | None],
    program: Callable[..., Program],
    **fields: Any,
) -> Implementation:
    """``illegal`` and ``program`` take as their first argument whether TMA loads the tiles."""
    return Implementation(
        entry="paged_attn",
        language="triton",
        variant=variant,
        archs=("sm_90a",) if tma else ARCHS,
        illegal=partial(illegal, tma),
        unpromising=_unpromising,
        program=partial(program, tma),
        techniques={"tma": "UTMALDG"} if tma else {"asynchronous copy": "LDGSTS"},
        **fields,
    )


_tiled_variant = partial(
    _variant, space=TILED_SPACE, illegal=_illegal_tiled, program=_tiled, estimate=_estimate_tiled
)
_split_variant = partial(
    _variant, space=SPLIT_SPACE, illegal=_illegal_split, program=_split, estimate=_estimate_split
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    NAIVE,
    _tiled_variant(
        "tiled", False, rank=1, summary="a tile of tokens and heads over all of its visible keys"
    ),
    _tiled_variant(
        "tma", True, rank=2, summary="tiled, with TMA where pages are no smaller than a tile"
    ),
    _split_variant(
        "split_tma", True, rank=3, summary="split, with TMA where pages are no smaller than a tile"
    ),
    _split_variant(
        "split", False, rank=4,
        summary="an equal range of all tiles a program, partial results merged at the end",
    ),
)  # fmt: skip
