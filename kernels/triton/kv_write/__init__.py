"""`kv_write` in Triton: naive (one head a program), vectorized (a block of a token's heads)."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import cache_write
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference.kv_write import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.kv_write.device:"
SM_REGISTERS = 65536
"""Registers of an SM."""


def _launch(
    kernel: str,
    problem: Problem,
    programs_per_token: int,
    warps: int,
    numbers: dict[str, int],
    constants: dict[str, ConfigValue],
) -> Program:
    """One launch of ``kernel``, with ``numbers`` and ``constants`` beside those of every kernel."""
    if not problem["tokens"]:
        return Program(())
    pointers = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    numbers = {
        "batch": problem["batch"], "heads": problem["heads"], "kv_heads": problem["kv_heads"],
        "width": problem["table_width"], **numbers,
    }  # fmt: skip
    shared: dict[str, ConfigValue] = {
        "CHUNK": cache_write.chunk(problem["batch"]),
        "HEAD_DIM": problem["head_dim"],
        "PAGE_SIZE": problem["page_size"],
        "INTERLEAVED": problem["style"] == "interleaved",
        "HAS_SCALES": problem["has_scales"],
        "PAGE_SCALES": problem["page_scales"],
    }
    integers = {name: triton.integer(number, divisor=1) for name, number in numbers.items()}
    grid = (problem["tokens"], programs_per_token, 1)
    step = triton.step(
        KERNELS + kernel, grid, pointers | integers, shared | constants, num_warps=warps
    )
    return Program((step,))


def _num_rows(problem: Problem) -> int:
    """Heads of a token's queries, keys and values."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    numbers = {"rotary_dim": problem["rotary_dim"]}
    return _launch("naive", problem, _num_rows(problem), 1, numbers, {})


def _programs_per_token(problem: Problem, block_h: int) -> int:
    """Programs for a token's keys and values, and for its queries, ``block_h`` heads each."""
    return ceil(problem["kv_heads"] / block_h) + ceil(problem["heads"] / block_h)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rotary_dim = problem["rotary_dim"]
    constants: dict[str, ConfigValue] = {
        "ROTARY": rotary_dim,
        "PAIRS": next_power_of_two(rotary_dim // 2),
        "REST": next_power_of_two(problem["head_dim"] - rotary_dim),
        "BLOCK_H": config["block_h"],
    }
    num_programs = _programs_per_token(problem, config["block_h"])
    return _launch("vectorized", problem, num_programs, config["warps"], {}, constants)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_rows(problem) > MAX_GRID_Y:
        return (
            f"{_num_rows(problem)} heads of queries, keys and values are more than {MAX_GRID_Y}, "
            "the most programs on a second axis"
        )
    return illegal_float8(gpu) if problem["kv_dtype"] == FP8 else None


def _elements(config: Config, problem: Problem) -> float:
    """Elements of a thread of `vectorized`."""
    return float(config["block_h"] * problem["head_dim"] / (32 * config["warps"]))


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_h, elements = config["block_h"], _elements(config, problem)
    if not 16 <= elements <= 64:
        return f"{elements:g} elements a thread: 16 to 64 fill its loads and fit in its registers"
    max_heads = max(problem["heads"], problem["kv_heads"])
    if block_h > max(4, 512 // problem["head_dim"]) and block_h >= 2 * max_heads:
        return f"blocks of {block_h} heads are at least half empty for {max_heads}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The largest of memory time, starts of programs, and waits of programs; and one wait more.

    The last wait is for the first programs, before memory is busy.
    """
    config = config if "block_h" in config else Config(block_h=1, warps=1)
    elements = _elements(config, problem)
    num_programs = problem["tokens"] * _programs_per_token(problem, config["block_h"]) / gpu.sms
    program_registers = 32 * config["warps"] * (32 + 2 * elements)
    resident = min(32.0, SM_REGISTERS / program_registers)
    wait_us = cache_write.program_us(elements)
    copy_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    start_us = num_programs * cache_write.PROGRAM_START_US
    return max(copy_us, start_us, num_programs / resident * wait_us) + wait_us


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        entry="kv_write",
        language="triton",
        variant="naive",
        summary="a head of a token a program; any shape",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive,
        estimate=_estimate,
        rank=0,
    ),
    Implementation(
        entry="kv_write",
        language="triton",
        variant="vectorized",
        summary="a block of a token's heads a program, 16-byte loads, pairs within a thread",
        archs=("sm_80+",),
        space={"block_h": (4, 8, 16, 32), "warps": (1, 2, 4)},
        illegal=_illegal,
        unpromising=_unpromising_vectorized,
        program=_vectorized,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
