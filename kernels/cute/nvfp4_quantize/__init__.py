"""`nvfp4_quantize` in CuTe DSL: naive (element by element), vectorized (registers hold x).

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import stream_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.reference.nvfp4_quantize import ENTRY
from kernelcat.runtime.gpu import Gpu

ARCHS = ("sm_80+",)
INSTRUCTIONS, SWIZZLED_INSTRUCTIONS = {"nvfp4": 28.2, "mxfp4": 25}, 18
"""Instructions of a thread for an element; where its scale lies in a swizzled tile, that many more:
its place is worked out element by element."""
NAIVE_INSTRUCTIONS = {"nvfp4": 40, "mxfp4": 71}
"""Instructions of a lane of the baseline for an element: it has a block of 16 elements, or 32."""
ROUND_US, ROW_SUM_US = 0.02, 1.5
"""What a round of resident thread blocks waits for; the sum of a row's squares."""
VECTOR = 8
"""Elements of x in 16 bytes."""
MAX_ROW_VECTORS = 8
"""Vectors of a row that a thread holds at most."""
PADDING_CTAS = 64
"""Thread blocks that clear the padding of swizzled scales; the kernel adds them to its grid."""

TENSORS = tuple(
    Pointer(name) for name in ("x", "global_scale", "weight", "signs", "seed", "q", "scale")
)


def _source(problem: Problem, kernel: str, config: Config) -> CuteSource:
    element = "*" + problem["dtype"]
    kinds = (
        element, "*float32", element, "*float32", "*uint32", "*uint32", "*uint8", "int32", "int32",
        "float32",
    )  # fmt: skip
    options = ("rms_norm", "hadamard", "stochastic")
    constants = (
        ("dtype", problem["dtype"]),
        ("is_nvfp4", problem["format"] == "nvfp4"),
        ("is_swizzled", problem["scale_layout"] == "swizzled"),
        *((option, problem[option]) for option in options),
        *config.items(),
    )
    return CuteSource(f"nvfp4_quantize.{kernel}", kinds, constants)


def _program(problem: Problem, kernel: str, config: Config, num_ctas: int, threads: int) -> Program:
    if problem["M"] * problem["K"] == 0:
        return Program(())
    numbers = (Int32(problem["M"]), Int32(problem["K"]), Float32(problem["eps"]))
    source = _source(problem, kernel, config)
    return Program((Step(source, (num_ctas, 1, 1), (*TENSORS, *numbers), block=threads),))


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, "naive:Naive", Config(), ceil(problem["M"] / 4), 128)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    per_element = NAIVE_INSTRUCTIONS[problem["format"]] * (1.4 if problem["stochastic"] else 1.0)
    return stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=ceil(problem["M"] / 4),
        instructions=per_element * problem["M"] * problem["K"],
    )  # fmt: skip


# vectorized -------------------------------------------------------------------------------------


def _num_ctas(problem: Problem, config: Config) -> int:
    """Thread blocks that quantize: with RMSNorm one for each row."""
    if problem["rms_norm"]:
        return int(problem["M"])
    return ceil(problem["M"] * problem["K"] / (VECTOR * config["threads"] * config["unroll"]))


def _row_unroll(problem: Problem, threads: int) -> int:
    """The least power of two of vectors a thread that hold a row."""
    return 1 << (ceil(problem["K"] / (VECTOR * threads)) - 1).bit_length()


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_ctas = _num_ctas(problem, config)
    return _program(problem, "vectorized:Vectorized", config, num_ctas, config["threads"])


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, unroll = config["threads"], config["unroll"]
    if _num_ctas(problem, config) >= (1 << 31) - PADDING_CTAS:
        return f"{_num_ctas(problem, config)} thread blocks are more than a grid has"
    if problem["rms_norm"] and unroll != _row_unroll(problem, threads):
        max_k = VECTOR * threads * MAX_ROW_VECTORS
        return (
            f"unroll={unroll}: {threads} threads hold a row of K={problem['K']} in "
            f"{_row_unroll(problem, threads)} vectors each, and at most K={max_k}"
        )
    return None


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_elements = VECTOR * config["threads"] * config["unroll"]
    if problem["rms_norm"] or config["unroll"] == 1:
        return None
    if num_elements >= 2 * problem["M"] * problem["K"]:
        return f"unroll={config['unroll']} leaves most threads without elements"
    return None


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory or instructions, and the sums of whole rows, which nothing hides."""
    ctas, threads, unroll = _num_ctas(problem, config), config["threads"], config["unroll"]
    per_element = INSTRUCTIONS[problem["format"]]
    if problem["rms_norm"] or problem["scale_layout"] == "swizzled":
        per_element += SWIZZLED_INSTRUCTIONS
    per_element *= 2.1 if problem["stochastic"] else 1.0
    resident = max(1, min(2048, 65536 // (32 + 2 * VECTOR * unroll)) // threads)
    waits_us = ROUND_US + 1e-5 * abs(threads - 128)
    us = stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=ctas, rounds=ctas / (gpu.sms * resident),
        instructions=per_element * problem["M"] * problem["K"], waits_us=waits_us,
    )  # fmt: skip
    return us + (ROW_SUM_US if problem["rms_norm"] else 0.01 * unroll)


IMPLEMENTATIONS = (
    Implementation(
        entry="nvfp4_quantize",
        language="cute",
        variant="naive",
        summary="a warp for each row, a lane for each scale, element by element",
        archs=ARCHS,
        space={},
        program=_naive_program,
        estimate=_naive_estimate,
        rank=0,
    ),
    Implementation(
        entry="nvfp4_quantize",
        language="cute",
        variant="vectorized",
        summary="vectors of eight elements, read once; for RMSNorm a thread block holds a row",
        archs=ARCHS,
        space={"threads": (128, 256, 512), "unroll": (1, 2, 4, 8)},
        illegal=_illegal_vectorized,
        unpromising=_unpromising_vectorized,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG.E.128", "warp shuffle": "SHFL"},
        rank=1,
    ),
)
