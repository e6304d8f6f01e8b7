"""`mla_kv_write` in CUDA C++: a warp a part of a row, and a warp a row in 16-byte vectors."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.reference.flashmla import PACKED_TYPE
from kernelcat.reference.mla_kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4
PARTS = 5
"""Of a row: 128 latent values each, and the rotated part."""

SPACE = {"threads": (128, 256, 512), "unroll": (1, 2)}
"""``unroll`` is how many tokens a warp has in flight."""

WAIT_US = 2.0
"""From a row's load to its store: a sequence is looked up, then a position, a page and angles."""
RESIDENT = 32
"""Warps that an SM runs at once."""

TENSORS = tuple(tensor.name for tensor in ENTRY.tensors)
SIZES = ("tokens", "batch", "table_width")


def _launch(problem: Problem, variant: str, *constants: int, blocks: int, threads: int) -> Program:
    if not problem["tokens"]:
        return Program(())
    cached = "uint8_t" if problem["kv_dtype"] == PACKED_TYPE else problem["kv_dtype"]
    arguments = (
        f"kernelcat::{problem['dtype']}",
        f"kernelcat::{cached}",
        f"kernelcat::RopeStyle::k{problem['style'].capitalize()}",
        *map(str, constants),
    )
    name = f"kernelcat::mla_kv_write_{variant}<{', '.join(arguments)}>"
    params: tuple[Param, ...] = (
        *map(Pointer, TENSORS),
        *(Int32(problem[name]) for name in SIZES),
        Int32(problem["page_size"].bit_length() - 1),
        Int32(problem["rotary_dim"]),
    )
    source = CudaSource(f"mla_kv_write/{variant}.cu", name)
    return Program((Step(source, (blocks, 1, 1), params, threads),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(problem["tokens"] * PARTS / NAIVE_WARPS), 2**31 - 1)
    return _launch(problem, "naive", blocks=blocks, threads=32 * NAIVE_WARPS)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads, unroll = config["threads"], config["unroll"]
    blocks = ceil(problem["tokens"] / (threads // 32 * unroll))
    return _launch(problem, "vectorized", threads, unroll, blocks=blocks, threads=threads)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or the waits of warp after warp; small blocks fill SMs evenly."""
    wait_us = WAIT_US + 0.1 * config["unroll"] + 0.0002 * config["threads"]
    waves = problem["tokens"] / (config["unroll"] * gpu.sms * RESIDENT)
    return LAUNCH_US + max(copy_us(ENTRY.bytes_moved(problem), gpu), waves * wait_us) + wait_us


def _default(problem: Problem, gpu: Gpu) -> Config:
    """Two tokens a warp where that leaves every SM its fill of warps."""
    filled = problem["tokens"] >= 2 * gpu.sms * RESIDENT
    return Config(threads=128, unroll=2 if filled else 1)


IMPLEMENTATIONS = (
    Implementation(
        entry="mla_kv_write",
        language="cuda",
        variant="naive",
        summary="a warp a part of a row, one element at a time",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=_naive,
        estimate=lambda problem, config, gpu: 4 * copy_us(ENTRY.bytes_moved(problem), gpu),
        techniques={"search by votes of a warp": "VOTE"},
        rank=0,
    ),
    Implementation(
        entry="mla_kv_write",
        language="cuda",
        variant="vectorized",
        summary="a warp a row, 16-byte loads and stores, rows asked for before their places",
        archs=("sm_80+",),
        space=SPACE,
        illegal=lambda config, problem, gpu: None,
        default=_default,
        program=_vectorized,
        estimate=_estimate,
        techniques={
            "16-byte loads": "LDG*128",
            "16-byte stores": "STG*128",
            "search by votes of a warp": "VOTE",
        },
        rank=1,
    ),
)
