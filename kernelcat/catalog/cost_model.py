"""Cost models: estimated run times, which rank configurations where nothing can be measured.

Only the order of estimates matters; no estimate is ever shown as a measurement.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kernelcat.runtime.gpu import Gpu

if TYPE_CHECKING:
    from kernelcat.catalog.implementation import Config, Implementation
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


START_US = 0.6
"""From the launch of a kernel in a CUDA graph to its first load, and from its last store on."""
LOAD_US = 0.8
"""From a load that misses L2 to its value."""
DEPENDENT_US = 0.3
"""What a small kernel loses that begins only when the kernel before it has ended."""
STREAM_EFFICIENCY = 0.89
"""Share of the peak DRAM bandwidth that plain loads and stores of contiguous data reach."""
SM_BYTES_PER_US = 75e3
"""Bytes that one SM reads and writes in a microsecond while the others have nothing to do."""
BLOCK_START_US = 0.074
"""Microseconds of an SM to start a thread block; hidden where thread blocks run for longer."""
ROW_OVERHEAD_BYTES = 20
"""Bytes that memory could move in the time that it loses between two rows of a scattered array."""


def issue_us(instructions: float, gpu: Gpu, busy_sms: float | None = None) -> float:
    """Microseconds to issue ``instructions``, counted once for each thread that runs them.

    A multiplication and addition counts as two operations in the peak rate of float32, and is one
    instruction. Only ``busy_sms`` SMs have work; None stands for all.
    """
    share = 1.0 if busy_sms is None else max(busy_sms, 1.0) / gpu.sms
    return instructions / (gpu.flops["float32"] / 2 * share) * 1e6


def row_share(row_bytes: int) -> float:
    """Share of the bandwidth that rows of ``row_bytes`` reach that lie scattered in memory."""
    return 0.99 * row_bytes / (row_bytes + ROW_OVERHEAD_BYTES)


def stream_us(
    bytes_moved: int,
    gpu: Gpu,
    *,
    blocks: int,
    rounds: float = 1.0,
    share: float = 1.0,
    instructions: float = 0.0,
    waits_us: float = 0.0,
) -> float:
    """Microseconds of a kernel that reads and writes contiguous data once.

    It starts, waits for its first load, and then takes the longest of: DRAM, the busy SMs'
    connections to L2, further loads one after another, instructions, and the start of thread
    blocks.

    Parameters
    ----------
    bytes_moved : bytes read plus bytes written
    blocks : thread blocks
    rounds : loads that are made one after another where an SM's threads stand
    share : part of :data:`STREAM_EFFICIENCY` that the kernel's accesses reach
    instructions : of all threads together, each thread's counted
    waits_us : what a round waits for besides its load, which nothing hides (barriers, reductions)
    """
    busy = min(max(blocks, 1), gpu.sms)
    bandwidth = min(gpu.bandwidth * STREAM_EFFICIENCY * share / 1e6, busy * SM_BYTES_PER_US)
    flow_us = max(
        bytes_moved / bandwidth,
        (rounds - 1) * LOAD_US,
        issue_us(instructions, gpu, busy),
        blocks / gpu.sms * BLOCK_START_US,
    )
    return START_US + LOAD_US + flow_us + max(rounds, 1.0) * waits_us


BARRIER_US, DESCRIPTOR_US = 0.2, 0.3
"""Until the barriers of a ring of stages are ready; until a tensor map is fetched."""
RING_SHARE, BOX_SHARE = 0.95, 0.935
"""Shares of what plain loads reach: a ring loads and stores in turns; boxes have rows as well."""


def ring_copy_us(
    num_bytes: int, gpu: Gpu, *, tile_bytes: int, loads: float, per_sm: int, boxes: bool
) -> float:
    """Microseconds to copy ``num_bytes`` by TMA, tile after tile through rings in shared memory.

    ``per_sm`` thread blocks on an SM have ``loads`` tiles each in flight. ``boxes`` are tiles of a
    tensor map, the others contiguous bytes.
    """
    tiles = ceil(num_bytes / tile_bytes)
    blocks = min(tiles, gpu.sms * per_sm)
    ready_us = BARRIER_US + (DESCRIPTOR_US if boxes else 0.0)
    return ready_us + stream_us(
        2 * num_bytes, gpu, blocks=blocks, rounds=tiles / max(blocks * loads, 1),
        share=BOX_SHARE if boxes else RING_SHARE,
    )  # fmt: skip


CLUSTER_FIT = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.9, 5: 0.84, 6: 0.78, 8: 0.84}
"""Thread blocks of a cluster -> share of the SMs that clusters of this size fill: a cluster runs in
one GPC, and some GPCs have an odd number of SMs."""


def resident_clusters(thread_blocks: int, size: int) -> int:
    """Clusters of ``size`` that run at once on a GPU with room for so many thread blocks."""
    return int(thread_blocks * CLUSTER_FIT[size] / size)


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
    resident = gpu.sms * blocks_per_sm  # tiles for which there is room at once
    math_us = 2 * block_m * block_n * k_tile / peak * resident * 1e6
    sharers = min(tiles, resident)
    l2_us = 2 * (block_m + block_n) * k_tile / (gpu.bandwidth * L2_TO_DRAM) * sharers * 1e6
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


def least_estimate(
    implementation: Implementation, problem: Problem, gpu: Gpu
) -> tuple[float, Config] | None:
    """The least estimate in microseconds of what is legal and not unpromising, and which one it is.

    None where there is no such configuration. Searches the whole space.
    """
    found = (
        (implementation.estimate(problem, config, gpu), config)
        for config in implementation.promising(problem, gpu)
    )
    return min(found, key=lambda pair: pair[0], default=None)
