"""`nvfp4_quantize` in CuTe DSL: block by block, and in vectors that stay in registers.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
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
VECTOR = 8
"""Elements of x in 16 bytes."""
LONGEST = 8
"""Vectors of a row that a thread holds at most."""

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
        ("nvfp4", problem["format"] == "nvfp4"),
        ("swizzled", problem["scale_layout"] == "swizzled"),
        *((option, problem[option]) for option in options),
        *config.items(),
    )
    return CuteSource(f"nvfp4_quantize.{kernel}", kinds, constants)


def _program(problem: Problem, kernel: str, config: Config, ctas: int, threads: int) -> Program:
    if problem["M"] * problem["K"] == 0:
        return Program(())
    numbers = (Int32(problem["M"]), Int32(problem["K"]), Float32(problem["eps"]))
    source = _source(problem, kernel, config)
    return Program((Step(source, (ctas, 1, 1), (*TENSORS, *numbers), block=threads),))


# naive ------------------------------------------------------------------------------------------


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, "naive:Naive", Config(), ceil(problem["M"] / 4), 128)


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.1)


# vectorized -------------------------------------------------------------------------------------


def _ctas(problem: Problem, config: Config) -> int:
    if problem["rms_norm"]:
        return int(problem["M"])
    return ceil(problem["M"] * problem["K"] / (VECTOR * config["threads"] * config["unroll"]))


def _row_unroll(problem: Problem, threads: int) -> int:
    """A power of two of vectors a thread that hold a row."""
    return 1 << (ceil(problem["K"] / (VECTOR * threads)) - 1).bit_length()


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    ctas = _ctas(problem, config)
    return _program(problem, "vectorized:Vectorized", config, ctas, config["threads"])


def _vectorized_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    threads, unroll = config["threads"], config["unroll"]
    if _ctas(problem, config) >= (1 << 31) - 64:
        return "more CTAs than a grid has"
    if problem["rms_norm"]:
        if unroll != _row_unroll(problem, threads):
            longest = VECTOR * threads * LONGEST
            return f"a row of K={problem['K']} is in registers once, and K at most {longest}"
    elif unroll > 1 and VECTOR * threads * unroll >= 2 * problem["M"] * problem["K"]:
        return f"{unroll} vectors a thread are mostly none"
    return None


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight, which many CTAs give as well as large ones."""
    ctas, held = _ctas(problem, config), config["threads"] * config["unroll"] / 256
    in_flight = min(ctas / gpu.sms * held, 8 * config["unroll"])
    slow = 0.6 if problem["stochastic"] else 1.0
    efficiency = 0.88 * slow * min(1.0, 0.4 + in_flight / 24)
    return copy_us(ENTRY.bytes_moved(problem), gpu, efficiency) + 1e-3 * abs(
        config["threads"] - 256
    )


def _vectorized_default(problem: Problem, gpu: Gpu) -> Config:
    serving = VECTORIZED.configs(problem, gpu)
    best = min(serving, key=lambda c: _vectorized_us(problem, c, gpu), default=None)
    return best or Config(threads=256, unroll=1)


NAIVE = Implementation(
    entry="nvfp4_quantize",
    language="cute",
    variant="naive",
    summary="a warp a row, a lane a block of scales, element by element",
    archs=ARCHS,
    space={},
    illegal=lambda config, problem, gpu: None,
    default=lambda problem, gpu: Config(),
    program=_naive,
    estimate=_naive_us,
    rank=0,
)

VECTORIZED = Implementation(
    entry="nvfp4_quantize",
    language="cute",
    variant="vectorized",
    summary="eight elements a thread, 16-byte loads; rows in registers for RMSNorm",
    archs=ARCHS,
    space={"threads": (128, 256, 512), "unroll": (1, 2, 4, 8)},
    illegal=_vectorized_reject,
    default=_vectorized_default,
    program=_vectorized,
    estimate=_vectorized_us,
    techniques={"vector load": "LDG.E.128", "warp shuffle": "SHFL"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, VECTORIZED)
