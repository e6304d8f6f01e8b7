"""`mla_kv_write` in Triton: a token a program, and blocks of tokens in vectors.

Without contracted products and sums, so that bytes are the oracle's.
"""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.flashmla.cache import is_packed, reject_packed, with_cache
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.reference._mla_row import ROW
from kernelcat.reference.mla_kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.mla_kv_write.device:"
MAX_CHUNK = 1024
"""Sequences whose beginnings a program looks at together, over all of its tokens."""
START_US = 0.03
"""What an SM takes to start a program."""


def _launch(
    kernel: str, problem: Problem, rows: int, warps: int, constants: dict[str, ConfigValue],
    numbers: tuple[str, ...],
) -> Program:  # fmt: skip
    """``rows`` tokens a program."""
    if not problem["tokens"]:
        return Program(())
    known = {"batch": problem["batch"], "width": problem["table_width"]}
    known |= {"tokens": problem["tokens"]}
    chunk = min(1 << (problem["batch"] - 1).bit_length(), MAX_CHUNK // rows)
    step = triton.step(
        KERNELS + kernel,
        (ceil(problem["tokens"] / rows), 1, 1),
        with_cache(ENTRY, problem)
        | {name: triton.integer(known[name], divisor=1) for name in numbers},
        {
            "CHUNK": chunk, "PAGE_SIZE": problem["page_size"],
            "INTERLEAVED": problem["style"] == "interleaved",
            "TURNS": problem["rotary_dim"] > 0, "PACKED": is_packed(problem), **constants,
        },
        num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Program((step,))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _launch("naive", problem, 1, 1, {}, ("batch", "width"))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rows = config["rows"]
    constants: dict[str, ConfigValue] = {"ROWS": rows}
    numbers = ("batch", "width", "tokens")
    return _launch("vectorized", problem, rows, config["warps"], constants, numbers)


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return reject_packed(problem, gpu)


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, warps = config["rows"], config["warps"]
    if not 1 <= rows / warps <= 4:
        return f"{warps} warps for {rows} tokens: less than 16 or more than 64 elements a thread"
    if rows > 1 and rows >= 2 * problem["tokens"]:
        return f"blocks of {rows} tokens are at least half empty for {problem['tokens']}"
    return _reject(config, problem, gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or many small programs; and one wait to fill the machine."""
    rows, warps = config.get("rows", 1), config.get("warps", 1)
    programs = ceil(problem["tokens"] / rows) / gpu.sms
    wait_us = 1.0 + 0.03 * rows * ROW / (32 * warps)
    copy_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    return max(copy_us, programs * START_US) + wait_us


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    implementation(
        entry="mla_kv_write",
        variant="naive",
        summary="a token a program",
        archs=("sm_80+",),
        space={},
        illegal=_reject,
        program=_naive,
        estimate=_estimate,
        rank=0,
    ),
    implementation(
        entry="mla_kv_write",
        variant="vectorized",
        summary="a block of tokens a program, 16-byte loads, pairs within a thread",
        archs=("sm_80+",),
        space={"rows": (1, 2, 4, 8, 16), "warps": (1, 2, 4, 8)},
        illegal=_reject_vectorized,
        program=_vectorized,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
