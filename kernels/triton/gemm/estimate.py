"""Which configuration without measuring."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.gemm.arguments import Tile
from kernelcat.runtime.gpu import Gpu


def estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The model's time, longer where programs are too few, or too large to overlap.

    A program alone on its SM leaves memory idle while it starts and while it ends.
    """
    tile, split = Tile.of(config), config.get("split_k", 1)
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    persistent = "subtiles" in config
    overlaps = persistent or "stages" in config
    efficiency = 0.1
    if overlaps:
        efficiency = 0.75 if tile.m * tile.n >= 128 * 256 else 0.65
    us = cost_model.tiled_gemm_us(
        m, n, k, block_m=tile.m, block_n=tile.n, split_k=split, gpu=gpu, dtype=dtype,
        efficiency=efficiency,
    )  # fmt: skip
    programs = max(tile.count(problem) * split, 1)
    idle = gpu.sms / min(programs, gpu.sms)
    fills_sm = 2 * tile.stage_bytes * config.get("stages", 0) > gpu.shared_bytes
    alone = fills_sm and not persistent
    gaps = cost_model.WAVE_LATENCY_US * (ceil(programs / gpu.sms) - 1) if alone else 0
    memory_us = cost_model.copy_us(2 * (m * k + n * k + m * n), gpu) * idle + gaps
    return max(us, memory_us) if overlaps else us + memory_us
