"""`paged_attn` in CuTe DSL: a warp for each query, and flash-decoding on tensor cores.

Few sequences are split between CTAs, that meet in device memory (``split``) or, from Hopper, are a
cluster and meet in shared memory (``cluster``).

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US, WAVE_LATENCY_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest
from kernelcat.kernels.cute.paged_attn.program import (
    WARPS,
    attend,
    bandwidth_share,
    compiled_in,
    cta_bytes,
    ctas_by_registers,
    is_empty,
    most_splits,
    num_rows,
    num_tiles,
    parameters,
    rows_a_tile,
    size_reject,
    stages_reject,
    tensor_kinds,
    tile_reject,
    token_bytes,
    why_not,
)
from kernelcat.reference.paged_attn import ENTRY, NVFP4
from kernelcat.runtime.gpu import Gpu

# naive ------------------------------------------------------------------------------------------

NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*tensor_kinds(problem), "*uint8", "*uint8", *["int32"] * 6, "float32", "float32")
    constants = compiled_in(problem) | {"nvfp4": problem["kv_dtype"] == NVFP4}
    source = CuteSource("paged_attn.naive:Naive", kinds, tuple(constants.items()))
    grid = (problem["tokens"], ceil(problem["heads"] / NAIVE_WARPS), 1)
    params = parameters(problem, (Pointer("k_block_scale"), Pointer("v_block_scale")))
    return Program((Step(source, grid, params, block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="paged_attn",
    language="cute",
    variant="naive",
    summary="one warp, one query of one head, key after key; any shape",
    archs=("sm_80+",),
    space={},
    illegal=lambda config, problem, gpu: why_not(problem, gpu),
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
)

# split ------------------------------------------------------------------------------------------

MMA_EFFICIENCY = 0.35
"""Of the tensor cores' peak, by mma.sync and ldmatrix on Hopper."""

SPLITS = (1, 2, 3, 4, 8, 16, 32, 64)


def _slots(problem: Problem, config: Config, gpu: Gpu) -> int:
    """CTAs that run at once."""
    by_memory = gpu.shared_bytes // cta_bytes(problem, config)
    return gpu.sms * max(1, min(by_memory, ctas_by_registers(problem)))


def _split_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    is_least = config["stages"] == 2 and config["block_n"] * token_bytes(problem) <= 1 << 14
    ctas = 1 if is_least else min(2, ctas_by_registers(problem))
    return (
        size_reject(config, problem, gpu)
        or tile_reject(config, problem)
        or stages_reject(config, ctas * cta_bytes(problem, config), gpu)
        or _splits_reject(config, problem, gpu)
    )


def _splits_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    splits, tiles = config["splits"], num_tiles(problem)
    most = most_splits(problem, config, SPLITS[-1])
    if splits > max(most, 1):
        return f"{splits} CTAs share fewer tiles of tokens"
    if splits > 1 and tiles * splits > 8 * _slots(problem, config, gpu):
        return "the SMs are full with fewer splits"
    if 2 * splits <= most and 2 * tiles * splits <= gpu.sms:
        return "half of the SMs or more are idle"
    return None


def _split_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return attend(problem, config, gpu, cluster=1, ctas_per_sm=ctas_by_registers(problem))


