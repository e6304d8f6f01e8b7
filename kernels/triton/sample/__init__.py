"""`sample` in Triton: a program a row; small blocks of logits (naive) or large ones (blocked)."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference.sample import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.sample.device:sample"
FLAGS = ("has_temperature", "has_filters", "has_penalty", "has_logprobs")
NAIVE = Config(block=512, warps=4)
SPACE = {"block": (1024, 2048, 4096), "warps": (4, 8, 16)}
"""block : logits that a program loads at a time"""

SM_BYTES = 75e9
"""Bytes that an SM can load in a second from L2."""
BLOCK_US = 0.5
"""From the load of a block to the end of its computation, where one warp has little to do."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["rows"]:
        return Program(())
    pointers = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    constants = {name.upper(): problem[name] for name in FLAGS} | {"BLOCK": config["block"]}
    step = triton.step(
        KERNEL,
        (problem["rows"], 1, 1),
        pointers | {"vocab": triton.integer(problem["vocab"])},
        constants,
        num_warps=config["warps"],
    )
    return Program((step,))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    elements = config["block"] // (32 * config["warps"])
    if not 8 <= elements <= 16:
        return f"{elements} elements a thread: 8 fill one load, more than 16 the registers"
    if config["block"] >= 2 * problem["vocab"] and config["block"] > SPACE["block"][0]:
        return f"blocks of {config['block']} logits are mostly empty"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Passes over the logits; an SM's programs share its bandwidth."""
    residents = max(1, min(48 // config["warps"], ceil(problem["rows"] / gpu.sms)))
    waves = ceil(max(problem["rows"], 1) / (gpu.sms * residents))
    num_passes = 1 + problem["has_temperature"] + 5 * problem["has_filters"]
    num_passes += problem["has_logprobs"]
    row_bytes = ENTRY.bytes_moved(problem) / max(problem["rows"], 1)
    num_blocks = ceil(problem["vocab"] / config["block"])
    load_us = row_bytes * residents / SM_BYTES * 1e6
    pass_us = max(load_us, num_blocks * BLOCK_US * config["block"] / (256 * config["warps"]) / 4)
    dram_us = copy_us(ENTRY.bytes_moved(problem), gpu)
    return max(dram_us, LAUNCH_US + waves * num_passes * (pass_us + num_blocks * 0.1))


IMPLEMENTATIONS = (
    Implementation(
        entry="sample",
        language="triton",
        variant="naive",
        summary="a program a row, blocks of 512 logits",
        archs=("sm_80+",),
        space={},
        program=lambda problem, config, gpu: _program(problem, NAIVE, gpu),
        estimate=lambda problem, config, gpu: 2 * _estimate(problem, NAIVE, gpu),
        rank=0,
    ),
    Implementation(
        entry="sample",
        language="triton",
        variant="blocked",
        summary="a program a row, large blocks with 16-byte loads; no sort",
        archs=("sm_80+",),
        space=SPACE,
        unpromising=_unpromising,
        program=_program,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128"},
        rank=1,
    ),
)
