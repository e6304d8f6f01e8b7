"""Predicted time of matrix products of 16-bit operands."""

from math import ceil

from kernelcat.catalog import cost_model, ring_model
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common.product import Tile
from kernelcat.runtime.gpu import Gpu

PERSISTENT_US = 0.8
"""What a persistent program takes longer to start than one of CUDA or CuTe."""


def estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The cost model's time.

    Configurations with ``subtiles`` are those of persistent kernels.
    """
    return (_persistent if "subtiles" in config else _program_a_tile)(problem, config, gpu)


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of a ring that TMA fills; the stores of a tile are hidden only by ping-pong."""
    tile = Tile.of(config)
    num_tiles = tile.count(problem)
    waves = ceil(num_tiles / gpu.sms)
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    stored = 1 if config.get("schedule") == "pingpong" else waves
    tiles = ring_model.Tiles(m, n, 2 * k, tile.m, tile.n, 1, 1, num_tiles, waves, stored)
    us = ring_model.BITS_16.gemm_us(tiles, gpu, problem["dtype"], 2 * (m * k + n * k + m * n))
    return us + PERSISTENT_US


def _program_a_tile(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of tiles, longer where programs are too few, or too large to overlap.

    While a program that has an SM to itself starts and ends, memory is idle. Configurations without
    ``stages`` overlap nothing.
    """
    tile, split = Tile.of(config), config.get("split_k", 1)
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    overlaps = "stages" in config
    efficiency = 0.1
    if overlaps:
        efficiency = 0.75 if tile.m * tile.n >= 128 * 256 else 0.65
    us = cost_model.tiled_gemm_us(
        m, n, k, block_m=tile.m, block_n=tile.n, split_k=split, gpu=gpu, dtype=dtype,
        efficiency=efficiency,
    )  # fmt: skip
    num_programs = max(tile.count(problem) * split, 1)
    idle = gpu.sms / min(num_programs, gpu.sms)
    is_alone = 2 * tile.stage_bytes * config.get("stages", 0) > gpu.shared_bytes
    gaps_us = cost_model.WAVE_LATENCY_US * (ceil(num_programs / gpu.sms) - 1) if is_alone else 0
    memory_us = cost_model.copy_us(2 * (m * k + n * k + m * n), gpu) * idle + gaps_us
    return max(us, memory_us) if overlaps else us + memory_us
