"""`paged_attn` in CuTe DSL: a warp for each query, and flash-decoding on tensor cores.

Where sequences are few, thread blocks split the keys of each: they merge their partial results in
device memory (``split``) or, from Hopper on, in the shared memory of a cluster (``cluster``).

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.paged_attn.few_rows import resident_clusters
from kernelcat.kernels.cute.paged_attn.program import (
    SM_BANDWIDTH,
    WARPS,
    attend,
    bandwidth_share,
    chain_us,
    cta_bytes,
    ctas_by_registers,
    illegal_problem,
    illegal_tile,
    is_empty,
    kernel_constants,
    math_us,
    max_splits,
    num_rows,
    num_tiles,
    overlapped_us,
    parameters,
    tensor_kinds,
    tile_rows,
    token_bytes,
    unpromising_tile,
)
from kernelcat.reference.paged_attn import ENTRY, NVFP4, most_visible, tiles_seen
from kernelcat.runtime.gpu import Gpu

# naive ------------------------------------------------------------------------------------------

NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*tensor_kinds(problem), "*uint8", "*uint8", *["int32"] * 6, "float32", "float32")
    constants = kernel_constants(problem) | {"nvfp4": problem["kv_dtype"] == NVFP4}
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
    illegal=lambda config, problem, gpu: illegal_problem(problem, gpu),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
)

# split ------------------------------------------------------------------------------------------

BEGIN_END_US = 0.9
"""From the start of a thread block to its first tile, and from its last one to its end."""
ARRIVE_US, PART_US = 0.9, 0.16
"""Microseconds until the last thread block of a tile knows that it is the last one, and for each
part that its threads add up: each thread loads a vector of one part after another, and takes its
next vector when it is done."""
ROWS_US = 2.0
"""Microseconds to load the queries of 64 rows of 128 elements, and to store their results."""
EMPTY_US = 1.6
"""Microseconds of a thread block that finds no rows: a grid has row tiles of the longest chunk for
each sequence."""
MERGED_ELEMENTS = 4 * 32 * WARPS
"""Elements of rows of which each thread has one vector."""

SPLITS = (1, 2, 3, 4, 8, 16, 32, 64)


def _resident_ctas(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Thread blocks that run at once."""
    by_memory = gpu.shared_bytes // cta_bytes(problem, config)
    return gpu.sms * max(1, min(by_memory, ctas_by_registers(problem)))


def _illegal_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return illegal_tile(config, problem, gpu, cta_bytes(problem, config))


def _unpromising_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := unpromising_tile(config, problem):
        return reason
    is_smallest = config["stages"] == 2 and config["block_n"] * token_bytes(problem) <= 1 << 14
    ctas = 1 if is_smallest else min(2, ctas_by_registers(problem))
    if ctas * cta_bytes(problem, config) > gpu.shared_bytes:
        return f"{config['stages']} stages leave an SM room for fewer than {ctas} thread blocks"
    return _unpromising_splits(config, problem, gpu)


