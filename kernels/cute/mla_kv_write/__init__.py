"""`mla_kv_write` in CuTe DSL: one element at a time, or vectors of 16 bytes.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.common.cache_write import write_us
from kernelcat.reference.flashmla import PACKED_TYPE
from kernelcat.reference.mla_kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4
SIZES = ("tokens", "batch", "table_width")


def _program(
    problem: Problem, kernel: str, packed: str, config: Config, cta_tokens: int, threads: int
) -> Program:
    """One launch, in thread blocks of ``cta_tokens`` tokens.

    ``packed`` is the kind of parameter by which the kernel writes caches of packed rows.
    """
    if not problem["tokens"]:
        return Program(())
    kinds = {"kv_dtype": packed} if problem["kv_dtype"] == PACKED_TYPE else {}
    tensors = ["*" + str(kinds.get(t.dtype, t.dtype_of(problem))) for t in ENTRY.tensors]
    constants = {
        "dtype": problem["dtype"],
        "packed": problem["kv_dtype"] == PACKED_TYPE,
        "page_size": problem["page_size"],
        "interleaved": problem["style"] == "interleaved",
        "rotates": problem["rotary_dim"] > 0,
        **config,
    }
    source = CuteSource(
        f"mla_kv_write.{kernel}", (*tensors, *["int32"] * len(SIZES)), tuple(constants.items())
    )
    params = (
        *(Pointer(tensor.name) for tensor in ENTRY.tensors),
        *(Int32(problem[size]) for size in SIZES),
    )
    grid = (ceil(problem["tokens"] / cta_tokens), 1, 1)
    return Program((Step(source, grid, params, block=threads),))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] == PACKED_TYPE and "float8_e4m3fn" not in gpu.flops:
        return f"{gpu.sku} has no float8: kv_dtype must be the dtype of c and k_pe"
    return None


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, "naive:Naive", "uint8", config, NAIVE_WARPS, 32 * NAIVE_WARPS)


# vectorized -------------------------------------------------------------------------------------

SPACE = {"threads": (64, 128, 256), "unroll": (1, 2, 4)}
"""``unroll`` is the number of tokens that a warp has in flight."""


def _cta_tokens(config: Config) -> int:
    """Tokens of a thread block."""
    return int(config["threads"] // 32 * config["unroll"])


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["unroll"] > 1 and _cta_tokens(config) * gpu.sms >= 2 * problem["tokens"]:
        return f"thread blocks of {_cta_tokens(config)} tokens leave half of the SMs idle"
    return None


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel, threads = "vectorized:Vectorized", config["threads"]
    return _program(problem, kernel, "uint32", config, _cta_tokens(config), threads)


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    num_ctas = ceil(problem["tokens"] / _cta_tokens(config))
    bytes_moved, unroll_us = ENTRY.bytes_moved(problem), 0.3 * config["unroll"]
    return write_us(bytes_moved, num_ctas, config["threads"], unroll_us, gpu)


IMPLEMENTATIONS = (
    Implementation(
        entry="mla_kv_write",
        language="cute",
        variant="naive",
        summary="one warp per token, one element at a time; any shape",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive_program,
        estimate=lambda problem, config, gpu: copy_us(ENTRY.bytes_moved(problem), gpu, 0.25),
        techniques={"vote": "VOTE"},
        rank=0,
    ),
    Implementation(
        entry="mla_kv_write",
        language="cute",
        variant="vectorized",
        summary="one warp per token: 16-byte loads and stores, scales by shuffles",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising_vectorized,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG.E.128", "vector store": "STG.E.128", "vote": "VOTE"},
        rank=1,
    ),
)
