"""`kv_transfer` in Triton: words straight into the mapped caches of peers, a launch a cache."""

from __future__ import annotations

from math import ceil, gcd

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    MappedPointer,
    Pointer,
    Program,
    Rank,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference.all_reduce import MAX_RANKS
from kernelcat.reference.kv_transfer import CACHES, page_bytes
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.kv_transfer.device:push"
NVLINK, TRIP_US, PROGRAM_RATE = 370e9, 1.5, 4e9
"""Bytes per second over the link and of a program, and microseconds of a trip to a peer."""
WORDS = {8: "int64", 4: "int32", 2: "float16", 1: "uint8"}
"""Bytes -> element type of the words that are moved, bit for bit."""

SPACE = {"block": (512, 1024, 2048, 4096), "programs": (16, 32, 64, 128), "warps": (4, 8)}
"""block : words of a program at once; programs : programs at most"""


def _word_bytes(problem: Problem) -> int:
    """Bytes of a word: pages begin at multiples of them."""
    return gcd(page_bytes(problem), max(WORDS))


def _page_words(problem: Problem) -> int:
    return page_bytes(problem) // _word_bytes(problem)


def _num_tiles(problem: Problem, config: Config) -> int:
    """Tiles of one cache."""
    return int(problem["count"] * ceil(_page_words(problem) / config["block"]))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["count"] == 0:
        return Program(())
    return Program(tuple(_push(problem, config, name) for name in CACHES[: problem["caches"]]))


def _push(problem: Problem, config: Config, cache: str) -> Step:
    """The launch that moves the pages of one cache."""
    words = _page_words(problem)
    dtype = WORDS[_word_bytes(problem)]
    pointers = (Pointer(cache), *(MappedPointer(cache, shift) for shift in range(1, MAX_RANKS)))
    pointer_type = triton.pointer(cache, dtype).type
    arguments = {
        **{name: triton.pointer(name, "int32")
           for name in ("source_pages", "dest_ranks", "dest_pages")},
        **{f"cache{shift}": triton.Argument(pointer_type, (pointer,), 16)
           for shift, pointer in enumerate(pointers)},
        "num_tiles": triton.integer(_num_tiles(problem, config), divisor=1),
        "page_words": triton.integer(words),
        "page_tiles": triton.integer(ceil(words / config["block"]), divisor=1),
        "rank": triton.Argument("i32", (Rank(),)),
    }  # fmt: skip
    constants = {"RANKS": problem["ranks"], "BLOCK": config["block"]}
    grid = (min(_num_tiles(problem, config), config["programs"]), 1, 1)
    return triton.step(KERNEL, grid, arguments, constants, num_warps=config["warps"])


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_tiles(problem, config) >= 1 << 31:
        return f"{_num_tiles(problem, config)} tiles are too many to be counted in 32 bits"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    size = problem["count"] * page_bytes(problem)
    programs = max(min(_num_tiles(problem, config), config["programs"]), 1)
    wire = size / min(NVLINK, PROGRAM_RATE * programs) * 1e6
    one = LAUNCH_US + max(wire, copy_us(size, gpu)) + TRIP_US
    return float(problem["caches"] * one)


IMPLEMENTATIONS = (
    Implementation(
        entry="kv_transfer",
        language="triton",
        variant="words",
        summary="words of 8 bytes into the peers' caches, which are mapped; a launch a cache",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        rank=0,
    ),
)
