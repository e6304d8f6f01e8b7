"""Estimates of `paged_attn`: of two configurations that were timed on one H200, the faster one has
the smaller estimate."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.reference.paged_attn import attention, with_chunk
from kernelcat.runtime import gpu

H200 = gpu.find("h200")


def raced(pages: int, *shape: int, chunk: int = 0, **axes: object) -> Problem:
    """The problem of ``attention(*shape, **axes)`` whose cache has ``pages``; with a ``chunk`` one
    sequence has so many query tokens."""
    problem = attention(*shape, **axes)
    problem = with_chunk(problem, chunk) if chunk else problem
    return Problem.of("paged_attn", **{**problem.values, "pages": pages})


def estimate(problem: Problem, name: str, values: dict[str, int]) -> float:
    """Microseconds of a configuration of the implementation ``cuda/wgmma``."""
    implementation = catalog.implementation("paged_attn", *name.split("/"))
    config = Config(values)
    assert implementation.why_not(config, problem, H200) is None
    return implementation.estimate(problem, config, H200)


ONE_LONG = raced(4055, 1, 2, 1, 256, 129_760, 32)
"""All of its parts one program of Triton's `split` adds up: 140 us; CUDA's `split` took 52."""
SPECULATIVE = raced(21_564, 151, 32, 8, 128, 44_448, 32, q_len=6, lengths="skewed")
"""CUDA's `split` reads 2.8 GB of keys and values again for each of two row tiles of 16 rows, a
thread block one after the other: 1,336 us; CuTe's took 942."""
CHUNK = raced(85, 13, 64, 4, 128, 368, 16, lengths="skewed", chunk=367)
"""CuTe's `split` starts 4,784 thread blocks, of which 368 have rows: 52 us; Triton's `tiled` 31."""
PROMPT = raced(3878, 7, 64, 8, 128, 25_344, 16, lengths="skewed", softcap=50.0, chunk=989)
"""Clusters of two load keys and values once: 1,318 us, and 1,413 without."""

WINDOWS = raced(414, 3, 9, 3, 64, 8832, 64, q_len=267, window=128)
"""A tile of 64 rows sees 149 tokens of 394 that the queries of its sequence see: 6.8 us; clusters,
which exchange sums, take 12.5."""


@pytest.mark.parametrize(
    ("problem", "faster", "slower"),
    [
        (
            ONE_LONG,
            ("cuda/split", {"block_m": 16, "block_n": 64, "blocks_per_sm": 1, "num_warps": 4}),
            ("triton/split", {"stages": 6, "block_m": 16, "block_n": 32, "warps": 4, "per_sm": 2}),
        ),
        (
            SPECULATIVE,
            ("cute/split", {"block_n": 64, "splits": 1, "stages": 3}),
            ("cuda/split", {"block_m": 16, "block_n": 64, "blocks_per_sm": 3, "num_warps": 2}),
        ),
        (
            CHUNK,
            ("triton/tiled", {"stages": 2, "block_m": 64, "block_n": 64, "warps": 4}),
            ("cute/split", {"block_n": 64, "splits": 1, "stages": 3}),
        ),
        (
            PROMPT,
            ("cuda/wgmma", {"block_m": 128, "block_n": 128, "stages": 2, "cluster": 2}),
            ("cuda/wgmma", {"block_m": 128, "block_n": 128, "stages": 2, "cluster": 1}),
        ),
        (
            WINDOWS,
            ("cute/split", {"block_n": 32, "splits": 1, "stages": 4}),
            ("cute/cluster", {"block_n": 32, "splits": 2, "stages": 4, "warps": 4}),
        ),
    ],
)
def test_the_faster_of_two_raced_kernels_has_the_smaller_estimate(
    problem: Problem, faster: tuple[str, dict[str, int]], slower: tuple[str, dict[str, int]]
) -> None:
    assert estimate(problem, *faster) < estimate(problem, *slower)


def test_an_sm_that_has_one_row_tile_has_not_both_the_chunk_and_the_longest_sequence() -> None:
    """45 row tiles on 132 SMs took 17.8 us; one after the other, the two longest take 35."""
    problem = raced(45, 3, 4, 1, 64, 1408, 64, lengths="skewed", chunk=1353)
    config = {"block_m": 128, "block_n": 128, "stages": 2, "cluster": 1}
    assert estimate(problem, "cuda/wgmma", config) == pytest.approx(17.8, rel=0.2)
