"""`kv_transfer` in CUDA C++: vectors (through registers, straight into the mapped caches of peers).

The caches lie in memory that all ranks map (``Group.share``), so a page is read once and written
once, and the receiving GPU launches nothing.
"""

from __future__ import annotations

from math import ceil, gcd

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    MappedPointer,
    Param,
    Pointer,
    Program,
    Rank,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.windows import TRIP_US, wire_us
from kernelcat.reference.all_reduce import MAX_RANKS
from kernelcat.reference.kv_transfer import CACHES, page_bytes
from kernelcat.runtime.gpu import Gpu

THREADS = 256
MAX_TILES = 1 << 31
"""Tiles are counted in 32 bits."""

SPACE = {"unroll": (2, 4, 8), "blocks": (8, 16, 32, 64, 128)}
"""unroll : vectors of a tile for each thread; blocks : thread blocks at most"""


def _vector_bytes(problem: Problem) -> int:
    """Bytes that are moved at once: pages begin at multiples of them."""
    return gcd(page_bytes(problem), 16)


def _page_tiles(problem: Problem, config: Config) -> int:
    vectors = page_bytes(problem) // _vector_bytes(problem)
    return ceil(vectors / (THREADS * config["unroll"]))


def _num_tiles(problem: Problem, config: Config) -> int:
    return int(problem["count"] * problem["caches"] * _page_tiles(problem, config))


def caches_of_all_ranks(name: str) -> tuple[Param, ...]:
    """Parameters of a kernel: a cache, and that of each rank after this one; null for none."""
    return (Pointer(name), *(MappedPointer(name, shift) for shift in range(1, MAX_RANKS)))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks = min(_num_tiles(problem, config), config["blocks"])
    if num_blocks == 0:
        return Program(())
    source = instance(
        "kv_transfer/vectors.cu", "kv_transfer_vectors",
        f"uint{8 * _vector_bytes(problem)}_t", problem["ranks"], THREADS, config["unroll"],
    )  # fmt: skip
    lists = map(Pointer, ("source_pages", "dest_ranks", "dest_pages"))
    vectors = page_bytes(problem) // _vector_bytes(problem)
    sizes = map(Int32, (problem["count"], problem["caches"], vectors, _page_tiles(problem, config)))
    caches = (param for name in CACHES for param in caches_of_all_ranks(name))
    return Program((Step(source, (num_blocks, 1, 1), (*lists, *sizes, Rank(), *caches), THREADS),))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_tiles(problem, config) >= MAX_TILES:
        return f"{_num_tiles(problem, config)} tiles are too many to be counted in 32 bits"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The longer of the wire and of the local memory, and a trip."""
    size = problem["count"] * problem["caches"] * page_bytes(problem)
    blocks = max(min(_num_tiles(problem, config), config["blocks"]), 1)
    wire = wire_us(size, blocks * min(config["unroll"], 4) / 4)
    return LAUNCH_US + max(wire, copy_us(size, gpu)) + TRIP_US


IMPLEMENTATIONS = (
    Implementation(
        entry="kv_transfer",
        language="cuda",
        variant="vectors",
        summary="through registers into the peers' caches, which are mapped; tiles of pages",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        techniques={"wide stores": "STG.E.128"},
        rank=0,
    ),
)
