"""`gemm` by wgmma on Hopper: tile shape, schedule, cluster and split k are tuned."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from kernelcat.catalog import ring_model
from kernelcat.catalog.implementation import Config, Implementation, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import (
    CLUSTERS,
    SPLITS,
    Maps,
    illegal_split,
    launch,
    loaded_rows,
    two_numbers,
    unpromising_split,
)
from kernelcat.kernels.cuda.gemm.operands import (
    EPILOGUE,
    d_cols,
    epilogue,
    operand_map,
    why_not_tma,
)
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.reference.gemm import ENTRY
from kernelcat.runtime.gpu import Gpu

MIN_STAGES = 3
MAX_SWAPPED_WAVES = 0.95
"""Waves of large swapped tiles over those of the same tiles unswapped, above which no tile is
swapped, but flat ones."""
FLAT_COLS = 144
"""Columns from which a tile of 64 rows is flat: few such tiles have one each on an SM, and two that
share the 64 rows load them from memory once."""
MAX_CLUSTER_WAVES = 2
"""Waves of tiles up to which clusters of more than two thread blocks are tried: many tiles share
operands in L2."""
SLACK, SLACK_ALONE, SLACK_SKINNY = 1.09, 1.2, 1.5
"""The estimate of the slowest configuration that is tried over the best one's. The cost model is
less exact where each thread block has one tile, and least for skinny products, which have few
configurations."""
MANY_WAVES, SLACK_MANY = 4, 1.04
"""Waves of tiles above which an estimate of over ``SLACK_MANY`` times the least one is not worth a
try: in 42 measured problems the fastest configuration of so many waves has at most 1.031 times the
least estimate."""

TECHNIQUES = {
    "wgmma": "HGMMA",
    "tma": "UTMALDG",
    "mbarrier": "SYNCS",
    "register reallocation": "USETMAXREG",
    "stmatrix": "STSM",
    "dependent launch": "ACQBULK",
}
SPACE = {
    "tile": (
        *("64x16", "64x24", "64x32", "64x40", "64x48", "64x56", "64x64", "64x72", "64x80", "64x88"),
        *("64x96", "64x104", "64x112", "64x128", "64x144", "64x152", "64x160", "64x176", "64x192"),
        *("64x256", "128x16", "128x24", "128x32", "128x40", "128x48", "128x64", "128x72", "128x80"),
        *("128x88", "128x96", "128x104", "128x112", "128x128", "128x144", "128x152", "128x160"),
        *("128x176", "128x192", "128x208", "128x224", "128x256"),
        *("192x72", "192x80", "192x88", "192x96", "192x128", "192x144", "192x160", "192x176"),
        *("192x192", "256x64", "256x96", "256x128", "256x144", "256x160", "256x176", "256x192"),
    ),
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),
    "cluster": (*CLUSTERS, "2x2", "4x1", "1x4", "4x2", "2x4"),
    "split_k": SPLITS,
}
"""
tile : BLOCK_M x BLOCK_N of Z = A @ B^T, or of Z^T where ``swap``
schedule : consumer warpgroups share a tile, three one of 192 rows and two other large ones; or
    each of two computes a tile (ping-pong)
