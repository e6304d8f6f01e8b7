"""`mla_kv_write` in CuTe DSL: element by element, and in vectors of 16 bytes.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest
from kernelcat.reference.flashmla import PACKED_TYPE
from kernelcat.reference.mla_kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4
SIZES = ("tokens", "batch", "table_width")
WAIT_US = 2.0
"""From a row's load to its store: a sequence is looked up, then a position, a page and angles."""
RESIDENT = 1024
"""Threads that an SM runs at once."""


def _program(
    problem: Problem, kernel: str, cache: str, config: Config, threads: int, tokens: int
) -> Program:
    """``cache`` is what the kernel takes packed rows as; a CTA has ``tokens`` of them."""
    if not problem["tokens"]:
        return Program(())
    kinds = {"kv_dtype": cache} if problem["kv_dtype"] == PACKED_TYPE else {}
    tensors = ["*" + str(kinds.get(t.dtype, t.dtype_of(problem))) for t in ENTRY.tensors]
    constants = {
        "dtype": problem["dtype"],
        "packed": problem["kv_dtype"] == PACKED_TYPE,
        "page_size": problem["page_size"],
        "interleaved": problem["style"] == "interleaved",
        "turns": problem["rotary_dim"] > 0,
        **config,
    }
    source = CuteSource(
        f"mla_kv_write.{kernel}", (*tensors, *["int32"] * len(SIZES)), tuple(constants.items())
    )
    params = (
        *(Pointer(tensor.name) for tensor in ENTRY.tensors),
        *(Int32(problem[size]) for size in SIZES),
    )
    grid = (ceil(problem["tokens"] / tokens), 1, 1)
    return Program((Step(source, grid, params, block=threads),))


def _why_not(problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] == PACKED_TYPE and "float8_e4m3fn" not in gpu.flops:
        return f"{gpu.sku} has no float8"
    return None


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, "naive:Naive", "uint8", config, 32 * NAIVE_WARPS, NAIVE_WARPS)


# vectorized -------------------------------------------------------------------------------------


def _tokens(config: Config) -> int:
    """Of a CTA."""
    return int(config["threads"] // 32 * config["unroll"])


def _vectorized_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["unroll"] > 1 and _tokens(config) * gpu.sms >= 2 * problem["tokens"]:
        return f"CTAs of {_tokens(config)} tokens leave half of the SMs idle"
    return _why_not(problem, gpu)


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel, threads = "vectorized:Vectorized", config["threads"]
    return _program(problem, kernel, "uint32", config, threads, _tokens(config))


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or the waits of wave after wave of CTAs; few tokens wait least."""
    ctas = ceil(problem["tokens"] / _tokens(config))
    waves = ctas * config["threads"] / (gpu.sms * RESIDENT)
    wait_us = WAIT_US + 0.3 * config["unroll"] + 0.0005 * config["threads"]
    return LAUNCH_US + max(copy_us(ENTRY.bytes_moved(problem), gpu), waves * wait_us) + wait_us


SPACE = {"threads": (64, 128, 256), "unroll": (1, 2, 4)}

VECTORIZED: Implementation = Implementation(
    entry="mla_kv_write",
    language="cute",
    variant="vectorized",
    summary="a warp has a token: 16-byte loads and stores, scales by shuffles",
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
        entry="mla_kv_write",
        language="cute",
        variant="naive",
        summary="one warp, one token, element by element; any shape",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: _why_not(problem, gpu),
        default=lambda problem, gpu: Config(),
        program=_naive_program,
        estimate=lambda problem, config, gpu: copy_us(ENTRY.bytes_moved(problem), gpu, 0.25),
        techniques={"vote": "VOTE"},
        rank=0,
    ),
    VECTORIZED,
)
