"""Predicted time of matrix products of 16-bit operands."""

from math import ceil, gcd

from kernelcat.catalog import cost_model, ring_model
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common.product import Tile
from kernelcat.runtime.gpu import Gpu

PARTIAL_BYTES_PER_US = 52e3
"""Bytes of a tile's partial sums that programs write and read in a microsecond."""
IDLE_POWER, SPLIT_TIME = 0.5, 1.06
"""Power of the SMs over the busy ones by which memory takes longer; time of programs that split k
over that of the model. Fitted to 307 times of `tma` and `tiled` on an H200."""
COPY_INSTRUCTIONS, LOAD_INSTRUCTIONS = 3, 6
"""Instructions of a thread to copy up to 16 bytes to shared memory asynchronously, and to load and
store there one element of 16 bits, as an odd K needs it. Counted in machine code, not timed."""
PERSISTENT_US = 0.8
"""What a persistent program takes longer to start than one of CUDA or CuTe."""


def estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The cost model's time.

    Configurations with ``subtiles`` are those of persistent kernels.
    """
    return (_persistent if "subtiles" in config else _program_a_tile)(problem, config, gpu)


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of a ring that TMA fills; the stores of a tile are hidden only by ping-pong."""
    return _ring_us(problem, config, gpu) + PERSISTENT_US


def _ring_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of a ring from which tensor cores multiply."""
    tile, split = Tile.of(config), config.get("split_k", 1)
    programs = tile.count(problem) * split
    waves = ceil(programs / gpu.sms) / split
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    stored = 1 if config.get("schedule") == "pingpong" else max(waves, 1)
    tiles = ring_model.Tiles(m, n, 2 * k, tile.m, tile.n, 1, 1, programs, waves, stored)
    bytes_moved = 2 * (m * k + n * k + m * n)
    return ring_model.BITS_16.gemm_us(tiles, gpu, problem["dtype"], bytes_moved)


def _program_a_tile(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of tiles or of a ring, longer where programs are too few, or too large to overlap.

    While a program that has an SM to itself starts and ends, memory is idle. Configurations without
    ``stages`` overlap nothing.
    """
    tile, split = Tile.of(config), config.get("split_k", 1)
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    num_programs = max(tile.count(problem) * split, 1)
    idle = gpu.sms / min(num_programs, gpu.sms)
    is_alone = 2 * tile.stage_bytes * config.get("stages", 0) > gpu.shared_bytes
    gaps_us = cost_model.WAVE_LATENCY_US * (ceil(num_programs / gpu.sms) - 1) if is_alone else 0
    stream_us = cost_model.copy_us(2 * (m * k + n * k + m * n), gpu) - cost_model.LAUNCH_US
    memory_us = cost_model.LAUNCH_US + stream_us * idle**IDLE_POWER + gaps_us
    efficiency = 0.1
    if "stages" in config:
        efficiency = 0.75 if tile.m * tile.n >= 128 * 256 else 0.65
    us = cost_model.tiled_gemm_us(
        m, n, k, block_m=tile.m, block_n=tile.n, split_k=split, gpu=gpu, dtype=problem["dtype"],
        efficiency=efficiency,
    )  # fmt: skip
    if "stages" not in config:
        return us + memory_us
    sums_us = 4 * split * tile.m * tile.n / PARTIAL_BYTES_PER_US if split > 1 else 0.0
    busy_us = max(us, memory_us, _ring_us(problem, config, gpu))
    busy_us += _unaligned_us(tile, split, problem, gpu)
    return busy_us * (SPLIT_TIME if split > 1 else 1.0) + sums_us


def _unaligned_us(tile: Tile, split: int, problem: Problem, gpu: Gpu) -> float:
    """What rows add that do not begin at multiples of 16 bytes.

    Copies are as wide as the alignment, so there are more of them. There is none of 2 bytes: with
    an odd K elements are loaded one by one, and every k-block waits for its own.
    """
    aligned, k = gcd(problem["K"], 8), problem["K"]
    if aligned == 8:
        return 0.0
    programs = tile.count(problem) * split
    elements = tile.count(problem) * (tile.m + tile.n) * k
    if aligned > 1:
        more, waits_us = COPY_INSTRUCTIONS * (1 / aligned - 1 / 8), 0.0
    else:
        more = LOAD_INSTRUCTIONS
        k_blocks = ceil(programs / gpu.sms) * ceil(ceil(k / split) / tile.k)
        waits_us = k_blocks * cost_model.LOAD_US
    return cost_model.issue_us(more * elements, gpu, min(programs, gpu.sms)) + waits_us