cluster : thread blocks below each other x side by side; those of a row share A, of a column B
"""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    def maps(name: str, rows: int, block: int, sharers: int) -> tuple[TensorMap, ...]:
        return (operand_map(name, problem, rows, loaded_rows(block, sharers)),)

    return program(problem, config, gpu, "wgmma", maps)


def program(problem: Problem, config: Config, gpu: Gpu, kernel: str, maps: Maps) -> Program:
    """The launch of ``gemm_<kernel>``, which takes the ``maps`` of its operands one by one."""
    m, dtype = problem["M"], problem["dtype"]
    plan = Plan.of(config, problem, gpu)
    if plan.num_tiles == 0:
        return Program(())
    columns, (chunk_rows, chunk_cols) = d_cols(problem), plan.chunk
    a, b = ("b", "a") if plan.swap else ("a", "b")
    maps_a = maps(a, plan.rows, plan.block_m, plan.cluster_n)
    maps_b = maps(b, plan.cols, plan.block_n, plan.cluster_m)
    by_tma = columns % 8 == 0
    map_d = (
        TensorMap(
            "d", dtype, (columns, m), (2 * columns,), (chunk_cols, chunk_rows), 2 * chunk_cols
        )
        if by_tma
        else maps_a[0]
    )
    source = instance(
        f"gemm/{kernel}.cu",
        f"gemm_{kernel}",
        *(dtype, plan.block_m, plan.block_n, plan.num_stages(gpu), plan.pingpong, plan.swap),
        *(plan.cluster_m, plan.cluster_n, bool(plan.workspaces), by_tma, *epilogue(problem)),
        plan.last_depth,
    )
    return launch(plan, source, (*maps_a, *maps_b, map_d, *EPILOGUE), problem, gpu)


# ---- which configurations serve ----------------------------------------------------------------


_last: tuple[Config, Problem, Gpu, Plan] | None = None


def _plan(config: Config, problem: Problem, gpu: Gpu) -> Plan:
    """A call asks for the same plan in each of the following steps."""
    global _last
    last = _last  # other threads may replace it
    if last is not None and last[0] is config and last[1] is problem and last[2] is gpu:
        return last[3]
    plan = Plan.of(config, problem, gpu)
    _last = config, problem, gpu, plan
    return plan


def illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = _plan(config, problem, gpu)
    return why_not_tma(problem) or _illegal_plan(plan, problem, gpu)


_why_no_tiles: dict[tuple[int, int, bool, bool, int, bool, bool, int], str | None] = {}
"""What decides whether tiles compile, as `illegal_tiles` looks at it -> its answer."""


def _illegal_plan(plan: Plan, problem: Problem, gpu: Gpu) -> str | None:
    """A search asks for thousands of plans, whose tiles are few."""
    is_alone = plan.num_consumers == 1 and plan.is_alone  # else stages do not depend on it
    tiles = (
        plan.block_m, plan.block_n, plan.pingpong, plan.swap, plan.pair, problem["residual"],
        is_alone, gpu.shared_bytes,
    )  # fmt: skip
    if tiles not in _why_no_tiles:
        _why_no_tiles[tiles] = illegal_tiles(plan, problem, gpu)
    return _why_no_tiles[tiles] or illegal_split(plan)


def illegal_tiles(plan: Plan, problem: Problem, gpu: Gpu) -> str | None:
    """What the kernel or the hardware cannot do with these tiles."""
    if plan.pingpong and plan.block_m == 192:
        return "tiles of 192 rows are shared by three consumers: there is no ping-pong of them"
    if plan.num_consumers == 3 and plan.num_accumulators > 96:
        return "ptxas compiles no wgmma of more than 200 columns for thread blocks of 512 threads"
    if plan.num_accumulators > ((96 if plan.swap else 128) if problem["residual"] else 192):
        return f"{plan.num_accumulators} accumulators a thread do not fit in registers"
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if not plan.swap and plan.block_n // plan.pair % 16:
        return (
            f"{plan.block_n} columns of Z make {plan.block_n // plan.pair} of D, which must be a "
            "multiple of 16"
        )
    if plan.swap and plan.pair == 2 and plan.block_n % 16:
        return f"{plan.block_n} rows of pairs are no multiple of 16"
    return None


@lru_cache(maxsize=1 << 14)  # more than the configurations of the space
def hopeless(config: Config) -> str | None:
    """Tiles, schedules and clusters that win nowhere."""
    block_m, block_n = two_numbers(config["tile"])
    cluster_m, cluster_n = two_numbers(config["cluster"])
    size = cluster_m * cluster_n
    if size > 2 and config["split_k"] > 1:
        return f"clusters of {size} are for tiles that are not split"
    if config["schedule"] == "pingpong" and block_m > 128:
        return f"pingpong tiles of {block_m} rows leave the tensor cores waiting"
    if block_n < 64 and not config["swap"]:
        return f"tiles of {block_m} x {block_n} read operands too often"
    is_line = (cluster_m > 1) != (cluster_n > 1)
    if is_line and not config["swap"] and (cluster_n > 1) != (block_m > block_n):
        return "a cluster should share the operand of which a tile needs more"
    return None


def _is_flat(block_m: int, block_n: int) -> bool:
    return block_m == 64 and block_n >= FLAT_COLS


def unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := hopeless(config):
        return why
    plan = _plan(config, problem, gpu)
    return _unpromising_tile(plan, config) or unpromising_split(plan)


def _unpromising_tile(plan: Plan, config: Config) -> str | None:
    """Tiles that cannot win, and choices that come to the same."""
    block_m, block_n = plan.block_m, plan.block_n
    if plan.cluster_size > 2:
        return _unpromising_cluster(plan, config)
    if plan.is_skinny:
        narrowest = min(n for n in (16, 24, 32, 48, 64, 96, 128) if n >= plan.cols)
        if block_n != narrowest:
            return f"skinny tiles are as wide as M={plan.cols}: {narrowest} columns"
        if plan.pingpong or plan.cluster_size > 1 or block_m > 128:
            return "skinny products wait for memory: nothing to overlap or to share"
    elif (
        plan.swap
        and plan.waves > MAX_SWAPPED_WAVES * plan.unswapped.waves
        and not (_is_flat(block_m, block_n) and plan.is_one_small_tile)
    ):
        return f"{plan.waves:.3g} waves of swapped tiles, {plan.unswapped.waves:.3g} of others"
    elif plan.rows <= 64:
        return f"M={plan.rows} rows fill wgmma's 64 rows only when operands are swapped"
    elif plan.pingpong != (block_m == 64) and block_m != 128 and not plan.is_one_small_tile:
        return f"{config['schedule']} tiles of {block_m} rows leave the tensor cores waiting"
    elif block_n < 64 or (block_m == 64 and block_n < 128 and not plan.is_one_small_tile):
        return f"tiles of {block_m} x {block_n} read operands too often"
    elif block_m >= 2 * plan.rows or block_n >= 2 * plan.cols > 64:
        return f"tiles of {block_m} x {block_n} are mostly empty"
    return None


def _unpromising_cluster(plan: Plan, config: Config) -> str | None:
    """As above, of clusters of four and eight thread blocks: few tiles, which share much."""
    block_m, block_n = plan.block_m, plan.block_n
    if plan.waves > MAX_CLUSTER_WAVES:
        return f"clusters of {plan.cluster_size} are for few tiles"
    if (plan.cluster_m - 1) * block_m >= plan.rows or (plan.cluster_n - 1) * block_n >= plan.cols:
        return "thread blocks of the cluster have no tile"
    if block_n < 64 and block_n * plan.cluster_n < plan.cols:
        return f"tiles of {block_m} x {block_n} read operands too often"
    if plan.rows <= 64:
        return f"M={plan.rows} rows fill wgmma's 64 rows only when operands are swapped"
    if plan.is_alone and plan.pingpong:
        return "a thread block has one tile, whose stores overlap with nothing"
    if not plan.is_alone and plan.pingpong != (block_m == 64) and block_m != 128:
        return f"{config['schedule']} tiles of {block_m} rows leave the tensor cores waiting"
    return None


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return slower(config, problem, gpu, is_fitted=False)


def slower(config: Config, problem: Problem, gpu: Gpu, is_fitted: bool) -> str | None:
    """Why a configuration is not worth a try: its estimate is far above the best one's."""
    plan = _plan(config, problem, gpu)
    slack = SLACK_ALONE if plan.is_alone else SLACK_MANY if plan.waves > MANY_WAVES else SLACK
    if plan.is_skinny and plan.cluster_size == 1:
        slack = SLACK_SKINNY
    best = _best(problem, gpu, is_fitted)
    if best is not None and _plan_us(plan, problem, gpu, is_fitted) > slack * best[0]:
        return f"estimated to be more than {slack} times slower than {best[1]['tile']}"
    return None


