"""`paged_attn` in Triton: naive, tiled (prefill), split (decode in equal shares).

Blocks gather their tokens' rows through the block table by pointers, so that any page size serves.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, e, log2
from typing import Any

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.reference.paged_attn import ENTRY, FP8, NVFP4, cache_row, row_bytes, sm_scale
from kernelcat.runtime.gpu import Gpu

PACKAGE = "kernelcat.kernels.triton.paged_attn"
MAX_BATCH = 4096
"""Sequences whose lengths a program of `split` has in registers."""


def _group(problem: Problem) -> int:
    return int(problem["heads"] // problem["kv_heads"])


def _is_empty(problem: Problem) -> bool:
    return not problem["batch"] or not problem["tokens"]


def _dtype(name: str, dtype: str) -> str:
    """What Triton takes an array of ``dtype`` for: it has no NVFP4.

    Block scales are bytes since before sm_89 not even a null pointer may be of their type.
    """
    return "uint8" if dtype == NVFP4 or name.endswith("block_scale") else dtype


def _arrays(problem: Problem, tma_rows: int = 0) -> dict[str, triton.Argument]:
    """Every tensor of the entry, absent ones as null pointers.

    With ``tma_rows`` the caches are descriptors of matrices, loaded by so many tokens of a head.
    """
    arguments = {
        t.name: triton.pointer(t.name, _dtype(t.name, t.dtype_of(problem))) for t in ENTRY.tensors
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


def _tile(config: Config, tma: bool) -> dict[str, ConfigValue]:
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
    row_tiles = ceil(_rows(problem) / config["block_m"])
    step = triton.step(
        f"{PACKAGE}.device:tiled",
        (row_tiles, problem["kv_heads"], problem["batch"]),
        _arrays(problem, tma * config["block_n"]) | _numbers(problem),
        _constants(problem) | _tile(config, tma),
        num_warps=config["warps"],
    )
    return Program((step,))


def _split(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    programs, block_m, batch = config["per_sm"] * gpu.sms, config["block_m"], problem["batch"]
    workspaces = {
        "partials": 2 * programs * block_m * problem["head_dim"] * 4,
        "sums": 2 * programs * block_m * 2 * 4,
        "arrivals": batch * problem["kv_heads"] * 4,
    }
    pieces = {
        "partials": triton.pointer("partials", "float32"),
        "sums": triton.pointer("sums", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        "batch": triton.integer(batch, divisor=1),
    }
    step = triton.step(
        f"{PACKAGE}.split:split",
        (programs, 1, 1),
        _arrays(problem, tma * config["block_n"]) | pieces | _numbers(problem),
        _constants(problem)
        | _tile(config, tma)
        | {"BATCH": 1 << (batch - 1).bit_length(), "NUM_PROGRAMS": programs},
        num_warps=config["warps"],
    )
    return Program((step,), workspaces)


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["batch"] > 65535 or problem["heads"] > 65535:
        return "a grid's second and third axes have 65535 blocks at most"
    if problem["kv_dtype"] in (FP8, NVFP4) and int(gpu.arch[3:].rstrip("af")) < 89:
        return f"Triton converts no {FP8} on {gpu.arch}"
    return None


def _rows(problem: Problem) -> int:
    """Rows of a sequence and key-value head, at most."""
    return int(problem["max_q"] * _group(problem))


def _reject_tma(config: Config, problem: Problem) -> str | None:
    if problem["page_size"] < config["block_n"]:
        return f"pages of {problem['page_size']} tokens are less than a load of {config['block_n']}"
    if problem["pages"] * problem["page_size"] >= 1 << 31:
        return "more slots than a descriptor's 32-bit coordinates reach"
    return None


def _reject_tiled(tma: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, block_n, dim = config["block_m"], config["block_n"], problem["head_dim"]
    if block_m > 16 and block_m >= 2 * _rows(problem):
        return f"tiles of {block_m} rows are at least half empty for {_rows(problem)}"
    if tma and (reason := _reject_tma(config, problem)):
        return reason
    stage = 2 * block_n * row_bytes(problem)
    widened = 2 * block_n * dim if problem["kv_dtype"] == NVFP4 else 0
    if stage * config["stages"] + 2 * block_m * dim + widened > gpu.shared_bytes:
        return f"{config['stages']} stages of {stage} bytes do not fit in shared memory"
    if block_m * (dim + block_n) > 128 * 32 * config["warps"]:
        return f"{config['warps']} warps have no registers for {block_m} x ({dim} + {block_n})"
    return _reject(config, problem, gpu)


def _reject_split(tma: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["block_m"] < _rows(problem):
        return f"{_rows(problem)} rows are more than a tile of {config['block_m']}"
    if problem["batch"] > MAX_BATCH:
        return f"more than {MAX_BATCH} sequences"
    return _reject_tiled(tma, config, problem, gpu)


def _work_us(problem: Problem, gpu: Gpu, busy: float) -> float:
    """Bytes or products, whichever takes longer, on a share ``busy`` of the chip."""
    math_us = ENTRY.flops(problem) / (gpu.flops[problem["dtype"]] * 0.5 * busy) * 1e6
    return max(cost_model.copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * busy), math_us)


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    return 50 * _group(problem) * _work_us(problem, gpu, 1.0)


def _estimate_tiled(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows = _rows(problem)
    programs = ceil(rows / config["block_m"]) * problem["kv_heads"] * problem["batch"]
    filled = min(1.0, rows / config["block_m"], config["block_m"] / 64 if rows > 64 else 1.0)
    return _work_us(problem, gpu, max(min(1.0, programs / gpu.sms) * filled, 1e-3))


def _estimate_split(problem: Problem, config: Config, gpu: Gpu) -> float:
    in_flight = config["per_sm"] * config["stages"] * config["block_n"] * problem["head_dim"] * 4
    return _work_us(problem, gpu, min(1.0, 0.3 + in_flight / (96 * 1024))) + 1.0


ARCHS = ("sm_80+",)

NAIVE = implementation(
    entry="paged_attn",
    variant="naive",
    summary="one query token and head a program; any shape",
    archs=ARCHS,
    space={},
    illegal=_reject,
    program=_naive,
    estimate=_estimate_naive,
    rank=0,
)

TILES = {"block_m": (128, 64, 16), "block_n": (64, 128, 32), "stages": (2, 3, 4), "warps": (4, 8)}
SHARES = {
    "block_m": (16, 32, 64, 128), "block_n": (64, 128, 32), "stages": (3, 2, 4, 5, 6),
    "warps": (4, 8), "per_sm": (2, 1, 3, 4),
}  # fmt: skip


def _variant(
    variant: str,
    tma: bool,
    space: dict[str, tuple[int, ...]],
    illegal: Callable[..., str | None],
    program: Callable[..., Program],
    **fields: Any,
) -> Implementation:
    """``illegal`` and ``program`` are told first whether tiles are loaded by TMA."""
    return implementation(
        entry="paged_attn",
        variant=variant,
        archs=("sm_90a",) if tma else ARCHS,
        space=space,
        illegal=partial(illegal, tma),
        program=partial(program, tma),
        techniques={"tma": "UTMALDG"} if tma else {"asynchronous copy": "LDGSTS"},
        **fields,
    )


_tiles = partial(
    _variant, space=TILES, illegal=_reject_tiled, program=_tiled, estimate=_estimate_tiled
)
_shares = partial(
    _variant, space=SHARES, illegal=_reject_split, program=_split, estimate=_estimate_split
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    NAIVE,
    _tiles("tiled", False, rank=1, summary="a tile of packed rows over all that they see"),
    _tiles("tma", True, rank=2, summary="tiled, where pages are large enough to load by TMA"),
    _shares("split_tma", True, rank=3, summary="split, where pages are large enough for TMA"),
    _shares("split", False, rank=4, summary="equal shares of all tiles, pieces merged at the end"),
)
