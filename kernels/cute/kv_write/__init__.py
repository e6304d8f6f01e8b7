"""`kv_write` in CuTe DSL: one element at a time, or vectors of 16 bytes of several heads.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.common.cache_write import write_us
from kernelcat.kernels.cute.common.paged_cache import scales
from kernelcat.reference.kv_write import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

THREAD_ELEMENTS = 16
"""Elements of a row that a thread of `vectorized` takes: two vectors of 16 bytes."""
NAIVE_WARPS = 4
SIZES = ("tokens", "batch", "heads", "kv_heads", "table_width", "rotary_dim")


def _num_rows(problem: Problem) -> int:
    """Rows of a token: the heads of its keys, values and queries."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _program(
    problem: Problem, kernel: str, float8: str, config: Config, block_rows: int, threads: int
) -> Program:
    """One launch, in thread blocks of ``block_rows`` rows of a token.

    ``float8`` is the kind of parameter by which the kernel writes caches of float8.
    """
    if not problem["tokens"]:
        return Program(())
    kinds = {"kv_dtype": float8} if problem["kv_dtype"] == FP8 else {}
    tensors = ["*" + str(kinds.get(t.dtype, t.dtype_of(problem))) for t in ENTRY.tensors]
    constants = {
        "dtype": problem["dtype"],
        "fp8": problem["kv_dtype"] == FP8,
        "head_dim": problem["head_dim"],
        "page_size": problem["page_size"],
        "interleaved": problem["style"] == "interleaved",
        "scales": scales(problem),
        **config,
    }
    source = CuteSource(kernel, (*tensors, *["int32"] * len(SIZES)), tuple(constants.items()))
    params = (
        *(Pointer(tensor.name) for tensor in ENTRY.tensors),
        *(Int32(problem[size]) for size in SIZES),
    )
    grid = (problem["tokens"], ceil(_num_rows(problem) / block_rows), 1)
    return Program((Step(source, grid, params, block=threads),))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8: kv_dtype must be the dtype of keys and values"
    if _num_rows(problem) >= 65536:
        return f"{_num_rows(problem)} rows of a token may need more than a grid's 65535 blocks in y"
    return None


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel = "kv_write.naive:Naive"
    return _program(problem, kernel, "uint8", config, NAIVE_WARPS, 32 * NAIVE_WARPS)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.25)


# vectorized -------------------------------------------------------------------------------------

SPACE = {"threads": (64, 128, 256), "unroll": (1, 2, 4)}
"""``unroll`` is the number of rows that a thread has in flight."""


def _block_rows(problem: Problem, config: Config) -> int:
    """Rows of a thread block."""
    return int(config["threads"] * THREAD_ELEMENTS // problem["head_dim"] * config["unroll"])


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rotary_dim = problem["rotary_dim"]
    if rotary_dim % THREAD_ELEMENTS:
        return f"half of rotary_dim={rotary_dim} must be a multiple of the 8 elements in 16 bytes"
    return _illegal(config, problem, gpu)


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_rows, rows = _block_rows(problem, config), _num_rows(problem)
    is_smallest = config["threads"] == min(SPACE["threads"]) and config["unroll"] == 1
    if not is_smallest and block_rows >= 2 * rows:
        return f"thread blocks of {block_rows} rows are at least half empty for {rows} rows"
    return None


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel, block_rows = "kv_write.vectorized:Vectorized", _block_rows(problem, config)
    return _program(problem, kernel, "uint32", config, block_rows, config["threads"])


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    num_ctas = problem["tokens"] * ceil(_num_rows(problem) / _block_rows(problem, config))
    bytes_moved, unroll_us = ENTRY.bytes_moved(problem), 0.1 * config["unroll"]
    return write_us(bytes_moved, num_ctas, config["threads"], unroll_us, gpu)


IMPLEMENTATIONS = (
    Implementation(
        entry="kv_write",
        language="cute",
        variant="naive",
        summary="one warp per head of a token, one element at a time; any shape",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive_program,
        estimate=_naive_estimate,
        techniques={"vote": "VOTE"},
        rank=0,
    ),
    Implementation(
        entry="kv_write",
        language="cute",
        variant="vectorized",
        summary="16-byte loads and stores, whole pairs per thread, several heads per thread block",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal_vectorized,
        unpromising=_unpromising_vectorized,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG.E.128", "vector store": "STG.E.128", "vote": "VOTE"},
        rank=1,
    ),
)