# ---- which one without measuring ---------------------------------------------------------------


@lru_cache(maxsize=1024)
def _best(problem: Problem, gpu: Gpu, is_fitted: bool) -> tuple[float, Config] | None:
    """The least estimate of a cooperative configuration without a cluster, and which one it is."""
    found = (
        (_plan_us(plan, problem, gpu, is_fitted), config)
        for config, plan in _simplest(problem, gpu)
    )
    return min(found, key=lambda pair: pair[0], default=None)


@lru_cache(maxsize=2)  # `wgmma` and `fitted` ask
def _simplest(problem: Problem, gpu: Gpu) -> list[tuple[Config, Plan]]:
    """The promising cooperative configurations without a cluster, and their plans."""
    found = ((config, Plan.of(config, problem, gpu)) for config in _simplest_space())
    return [
        (config, plan)
        for config, plan in found
        if not _illegal_plan(plan, problem, gpu)
        and not _unpromising_tile(plan, config)
        and not unpromising_split(plan)
    ]


@lru_cache(maxsize=1)
def _simplest_space() -> list[Config]:
    space = SPACE | {"schedule": ("cooperative",), "cluster": ("1x1",)}
    configs = (Config(dict(zip(space, values, strict=True))) for values in product(*space.values()))
    return [config for config in configs if hopeless(config) is None]


