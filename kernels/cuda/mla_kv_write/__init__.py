"""`mla_kv_write` in CUDA C++: one warp per part of a row, or per row in 16-byte vectors."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
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
from kernelcat.kernels.cuda.common.cache_write import RESIDENT_WARPS, rope_style, write_us
from kernelcat.kernels.cuda.common.latent_cache import cached_type
from kernelcat.kernels.cuda.common.paged_cache import page_bits
from kernelcat.reference._mla_row import LATENT, SCALED
from kernelcat.reference.mla_kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4
PARTS = LATENT // SCALED + 1
"""Parts of a row: groups of latent values that share a scale, and the rotated part."""

SPACE = {"threads": (128, 256, 512), "unroll": (1, 2)}
"""``unroll`` is the number of tokens that a warp has in flight."""

TENSORS = tuple(tensor.name for tensor in ENTRY.tensors)
SIZES = ("tokens", "batch", "table_width")


def _launch(problem: Problem, variant: str, *constants: int, blocks: int, threads: int) -> Program:
    if not problem["tokens"]:
        return Program(())
    arguments = (
        f"kernelcat::{problem['dtype']}",
        cached_type(problem),
        rope_style(problem),
        *map(str, constants),
    )
    name = f"kernelcat::mla_kv_write_{variant}<{', '.join(arguments)}>"
    params: tuple[Param, ...] = (
        *map(Pointer, TENSORS),
        *(Int32(problem[name]) for name in SIZES),
        Int32(page_bits(problem)),
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
    warps = problem["tokens"] / config["unroll"]
    return write_us(ENTRY.bytes_moved(problem), warps, config, gpu)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """Two tokens per warp where that leaves every SM full of warps."""
    is_full = problem["tokens"] >= 2 * gpu.sms * RESIDENT_WARPS
    return Config(threads=128, unroll=2 if is_full else 1)


IMPLEMENTATIONS = (
    Implementation(
        entry="mla_kv_write",
        language="cuda",
        variant="naive",
        summary="one warp per part of a row, one element at a time",
        archs=("sm_80+",),
        space={},
        program=_naive,
        estimate=lambda problem, config, gpu: 4 * copy_us(ENTRY.bytes_moved(problem), gpu),
        techniques={"search by votes of a warp": "VOTE"},
        rank=0,
    ),
    Implementation(
        entry="mla_kv_write",
        language="cuda",
        variant="vectorized",
        summary="one warp per row, 16-byte loads and stores; loads start before the slot is known",
        archs=("sm_80+",),
        space=SPACE,
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
