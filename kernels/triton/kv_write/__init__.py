"""`kv_write` in Triton: a head a program, and blocks of a token's heads in vectors."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.reference.kv_write import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.kv_write.device:"
MAX_CHUNK = 1024
"""Sequences whose beginnings a program looks at together."""
REGISTERS = 65536
"""Of an SM."""
START_US = 0.03
"""What an SM takes to start a program."""


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _launch(
    kernel: str,
    problem: Problem,
    programs_a_token: int,
    warps: int,
    numbers: dict[str, int],
    constants: dict[str, ConfigValue],
) -> Program:
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
        "CHUNK": min(_power_of_two(problem["batch"]), MAX_CHUNK),
        "HEAD_DIM": problem["head_dim"],
        "PAGE_SIZE": problem["page_size"],
        "INTERLEAVED": problem["style"] == "interleaved",
        "HAS_SCALES": problem["has_scales"],
        "PAGE_SCALES": problem["page_scales"],
    }
    integers = {name: triton.integer(number, divisor=1) for name, number in numbers.items()}
    grid = (problem["tokens"], programs_a_token, 1)
    step = triton.step(
        KERNELS + kernel, grid, pointers | integers, shared | constants, num_warps=warps
    )
    return Program((step,))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rows = problem["heads"] + 2 * problem["kv_heads"]
    return _launch("naive", problem, rows, 1, {"rotary_dim": problem["rotary_dim"]}, {})


def _parts(problem: Problem, config: Config) -> int:
    """Programs that share a token."""
    return sum(ceil(problem[heads] / config["block_h"]) for heads in ("kv_heads", "heads"))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rotary_dim = problem["rotary_dim"]
    constants: dict[str, ConfigValue] = {
        "ROTARY": rotary_dim,
        "PAIRS": _power_of_two(rotary_dim // 2),
        "REST": _power_of_two(problem["head_dim"] - rotary_dim),
        "BLOCK_H": config["block_h"],
    }
    parts = _parts(problem, config)
    return _launch("vectorized", problem, parts, config["warps"], {}, constants)


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["heads"] + 2 * problem["kv_heads"] > 65535:
        return "a grid's second axis has 65535 blocks at most"
    if problem["kv_dtype"] == FP8 and int(gpu.arch[3:].rstrip("af")) < 89:
        return f"Triton converts no float8_e4m3fn on {gpu.arch}"
    return None


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    elements = config["block_h"] * problem["head_dim"] / (32 * config["warps"])
    if not 16 <= elements <= 64:
        return f"{elements:g} elements a thread: too few, or too many for registers"
    most = max(problem["heads"], problem["kv_heads"])
    if config["block_h"] > max(4, 512 // problem["head_dim"]) and config["block_h"] >= 2 * most:
        return f"blocks of {config['block_h']} heads are at least half empty for {most}"
    return _reject(config, problem, gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or many small programs, or waits; and one wait to fill the machine."""
    block_h, warps = config.get("block_h", 1), config.get("warps", 1)
    programs = problem["tokens"] * _parts(problem, Config(block_h=block_h)) / gpu.sms
    elements = block_h * problem["head_dim"] / (32 * warps)
    resident = min(32.0, REGISTERS / (32 * warps * (32 + 2 * elements)))
    wait_us = 1.0 + 0.03 * elements
    copy_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    return max(copy_us, programs * START_US, programs / resident * wait_us) + wait_us


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    implementation(
        entry="kv_write",
        variant="naive",
        summary="a head of a token a program; any shape",
        archs=("sm_80+",),
        space={},
        illegal=_reject,
        program=_naive,
        estimate=_estimate,
        rank=0,
    ),
    implementation(
        entry="kv_write",
        variant="vectorized",
        summary="a block of a token's heads a program, 16-byte loads, pairs within a thread",
        archs=("sm_80+",),
        space={"block_h": (4, 8, 16, 32), "warps": (1, 2, 4)},
        illegal=_reject_vectorized,
        program=_vectorized,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
