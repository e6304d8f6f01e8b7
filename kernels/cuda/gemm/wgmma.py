"""`gemm` by wgmma on Hopper: tile shape, schedule, cluster and split k are tuned."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from kernelcat.catalog import ring_model
from kernelcat.catalog.implementation import Config, Implementation, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import (
    CLUSTERS,
    SPLITS,
    illegal_split,
    launch,
    loaded_rows,
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
swapped."""
MAX_CLUSTER_WAVES = 2
"""Waves of tiles up to which clusters of more than two thread blocks are tried: many tiles share
operands in L2."""
SLACK = {False: 1.1, True: 1.5}
"""``is_skinny`` -> the estimate of the slowest configuration that is tried over the best one's. The
cost model is less exact for skinny products, and these have few configurations."""

SPACE = {
    "tile": (
        *("64x16", "64x32", "64x40", "64x48", "64x56", "64x64", "64x72", "64x80", "64x96"),
        *("64x112", "64x128", "64x144", "64x192", "64x256"),
        *("128x16", "128x32", "128x64", "128x96", "128x128", "128x144", "128x160", "128x176"),
        *("128x192", "128x208", "128x224", "128x256"),
        *("192x128", "192x144", "192x160", "192x176", "192x192"),
        *("256x64", "256x96", "256x128", "256x144", "256x160", "256x176", "256x192"),
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
    m, dtype = problem["M"], problem["dtype"]
    plan = Plan.of(config, problem, gpu)
    if plan.num_tiles == 0:
        return Program(())
    columns, (chunk_rows, chunk_cols) = d_cols(problem), plan.chunk
    a, b = ("b", "a") if plan.swap else ("a", "b")
    map_a = operand_map(a, problem, plan.rows, loaded_rows(plan.block_m, plan.cluster_n))
    map_b = operand_map(b, problem, plan.cols, loaded_rows(plan.block_n, plan.cluster_m))
    by_tma = columns % 8 == 0
    map_d = (
        TensorMap(
            "d", dtype, (columns, m), (2 * columns,), (chunk_cols, chunk_rows), 2 * chunk_cols
        )
        if by_tma
        else map_a
    )
    source = instance(
        "gemm/wgmma.cu",
        "gemm_wgmma",
        *(dtype, plan.block_m, plan.block_n, plan.num_stages(gpu), plan.pingpong, plan.swap),
        *(plan.cluster_m, plan.cluster_n, bool(plan.workspaces), by_tma, *epilogue(problem)),
        plan.last_depth,
    )
    return launch(plan, source, (map_a, map_b, map_d, *EPILOGUE), problem, gpu)


# ---- which configurations serve ----------------------------------------------------------------


@lru_cache(maxsize=256)
def _plan(config: Config, problem: Problem, gpu: Gpu) -> Plan:
    """A call asks for the same plan in each of the following steps."""
    return Plan.of(config, problem, gpu)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = _plan(config, problem, gpu)
    return why_not_tma(problem) or _illegal_plan(plan, problem, gpu)


def _illegal_plan(plan: Plan, problem: Problem, gpu: Gpu) -> str | None:
    return illegal_tiles(plan, problem, gpu) or illegal_split(plan)


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


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = _plan(config, problem, gpu)
    return _unpromising_tile(plan, config) or unpromising_split(plan)


def _unpromising_tile(plan: Plan, config: Config) -> str | None:
    """Tiles that cannot win, and choices that come to the same."""
    block_m, block_n = plan.block_m, plan.block_n
    if plan.cluster_size > 2:
        return _unpromising_cluster(plan, config)
    if plan.is_skinny:
        narrowest = min(n for n in (16, 32, 48, 64, 96, 128) if n >= plan.cols)
        if block_n != narrowest:
            return f"skinny tiles are as wide as M={plan.cols}: {narrowest} columns"
        if plan.pingpong or plan.cluster_size > 1 or block_m > 128:
            return "skinny products wait for memory: nothing to overlap or to share"
    elif plan.swap and plan.waves > MAX_SWAPPED_WAVES * plan.unswapped.waves:
        return f"{plan.waves:.3g} waves of swapped tiles, {plan.unswapped.waves:.3g} of others"
    elif plan.rows <= 64:
        return f"M={plan.rows} rows fill wgmma's 64 rows only when operands are swapped"
    elif plan.pingpong != (block_m == 64) and block_m != 128:
        return f"{config['schedule']} tiles of {block_m} rows leave the tensor cores waiting"
    elif block_n < 64 or (block_m == 64 and block_n < 128):
        return f"tiles of {block_m} x {block_n} read operands too often"
    elif block_m >= 2 * plan.rows or block_n >= 2 * plan.cols > 64:
        return f"tiles of {block_m} x {block_n} are mostly empty"
    elif plan.cluster_size > 1 and (plan.cluster_n > 1) != (block_m > block_n):
        return "a cluster should share the operand of which a tile needs more"
    return None


def _unpromising_cluster(plan: Plan, config: Config) -> str | None:
    """As above, of clusters of four and eight thread blocks: few tiles, which share much."""
    block_m, block_n = plan.block_m, plan.block_n
    if plan.split_k > 1 or plan.waves > MAX_CLUSTER_WAVES:
        return f"clusters of {plan.cluster_size} are for few tiles that are not split"
    if (plan.cluster_m - 1) * block_m >= plan.rows or (plan.cluster_n - 1) * block_n >= plan.cols:
        return "thread blocks of the cluster have no tile"
    if plan.rows <= 64:
        return f"M={plan.rows} rows fill wgmma's 64 rows only when operands are swapped"
    if plan.is_alone and plan.pingpong:
        return "a thread block has one tile, whose stores overlap with nothing"
    if not plan.is_alone and plan.pingpong != (block_m == 64) and block_m != 128:
        return f"{config['schedule']} tiles of {block_m} rows leave the tensor cores waiting"
    if block_n < 40 or (block_n % 16 and block_m > 64):
        return f"tiles of {block_m} x {block_n} read operands too often"
    if min(plan.cluster_m, plan.cluster_n) == 1 and (plan.cluster_n > 1) != (block_m > block_n):
        return "a cluster should share the operand of which a tile needs more"
    return None


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = _plan(config, problem, gpu)
    best, slack = _best(problem, gpu), SLACK[plan.is_skinny and plan.cluster_size == 1]
    if best is not None and _plan_us(plan, problem, gpu) > slack * best[0]:
        return f"estimated to be more than {slack} times slower than {best[1]['tile']}"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_BASE = {"schedule": ("cooperative",), "cluster": ("1x1",)}


@lru_cache(maxsize=1024)
def _best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """The least estimate of a cooperative configuration without a cluster, and which one it is."""
    space = SPACE | _BASE
    best: tuple[float, Config] | None = None
    for values in product(*space.values()):
        config = Config(dict(zip(space, values, strict=True)))
        plan = _plan(config, problem, gpu)
        if (
            _illegal_plan(plan, problem, gpu)
            or _unpromising_tile(plan, config)
            or unpromising_split(plan)
        ):
            continue
        us = _plan_us(plan, problem, gpu)
        if best is None or us < best[0]:
            best = us, config
    return best


_FLAT_SHARED = 1.2
"""Measured over modelled time of the tensor cores for tiles of 64 rows in a cluster: the time of a
product is 1.05 to 1.3 of the model's in seven problems on an H100."""


_BOTH_SHARED = 0.91
"""Measured over modelled time of the tensor cores for clusters of four and eight: a product takes
0.92 to 0.98 of the model's time in 36 problems on an H200."""


def _slowdown(plan: Plan) -> float:
    slowdown = _BOTH_SHARED if plan.cluster_size > 2 else 1.0
    return slowdown * (_FLAT_SHARED if plan.block_m == 64 and plan.cluster_size > 1 else 1.0)


def _plan_us(plan: Plan, problem: Problem, gpu: Gpu) -> float:
    """Waves of tiles, each as long as its products or its operands take; or the memory's time."""
    residents = 1 if plan.is_alone else plan.blocks_per_sm
    stored = 1.0 if plan.pingpong else max(plan.waves, 1.0)
    return ring_model.BITS_16.gemm_us(
        plan.ring_tiles(plan.waves * residents, stored), gpu, problem["dtype"],
        ENTRY.bytes_moved(problem), extra_us=plan.sums_us(ring_model.BITS_16),
        slowdown=_slowdown(plan),
    )  # fmt: skip


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _plan_us(_plan(config, problem, gpu), problem, gpu)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The simplest schedule, which the cost model estimates best: see ``_best``."""
    best = _best(problem, gpu)
    fallback = Config({name: values[0] for name, values in SPACE.items()} | {"swap": True})
    return fallback if best is None else best[1]


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="wgmma",
    summary="persistent, warp-specialized: TMA fills a ring that wgmma reads",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    too_slow=_too_slow,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
        "dependent launch": "ACQBULK",
    },
    rank=3,
)