def _unpromising_splits(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    splits, tiles = config["splits"], num_tiles(problem)
    useful_splits = max_splits(problem, config, SPLITS[-1])
    if splits > max(useful_splits, 1):
        return f"the {useful_splits} tiles of tokens are fewer than {splits} splits"
    if splits > 1 and tiles * splits > 8 * _resident_ctas(problem, config, gpu):
        return "fewer splits fill the SMs too"
    if 2 * splits <= useful_splits and 2 * tiles * splits <= gpu.sms:
        return "at least half of the SMs are idle"
    return None


def _split_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return attend(problem, config, gpu, cluster=1, ctas_per_sm=ctas_by_registers(problem))


def _split_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The tiles of the longest split, the bytes or the products, then the merge."""
    if is_empty(problem):
        return LAUNCH_US
    splits, dim, block_m = config["splits"], problem["head_dim"], tile_rows(problem)
    tiles, seen = tiles_seen(problem, block_m)
    ctas, resident = tiles * problem["kv_heads"] * splits, _resident_ctas(problem, config, gpu)
    moved, merge_us = ENTRY.bytes_moved(problem), 0.0
    if splits > 1:
        elements = min(num_rows(problem), block_m) * dim
        moved += 8 * ctas * elements  # written and read
        parts = min(splits, ceil(most_visible(problem, block_m) / config["block_n"]))
        merge_us = ARRIVE_US + parts * PART_US * ceil(elements / MERGED_ELEMENTS)
    rate = gpu.bandwidth * bandwidth_share(problem, config, min(resident, ctas) / gpu.sms)
    bytes_us = moved / (rate * BANDWIDTH_EFFICIENCY) * 1e6
    products_us = math_us(problem, seen * problem["kv_heads"], ctas, gpu)
    rows_us = ROWS_US * block_m * dim / 8192
    tiles_us = chain_us(
        problem, config, ctas / resident, seen / tiles, rows_us, alone=ctas <= gpu.sms
    )
    tiles_us += EMPTY_US * (num_tiles(problem) * splits - ctas) / resident
    steady_us = overlapped_us(tiles_us, max(bytes_us, products_us))
    return LAUNCH_US + BEGIN_END_US + steady_us + merge_us


SPLIT = Implementation(
    entry="paged_attn",
    language="cute",
    variant="split",
    summary="heads packed into rows on mma.sync, pages by cp.async, keys split over thread blocks",
    archs=("sm_80+",),
    space={
        "block_n": (64, 128, 256, 32, 16),
        "stages": (3, 4, 2),
        "splits": SPLITS,
    },
    illegal=_illegal_split,
    unpromising=_unpromising_split,
    program=_split_program,
    estimate=_split_estimate,
    techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma": "HMMA.16816.F32"},
    rank=2,
)

# cluster ----------------------------------------------------------------------------------------

CLUSTERS = (16, 8, 4, 2)
ALONE = 0.83
"""Part of its bandwidth that an SM reaches with one thread block, which waits at every tile."""
EXCHANGE_US, EXCHANGE_PART_US = 3.7, 0.25
"""Microseconds of the exchange of 64 rows of 128 elements, in four-float messages, and what each
thread block of the cluster adds."""


def _inbox_bytes(problem: Problem) -> int:
    """Shared memory of an `Exchange`: 32 bytes for each four floats of a row."""
    return int(32 * tile_rows(problem) * problem["head_dim"] // 4)


def _cluster_cta_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a thread block in a cluster."""
    return cta_bytes(problem, config) + _inbox_bytes(problem)


def _cluster_ctas_by_registers(problem: Problem, config: Config) -> int:
    """Thread blocks on an SM that registers allow."""
    return int(min(ctas_by_registers(problem), 2 * WARPS // config["warps"]))


def _ctas_per_sm(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Thread blocks on an SM."""
    by_memory = gpu.shared_bytes // _cluster_cta_bytes(problem, config)
    return int(min(by_memory, _cluster_ctas_by_registers(problem, config)))


def _illegal_cluster(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why a cluster cannot serve, or leaves the problem to `split`.

    `cluster` has the higher rank: without measurements it serves whatever it can. So problems with
    too little or too much work for clusters are illegal here, not unpromising.
    """
    if is_empty(problem):
        return "there are no queries"
    shared_bytes = _cluster_cta_bytes(problem, config)
    if reason := illegal_tile(config, problem, gpu, shared_bytes):
        return reason
    splits = config["splits"]
    useful_splits = max_splits(problem, config, CLUSTERS[0])
    if splits > useful_splits:
        return f"the {useful_splits} tiles of tokens are fewer than {splits} thread blocks"
    if splits > 8 and gpu.mig:
        return "a slice of a GPU may have no room for a cluster of 16 thread blocks"
    if num_tiles(problem) * splits > gpu.sms * _ctas_per_sm(problem, config, gpu):
        return "more clusters than run at once: the variant split serves"
    return None


def _unpromising_cluster(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := unpromising_tile(config, problem):
        return reason
    splits, useful_splits = config["splits"], max_splits(problem, config, CLUSTERS[0])
    if 2 * splits <= useful_splits and 4 * num_tiles(problem) * splits <= gpu.sms:
        return "at least three quarters of the SMs are idle"
    return None


def _cluster_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    ctas_per_sm = _cluster_ctas_by_registers(problem, config)
    return attend(problem, config, gpu, config["splits"], ctas_per_sm)


def _cluster_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The tiles and the exchange of the longest sequence's cluster, the bytes or the products."""
    splits, block_m = config["splits"], tile_rows(problem)
    tiles, seen = tiles_seen(problem, block_m)
    at_once = resident_clusters(gpu.sms * _ctas_per_sm(problem, config, gpu), splits)
    clusters = tiles * problem["kv_heads"]
    ctas = min(clusters, at_once) * splits
    alone = ctas <= gpu.sms
    share = bandwidth_share(problem, config, ctas / gpu.sms) * (ALONE if alone else 1.0)
    rate = min(gpu.bandwidth * share, min(ctas, gpu.sms) * SM_BANDWIDTH)
    bytes_us = ENTRY.bytes_moved(problem) / rate * 1e6
    products_us = math_us(problem, seen * problem["kv_heads"], ctas, gpu)
    elements = min(num_rows(problem), block_m) * problem["head_dim"]
    exchange_us = (EXCHANGE_US + EXCHANGE_PART_US * splits) * elements / 8192
    waves = ceil(clusters / at_once)
    tiles_us = chain_us(problem, config, waves, seen / tiles, exchange_us, alone=alone)
    return LAUNCH_US + BEGIN_END_US + overlapped_us(tiles_us, max(bytes_us, products_us))


CLUSTER = Implementation(
    entry="paged_attn",
    language="cute",
    variant="cluster",
    summary="keys split over a cluster, merged through distributed shared memory",
    archs=("sm_90a", "sm_100a", "sm_103a"),
    space={
        "block_n": (128, 256, 64, 32),
        "stages": (6, 4, 3),
        "splits": CLUSTERS,
        "warps": (WARPS, 2 * WARPS),
    },
    illegal=_illegal_cluster,
    unpromising=_unpromising_cluster,
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
