"""`sample` in Triton: a program a row; small blocks of logits (naive) or large ones (blocked)."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us, issue_us
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

NUM_FILTER_PASSES = 14
"""Passes over the logits until top-k, top-p and min-p have their thresholds."""
BLOCK_US, WARP_US = 0.35, 0.0067
"""A block of logits of a row: its load, which nothing hides, and what each warp adds to its sum."""
SHARED = 0.35
"""Part of a second program's work on an SM that the first one's waits do not hide."""
DRAW_INSTRUCTIONS = 145
"""Instructions of a thread to draw for a token: a Philox number and a logarithm."""


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
    """Passes over the logits, block after block; programs of an SM hide a part of their waits."""
    rows, vocab = max(problem["rows"], 1), problem["vocab"]
    rows_of_sm = max(1.0, rows / gpu.sms)
    passes = 1 + NUM_FILTER_PASSES * problem["has_filters"] + problem["has_logprobs"]
    block_us = BLOCK_US + WARP_US * config["warps"]
    pass_us = ceil(vocab / config["block"]) * block_us * (1 + SHARED * (rows_of_sm - 1))
    us = LAUNCH_US + passes * pass_us
    if problem["has_temperature"]:
        us += issue_us(DRAW_INSTRUCTIONS * rows * vocab, gpu, min(rows, gpu.sms))
    return max(copy_us(ENTRY.bytes_moved(problem), gpu), us)


IMPLEMENTATIONS = (
    Implementation(
        entry="sample",
        language="triton",
        variant="naive",
        summary="a program a row, blocks of 512 logits",
        archs=("sm_80+",),
        space={},
        program=lambda problem, config, gpu: _program(problem, NAIVE, gpu),
        estimate=lambda problem, config, gpu: _estimate(problem, NAIVE, gpu),
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
