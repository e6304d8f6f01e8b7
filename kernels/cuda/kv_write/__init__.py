"""`kv_write` in CUDA C++: a warp a head, and 16-byte vectors of several heads a warp."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.reference.kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4
HELD = 16
"""Elements of a row that a thread of `vectorized` has."""

SPACE = {"threads": (128, 256, 512), "unroll": (1, 2, 4)}
"""``unroll`` is how many rows a thread has in flight."""

WAIT_US = 2.0
"""From a row's load to its store: a sequence is looked up, then a position, a page and angles."""
RESIDENT = 32
"""Warps that an SM runs at once."""

TENSORS = tuple(tensor.name for tensor in ENTRY.tensors)
SIZES = ("tokens", "batch", "heads", "kv_heads", "table_width")


def _rows(problem: Problem) -> int:
    """Heads of a token's keys, values and queries."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _launch(problem: Problem, variant: str, *constants: int, blocks: int, threads: int) -> Program:
    if not problem["tokens"]:
        return Program(())
    scales = "kNone"
    if problem["has_scales"]:
        scales = "kPage" if problem["page_scales"] else "kHead"
    arguments = (
        *(f"kernelcat::{problem[name]}" for name in ("dtype", "kv_dtype")),
        str(problem["head_dim"]),
        f"kernelcat::Style::k{problem['style'].capitalize()}",
        f"kernelcat::Scales::{scales}",
        *map(str, constants),
    )
    name = f"kernelcat::kv_write_{variant}<{', '.join(arguments)}>"
    params = (
        *map(Pointer, TENSORS),
        *(Int32(problem[name]) for name in SIZES),
        Int32(problem["page_size"].bit_length() - 1),
        Int32(problem["rotary_dim"]),
    )
    source = CudaSource(f"kv_write/{variant}.cu", name)
    return Program((Step(source, (blocks, 1, 1), params, threads),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(problem["tokens"] * _rows(problem) / NAIVE_WARPS), 2**31 - 1)
    return _launch(problem, "naive", blocks=blocks, threads=32 * NAIVE_WARPS)


def _warp_rows(problem: Problem) -> int:
    """Rows that a warp moves at once."""
    return int(32 * HELD // problem["head_dim"])


def _warps(problem: Problem, config: Config) -> int:
    units = ceil(_rows(problem) / (_warp_rows(problem) * config["unroll"]))
    return int(problem["tokens"] * units)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads, unroll = config["threads"], config["unroll"]
    blocks = ceil(32 * _warps(problem, config) / threads)
    return _launch(problem, "vectorized", threads, unroll, blocks=blocks, threads=threads)


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rotary_dim, at_once = problem["rotary_dim"], _warp_rows(problem) * config["unroll"]
    if rotary_dim % HELD:
        return f"the halves of rotary_dim={rotary_dim} are not whole vectors of 16 bytes"
    if config["unroll"] > 1 and at_once >= 2 * _rows(problem):
        return f"{at_once} rows a warp are at least twice the {_rows(problem)} of a token"
    if _warps(problem, config) + config["threads"] // 32 >= 1 << 31:
        return "more warps than 32-bit indices reach"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or the waits of warp after warp; small blocks fill SMs evenly."""
    wait_us = WAIT_US + 0.1 * config["unroll"] + 0.0002 * config["threads"]
    waves = _warps(problem, config) / (gpu.sms * RESIDENT)
    return LAUNCH_US + max(copy_us(ENTRY.bytes_moved(problem), gpu), waves * wait_us) + wait_us


def _default(problem: Problem, gpu: Gpu) -> Config:
    """As many rows a thread as leave every SM its fill of warps."""
    unroll = 1
    for more in SPACE["unroll"]:
        wanted = Config(threads=128, unroll=more)
        filled = _warps(problem, wanted) >= gpu.sms * RESIDENT
        if filled and _reject(wanted, problem, gpu) is None:
            unroll = more
    return Config(threads=128, unroll=unroll)


IMPLEMENTATIONS = (
    Implementation(
        entry="kv_write",
        language="cuda",
        variant="naive",
        summary="a warp a head of a token, one element at a time; any shape",
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
        entry="kv_write",
        language="cuda",
        variant="vectorized",
        summary="16-byte loads and stores, whole pairs a thread, several heads a warp",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_reject,
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
