"""Cost models: estimated run times, which rank configurations where nothing can be measured.

Only the order of estimates matters; no estimate is ever shown as a measurement.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kernelcat.runtime.gpu import Gpu

if TYPE_CHECKING:
    from kernelcat.catalog.implementation import Implementation
    from kernelcat.catalog.spec import Problem

# Times in microseconds; efficiencies are fractions of the peak rate.
LAUNCH_US = 2.0
WAVE_LATENCY_US = 1.5
TENSOR_EFFICIENCY = 0.80
BANDWIDTH_EFFICIENCY = 0.90
L2_TO_DRAM = 2.2
"""Bandwidth from L2 to the SMs, as a multiple of DRAM bandwidth."""


def copy_us(bytes_moved: int, gpu: Gpu, efficiency: float = BANDWIDTH_EFFICIENCY) -> float:
    """Microseconds to move ``bytes_moved`` (read plus written) at ``efficiency`` of the bandwidth.

    ``efficiency`` is a fraction of the GPU's peak DRAM bandwidth.
    """
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
    """Microseconds of a tiled matrix product of A (m, k) and B (n, k), elements of 2 bytes.

    The estimate is the longer of two times: that of whole waves of tiles, and that of DRAM. Small
    tiles read their operands again and again through L2, so each tile takes as long as its tensor
    core work or its part of the L2 bandwidth, whichever is longer. Split-K adds the traffic of
    float32 partial sums.
    """
    tiles = ceil(m / block_m) * ceil(n / block_n) * split_k
    if tiles == 0 or k == 0:
        return LAUNCH_US
    k_tile = ceil(k / split_k)
    waves = ceil(tiles / (gpu.sms * blocks_per_sm))
    peak = gpu.flops.get(dtype, gpu.flops["float32"]) * efficiency
    resident = gpu.sms * blocks_per_sm  # tiles that run at once and share the GPU's rates
    math_us = 2 * block_m * block_n * k_tile / peak * resident * 1e6
    l2_us = 2 * (block_m + block_n) * k_tile / (gpu.bandwidth * L2_TO_DRAM) * resident * 1e6
    partial_bytes = 8 * m * n * split_k if split_k > 1 else 0
    dram_us = copy_us(2 * (m * k + n * k + m * n) + partial_bytes, gpu)
    return max(waves * (max(math_us, l2_us) + WAVE_LATENCY_US), dram_us) + LAUNCH_US


MAX_SLOWDOWN = 1.1
"""An estimate that is higher than another's by a larger factor is not worth a try: models err."""


def why_slower(us: float, other: Implementation, problem: Problem, gpu: Gpu) -> str | None:
    """Why an estimate of ``us`` is not worth a try where ``other`` serves ``problem``, or None.

    For variants of few rows, beside which one for many rows is always there.
    """
    config = other.default(problem, gpu)
    if other.why_not(config, problem, gpu) is not None:
        return None
    other_us = other.estimate(problem, config, gpu)
    if us <= MAX_SLOWDOWN * other_us:
        return None
    return f"{other.variant} takes {other_us:.3g} us by the cost model, and this {us:.3g} us"
