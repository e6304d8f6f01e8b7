"""`kv_write` in CuTe DSL: element by element, and in vectors of 16 bytes.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest
from kernelcat.reference.kv_write import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

HELD = 16
"""Elements of a row that a thread of `vectorized` has."""
NAIVE_WARPS = 4
SIZES = ("tokens", "batch", "heads", "kv_heads", "table_width", "rotary_dim")
RESIDENT = 1024
"""Threads that an SM runs at once."""
WAIT_US = 2.0
"""From a row's load to its store: a sequence is looked up, then a position, a page and angles."""


def _rows(problem: Problem) -> int:
    """Heads of a token's keys, values and queries."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _program(
    problem: Problem, kernel: str, float8: str, config: Config, block_rows: int, threads: int
) -> Program:
    """``float8`` is what the kernel takes caches of float8 as."""
    if not problem["tokens"]:
        return Program(())
    kinds = {"kv_dtype": float8} if problem["kv_dtype"] == FP8 else {}
    tensors = ["*" + str(kinds.get(t.dtype, t.dtype_of(problem))) for t in ENTRY.tensors]
    scales = "page" if problem["page_scales"] else "tensor"
    constants = {
        "dtype": problem["dtype"],
        "fp8": problem["kv_dtype"] == FP8,
        "head_dim": problem["head_dim"],
        "page_size": problem["page_size"],
        "interleaved": problem["style"] == "interleaved",
        "scales": scales if problem["has_scales"] else "none",
        **config,
    }
    source = CuteSource(kernel, (*tensors, *["int32"] * len(SIZES)), tuple(constants.items()))
    params = (
        *(Pointer(tensor.name) for tensor in ENTRY.tensors),
        *(Int32(problem[size]) for size in SIZES),
    )
    grid = (problem["tokens"], ceil(_rows(problem) / block_rows), 1)
    return Program((Step(source, grid, params, block=threads),))


def _why_not(problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8"
    if _rows(problem) >= 65536:
        return "a grid's second axis has 65535 blocks at most"
    return None


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel = "kv_write.naive:Naive"
    return _program(problem, kernel, "uint8", config, NAIVE_WARPS, 32 * NAIVE_WARPS)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.25)


# vectorized -------------------------------------------------------------------------------------


def _block_rows(problem: Problem, config: Config) -> int:
    return int(config["threads"] * HELD // problem["head_dim"] * config["unroll"])


def _vectorized_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rotary_dim, block_rows = problem["rotary_dim"], _block_rows(problem, config)
    if rotary_dim % HELD:
        return f"the halves of rotary_dim={rotary_dim} are not whole vectors of 16 bytes"
    smallest = config["threads"] == min(SPACE["threads"]) and config["unroll"] == 1
    if not smallest and block_rows >= 2 * _rows(problem):
        return f"CTAs of {block_rows} rows are at least half empty for {_rows(problem)}"
    return _why_not(problem, gpu)


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel, block_rows = "kv_write.vectorized:Vectorized", _block_rows(problem, config)
    return _program(problem, kernel, "uint32", config, block_rows, config["threads"])


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or the waits of wave after wave of CTAs; few rows wait least."""
    ctas = problem["tokens"] * ceil(_rows(problem) / _block_rows(problem, config))
    waves = ctas * config["threads"] / (gpu.sms * RESIDENT)
    wait_us = WAIT_US + 0.1 * config["unroll"] + 0.0005 * config["threads"]
    return LAUNCH_US + max(copy_us(ENTRY.bytes_moved(problem), gpu), waves * wait_us) + wait_us


SPACE = {"threads": (64, 128, 256), "unroll": (1, 2, 4)}

VECTORIZED: Implementation = Implementation(
    entry="kv_write",
    language="cute",
    variant="vectorized",
    summary="16-byte loads and stores, whole pairs a thread, several heads a CTA",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_vectorized_reject,
    default=fastest(lambda: VECTORIZED),
    program=_vectorized_program,
    estimate=_vectorized_estimate,
    techniques={"vector load": "LDG.E.128", "vector store": "STG.E.128", "vote": "VOTE"},
    rank=1,
)

IMPLEMENTATIONS = (
    Implementation(
        entry="kv_write",
        language="cute",
        variant="naive",
        summary="one warp, one head of a token, element by element; any shape",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: _why_not(problem, gpu),
        default=lambda problem, gpu: Config(),
        program=_naive_program,
        estimate=_naive_estimate,
        techniques={"vote": "VOTE"},
        rank=0,
    ),
    VECTORIZED,
)
