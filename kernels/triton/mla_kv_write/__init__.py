"""`mla_kv_write` in Triton: naive (one token a program), vectorized (a block of tokens).

Products and sums are not contracted to FMAs, so that the bytes of the cache are the oracle's.
"""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import cache_write, mla_row
from kernelcat.reference._mla_row import ROW
from kernelcat.reference.mla_kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.mla_kv_write.device:"


def _launch(
    kernel: str, problem: Problem, rows: int, warps: int, constants: dict[str, ConfigValue],
    numbers: dict[str, int],
) -> Program:  # fmt: skip
    """One launch of ``kernel``, ``rows`` tokens a program."""
    if not problem["tokens"]:
        return Program(())
    numbers = {"batch": problem["batch"], "width": problem["table_width"], **numbers}
    step = triton.step(
        KERNELS + kernel,
        (ceil(problem["tokens"] / rows), 1, 1),
        mla_row.arguments(ENTRY, problem)
        | {name: triton.integer(number, divisor=1) for name, number in numbers.items()},
        {
            "CHUNK": cache_write.chunk(problem["batch"], rows),
            "PAGE_SIZE": problem["page_size"],
            "INTERLEAVED": problem["style"] == "interleaved",
            "HAS_ROPE": problem["rotary_dim"] > 0,
            "PACKED": mla_row.is_packed(problem),
            **constants,
        },
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return Program((step,))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _launch("naive", problem, 1, 1, {}, {})


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rows, warps = config["rows"], config["warps"]
    return _launch(
        "vectorized", problem, rows, warps, {"ROWS": rows}, {"tokens": problem["tokens"]}
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return mla_row.illegal_cache(problem, gpu)


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, warps = config["rows"], config["warps"]
    if not 1 <= rows / warps <= 4:
        return f"{warps} warps for {rows} tokens: less than 16 or more than 64 elements a thread"
    if rows > 1 and rows >= 2 * problem["tokens"]:
        return f"blocks of {rows} tokens are at least half empty for {problem['tokens']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time, or starts of programs if these take longer; and the wait of a program.

    The wait is for the first programs, before memory is busy.
    """
    rows, warps = config.get("rows", 1), config.get("warps", 1)
    start_us = ceil(problem["tokens"] / rows) / gpu.sms * cache_write.PROGRAM_START_US
    copy_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    return max(copy_us, start_us) + cache_write.program_us(rows * ROW / (32 * warps))


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        entry="mla_kv_write",
        language="triton",
        variant="naive",
        summary="a token a program",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive,
        estimate=_estimate,
        rank=0,
    ),
    Implementation(
        entry="mla_kv_write",
        language="triton",
        variant="vectorized",
        summary="a block of tokens a program, 16-byte loads, pairs within a thread",
        archs=("sm_80+",),
        space={"rows": (1, 2, 4, 8, 16), "warps": (1, 2, 4, 8)},
        illegal=_illegal,
        unpromising=_unpromising_vectorized,
        program=_vectorized,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