_RING = replace(
    ring_model.BITS_16,
    start_us=2.24,
    tensor_share=0.92,
    tile_rates=(
        (16, 0.32),
        (32, 0.557),
        (48, 0.756),
        (64, 0.815),
        (96, 0.948),
        (128, 0.985),
        (256, 1),
    ),
    l2_bytes_per_us=127e3,
    l2_power=0.61,
    port_bytes_per_us=235e3,
    split_lines=1.27,
    split_sectors=1.93,
    store_us=1.6,
    dram_share=0.893,
    order=4.2,
    memory_order=3.34,
    last_sums_us=1.31,
    part_us=0.114,
    partial_bytes_per_us=61.3e3,
)
"""Fitted, as the next numbers, to 1,095 times of `wgmma` and `fitted` on an H200: 16 configurations
each of 70 random problems, half of which an earlier model had lost. The model is off by 1.06; by
1.047 within 10 % of a problem's fastest. Fitted to half of the problems, it is off by 1.06 and 1.07
on the others."""
_FLAT_SHARED, _FLAT_ROWS_SHARED, _FLAT_ALONE = 1.1, 0.902, 1.12
"""Measured over modelled time of the tensor cores for tiles of 64 rows: in a cluster, in one of two
that share the 64 rows, and where each is alone on its SM and in no cluster."""
_SHARED = {1: 1.0, 2: 0.939, 4: 0.864, 8: 0.843}
"""Thread blocks of a cluster -> measured over modelled time of the tensor cores."""
_CLUSTER_US = {1: 0.0, 2: 0.092, 4: 0.28, 8: 0.24}
"""Thread blocks of a cluster -> microseconds until all of them have started, and ended."""
_NARROW_CHUNK_US = 0.148
"""Microseconds of a chunk of D that is stored beside those of 64 rows or columns: a tile of
128 x 144 leaves in chunks of 16 columns."""
_NEXT_US, _TURN_US = 0.1, 0.29
"""Microseconds between two tiles of a thread block, and of one whose consumers take turns."""


_narrow_chunks: dict[tuple[int, int, bool, bool, int, bool], float] = {}
"""Shape of a tile -> chunks that a warpgroup stores, less those of a tile in chunks of 64."""


def _count_narrow_chunks(plan: Plan) -> float:
    rows = plan.block_m // plan.consumers_per_tile
    width, cols = plan.chunk[1], plan.block_n // plan.pair
    if plan.swap:
        width, cols = plan.chunk[0], plan.block_n
    return max(rows // 64, 1) * (-(-cols // width) - cols / 64)


def _slowdown(plan: Plan) -> float:
    slowdown = _SHARED[plan.cluster_size]
    if plan.block_m > 64:
        return slowdown
    if plan.cluster_size > 1:
        shares_rows = plan.cluster_n == 2 and plan.cluster_m == 1
        return slowdown * (_FLAT_ROWS_SHARED if shares_rows else _FLAT_SHARED)
    return slowdown * (_FLAT_ALONE if plan.is_alone else 1.0)


def _plan_us(plan: Plan, problem: Problem, gpu: Gpu, is_fitted: bool) -> float:
    """Waves of tiles, each as long as its products or its operands take; or the memory's time.

    Where nothing ``is_fitted``, the last tiles load rows outside of the product, too.
    """
    waves, residents = plan.waves, 1 if plan.is_alone else plan.blocks_per_sm
    stored = 1.0 if plan.pingpong else max(waves, 1.0)
    tiles = plan.ring_tiles(waves * residents, stored)
    shape = (
        plan.block_m, plan.block_n, plan.pingpong, plan.swap, plan.pair, plan.has_residual,
    )  # fmt: skip
    if shape not in _narrow_chunks:
        _narrow_chunks[shape] = _count_narrow_chunks(plan)
    if not is_fitted:
        tiles = tiles._replace(outside=plan.outside / max(waves, 1.0))
    return _RING.gemm_us(
        tiles, gpu, problem["dtype"],
        ENTRY.bytes_moved(problem), slowdown=_slowdown(plan),
        extra_us=_CLUSTER_US[plan.cluster_size]
        + _NARROW_CHUNK_US * _narrow_chunks[shape] * stored
        + (_TURN_US if plan.pingpong else _NEXT_US) * max(waves - 1, 0),
        end_us=plan.sums_us(_RING),
    )  # fmt: skip


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return estimate(problem, config, gpu, is_fitted=False)


def estimate(problem: Problem, config: Config, gpu: Gpu, is_fitted: bool) -> float:
    """Microseconds by the cost model."""
    return _plan_us(_plan(config, problem, gpu), problem, gpu, is_fitted)


def _default(problem: Problem, gpu: Gpu) -> Config:
    return default(problem, gpu, is_fitted=False)


def default(problem: Problem, gpu: Gpu, is_fitted: bool) -> Config:
    """The simplest schedule, which the cost model estimates best: see ``_best``."""
    best = _best(problem, gpu, is_fitted)
    fallback = Config({name: values[0] for name, values in SPACE.items()} | {"swap": True})
    return fallback if best is None else best[1]


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="wgmma",
    summary="persistent, warp-specialized: TMA fills a ring that wgmma reads",
    archs=("sm_90a",),
    space=SPACE,
    illegal=illegal,
    unpromising=unpromising,
    hopeless=hopeless,
    too_slow=_too_slow,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques=TECHNIQUES,
    rank=3,
)