def _split_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes or products, at the pace of the SMs that have work, and the merge of the splits."""
    if is_empty(problem):
        return LAUNCH_US
    flops, moved = ENTRY.flops(problem), ENTRY.bytes_moved(problem)
    ctas, slots = num_tiles(problem) * config["splits"], _slots(problem, config, gpu)
    waves = ceil(ctas / slots)
    # Full waves but for the last; few CTAs leave SMs idle.
    busy = ctas / (waves * slots) if waves > 1 else min(1.0, ctas / gpu.sms)
    flow = bandwidth_share(problem, config, min(slots, ctas) / gpu.sms)
    rows, block_m = num_rows(problem), rows_a_tile(problem)
    padding = block_m * ceil(rows / block_m) / rows
    math_us = flops * padding / (gpu.flops[problem["dtype"]] * MMA_EFFICIENCY) * 1e6
    merge_us = 0.0
    if config["splits"] > 1:
        partial = 8 * ctas * min(rows, block_m)
        merge_us = WAVE_LATENCY_US + partial * problem["head_dim"] / gpu.bandwidth * 1e6
    steady_us = max(copy_us(moved, gpu, BANDWIDTH_EFFICIENCY * flow), math_us)
    return steady_us / busy + waves * WAVE_LATENCY_US + merge_us


SPLIT: Implementation = Implementation(
    entry="paged_attn",
    language="cute",
    variant="split",
    summary="packed heads on mma.sync, pages by cp.async, keys split between warps and CTAs",
    archs=("sm_80+",),
    space={
        "block_n": (64, 128, 256, 32, 16),
        "stages": (3, 4, 2),
        "splits": SPLITS,
    },
    illegal=_split_reject,
    default=fastest(lambda: SPLIT),
    program=_split_program,
    estimate=_split_estimate,
    techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma": "HMMA.16816.F32"},
    rank=2,
)

# cluster ----------------------------------------------------------------------------------------

CLUSTERS = (16, 8, 4, 2)
GPC_SMS = 14
"""Of a graphics processing cluster that has few; a cluster of CTAs lies within one."""
SM_BANDWIDTH = 60e9
"""Bytes a second that reach one SM while others have nothing to read."""


def _inbox_bytes(problem: Problem) -> int:
    """For each vector of four floats, its place and that of maximum and sum."""
    return int(32 * rows_a_tile(problem) * problem["head_dim"] // 4)


def _cluster_ctas_per_sm(problem: Problem, config: Config) -> int:
    """What registers allow."""
    return int(min(ctas_by_registers(problem), 2 * WARPS // config["warps"]))


def _cluster_ctas(problem: Problem, config: Config, gpu: Gpu) -> int:
    """CTAs on an SM."""
    shared_bytes = cta_bytes(problem, config) + _inbox_bytes(problem)
    return int(min(gpu.shared_bytes // shared_bytes, _cluster_ctas_per_sm(problem, config)))


def _cluster_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return "nothing to share"
    shared_bytes = cta_bytes(problem, config) + _inbox_bytes(problem)
    reason = (
        size_reject(config, problem, gpu)
        or tile_reject(config, problem)
        or stages_reject(config, shared_bytes, gpu)
    )
    if reason:
        return reason
    splits, tiles = config["splits"], num_tiles(problem)
    most = most_splits(problem, config, CLUSTERS[0])
    if splits > most:
        return f"{splits} CTAs share fewer tiles of tokens"
    if splits > 8 and gpu.mig:
        return "a slice of a GPU may have no room for 16 CTAs side by side"
    if tiles * splits > gpu.sms * _cluster_ctas(problem, config, gpu):
        return "more clusters than run at once"
    if 2 * splits <= most and 4 * tiles * splits <= gpu.sms:
        return "three quarters of the SMs or more are idle"
    return None


def _cluster_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    ctas_per_sm = _cluster_ctas_per_sm(problem, config)
    return attend(problem, config, gpu, config["splits"], ctas_per_sm)


def _cluster_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes, at the pace of the SMs that have work."""
    splits, tiles = config["splits"], num_tiles(problem)
    a_gpc = GPC_SMS * _cluster_ctas(problem, config, gpu) // splits
    at_once = max(1, gpu.sms // GPC_SMS * a_gpc)
    ctas = min(tiles, at_once) * splits
    flow = bandwidth_share(problem, config, ctas / gpu.sms)
    rate = min(gpu.bandwidth * BANDWIDTH_EFFICIENCY * flow, min(ctas, gpu.sms) * SM_BANDWIDTH)
    return LAUNCH_US + WAVE_LATENCY_US + ENTRY.bytes_moved(problem) / rate * 1e6


CLUSTER: Implementation = Implementation(
    entry="paged_attn",
    language="cute",
    variant="cluster",
    summary="split between the CTAs of a cluster, that merge through distributed shared memory",
    archs=("sm_90a", "sm_100a", "sm_103a"),
    space={
        "block_n": (128, 256, 64, 32),
        "stages": (6, 4, 3),
        "splits": CLUSTERS,
        "warps": (WARPS, 2 * WARPS),
    },
    illegal=_cluster_reject,
    default=fastest(lambda: CLUSTER),
    program=_cluster_program,
    estimate=_cluster_estimate,
    techniques={
        "cp.async": "LDGSTS",
        "mma": "HMMA.16816.F32",
        "cluster": "UCGABAR",
        "store at a peer": "STAS",
        "dependent launch": "ACQBULK",
    },
    rank=3,
)

IMPLEMENTATIONS = (NAIVE, SPLIT, CLUSTER)
