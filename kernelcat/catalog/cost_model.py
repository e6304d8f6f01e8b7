"""Analytic run times: they rank configurations where nothing can be measured.

Only the order matters; no number from here is ever shown as a measurement.
"""

from __future__ import annotations

from math import ceil

from kernelcat.runtime.gpu import Gpu

LAUNCH_US = 2.0
WAVE_LATENCY_US = 1.5
TENSOR_EFFICIENCY = 0.80
BANDWIDTH_EFFICIENCY = 0.90
L2_TO_DRAM = 2.2
"""How much faster L2 feeds the SMs than DRAM does."""


def copy_us(bytes_moved: int, gpu: Gpu, efficiency: float = BANDWIDTH_EFFICIENCY) -> float:
    """Microseconds to move ``bytes_moved`` (read plus written) at a fraction of peak bandwidth."""
    return LAUNCH_US + bytes_moved / (gpu.bandwidth * efficiency) * 1e6


def tiled_gemm_us(
    m: int,
    n: int,
    k: int,
    *,
    block_m: int,
    block_n: int,
    split_k: int,
    gpu: Gpu,
    dtype: str,
    blocks_per_sm: int = 1,
    efficiency: float = TENSOR_EFFICIENCY,
) -> float:
    """Microseconds of a tiled matrix product: whole waves of tiles, or the memory they need.

    Small tiles re-read their operands through L2, so each SM's share of L2 bandwidth bounds a
    tile as the tensor cores do; split-K adds the float32 partial sums.
    """
    tiles = ceil(m / block_m) * ceil(n / block_n) * split_k
    if tiles == 0 or k == 0:
        return LAUNCH_US
    k_tile = ceil(k / split_k)
    waves = ceil(tiles / (gpu.sms * blocks_per_sm))
    peak = gpu.flops.get(dtype, gpu.flops["float32"]) * efficiency
    slots = gpu.sms * blocks_per_sm  # tiles that share the chip while one of them runs
    math_us = 2 * block_m * block_n * k_tile / peak * slots * 1e6
    l2_us = 2 * (block_m + block_n) * k_tile / (gpu.bandwidth * L2_TO_DRAM) * slots * 1e6
    partial_bytes = 8 * m * n * split_k if split_k > 1 else 0
    dram_us = copy_us(2 * (m * k + n * k + m * n) + partial_bytes, gpu)
    return max(waves * (max(math_us, l2_us) + WAVE_LATENCY_US), dram_us) + LAUNCH_US
