"""`gemm` by wgmma on Hopper: tile shape, schedule, cluster and split k are tuned."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from kernelcat.catalog.implementation import Config, Implementation, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.operands import (
    BLOCK_K,
    EPILOGUE,
    cpp,
    d_cols,
    epilogue,
    operand_map,
    why_not_tma,
)
from kernelcat.kernels.cuda.gemm.persistent import (
    CLUSTERS,
    SPLITS,
    launch,
    overlapped_us,
    reject_split,
)
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.runtime.gpu import Gpu

MIN_STAGES = 3
MAX_WAVES_OF_SWAPPED = 0.95
"""Large tiles are only swapped for so many of the waves that they are otherwise."""
SLACK = {False: 1.15, True: 1.5}
"""How much slower than the best a configuration may look to the model and still be tried, by
``skinny``: of small products the model knows less, and there are few choices."""

SPACE = {
    "tile": (
        *("64x16", "64x32", "64x48", "64x64", "64x96", "64x128", "64x192", "64x256"),
        *("128x16", "128x32", "128x64", "128x96", "128x128", "128x160", "128x192", "128x224"),
        *("128x256", "256x64", "256x96", "256x128", "256x160", "256x192"),
    ),
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),
    "cluster": CLUSTERS,
    "split_k": SPLITS,
}
"""
tile : BLOCK_M x BLOCK_N of Z = A @ B^T, or of Z^T where ``swap``
schedule : two consumer warpgroups share a tile, or each has its own (ping-pong)
"""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, dtype = problem["M"], problem["dtype"]
    plan = Plan.of(config, problem, gpu)
    if plan.tiles == 0:
        return Program(())
    columns, (chunk_rows, chunk_cols) = d_cols(problem), plan.chunk
    a, b = ("b", "a") if plan.swap else ("a", "b")
    map_a = operand_map(a, problem, plan.rows, plan.block_m // plan.cluster_n)
    map_b = operand_map(b, problem, plan.cols, plan.block_n // plan.cluster_m)
    by_tma = columns % 8 == 0
    map_d = (
        TensorMap(
            "d", dtype, (columns, m), (2 * columns,), (chunk_cols, chunk_rows), 2 * chunk_cols
        )
        if by_tma
        else map_a
    )
    arguments = (
        f"kernelcat::{dtype}, {plan.block_m}, {plan.block_n}, {plan.num_stages(gpu)}, "
        f"{cpp(plan.pingpong)}, {cpp(plan.swap)}, {plan.cluster_m}, {plan.cluster_n}, "
        f"{cpp(bool(plan.workspaces))}, {cpp(by_tma)}, {epilogue(problem)}, {plan.last_depth}"
    )
    source = CudaSource("gemm/wgmma.cu", f"kernelcat::gemm_wgmma<{arguments}>")
    return launch(plan, source, (map_a, map_b, map_d, *EPILOGUE), problem, gpu)


# ---- which configurations serve ----------------------------------------------------------------


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = Plan.of(config, problem, gpu)
    return (
        why_not_tma(problem)
        or _reject_shape(plan, problem, gpu)
        or _reject_tile(plan, config)
        or reject_split(plan)
        or _reject_slow(plan, problem, gpu)
    )


def _reject_shape(plan: Plan, problem: Problem, gpu: Gpu) -> str | None:
    """What the kernel or the hardware cannot do."""
    if plan.sums > ((96 if plan.swap else 128) if problem["residual"] else 192):
        return f"{plan.sums} accumulators a thread do not fit in registers"
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if not plan.swap and plan.block_n // plan.pair % 16:
        return (
            f"{plan.block_n} columns of Z make {plan.block_n // plan.pair} of D, no multiple of 16"
        )
    return None


def _reject_tile(plan: Plan, config: Config) -> str | None:
    """Tiles that cannot win, and choices that come to the same."""
    block_m, block_n = plan.block_m, plan.block_n
    if plan.skinny:
        few = min(n for n in (16, 32, 48, 64, 96, 128) if n >= plan.cols)
        if block_n != few:
            return f"skinny tiles are as wide as M={plan.cols}: {few} columns"
        if plan.pingpong or plan.cluster_size > 1 or block_m > 128:
            return "skinny products wait for memory: nothing to overlap or to share"
    elif plan.swap and plan.waves > MAX_WAVES_OF_SWAPPED * plan.unswapped.waves:
        return f"{plan.waves:.3g} waves of swapped tiles, {plan.unswapped.waves:.3g} of others"
    elif plan.rows <= 64:
        return f"{plan.rows} rows fill wgmma's 64 only on the other side"
    elif plan.pingpong != (block_m == 64) and block_m != 128:
        return f"{config['schedule']} tiles of {block_m} rows leave the tensor cores waiting"
    elif block_n < 64 or (block_m == 64 and block_n < 128):
        return f"tiles of {block_m} x {block_n} read operands too often"
    elif block_m >= 2 * plan.rows or block_n >= 2 * plan.cols > 64:
        return f"tiles of {block_m} x {block_n} are mostly empty"
    elif plan.cluster_size > 1 and (plan.cluster_n > 1) != (block_m > block_n):
        return "a cluster shares the operand of which a tile needs more"
    return None


def _reject_slow(plan: Plan, problem: Problem, gpu: Gpu) -> str | None:
    best, slack = _best(problem, gpu), SLACK[plan.skinny]
    if best is not None and _plan_us(plan, problem, gpu) > slack * best[0]:
        return f"by the model over {slack} times slower than {best[1]['tile']}"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_BASE = {"schedule": ("cooperative",), "cluster": ("1x1",)}


@lru_cache(maxsize=1024)
def _best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """The best cooperative configuration without a cluster by the model, and its time."""
    space = SPACE | _BASE
    found: tuple[float, Config] | None = None
    for values in product(*space.values()):
        config = Config(dict(zip(space, values, strict=True)))
        plan = Plan.of(config, problem, gpu)
        if _reject_shape(plan, problem, gpu) or _reject_tile(plan, config) or reject_split(plan):
            continue
        us = _plan_us(plan, problem, gpu)
        if found is None or us < found[0]:
            found = us, config
    return found


_NARROW = {16: 0.25, 32: 0.45, 48: 0.55, 64: 0.68, 96: 0.80, 128: 0.88, 160: 0.91, 192: 0.93}
"""BLOCK_N -> share of a wide wgmma's rate; narrow ones wait for shared memory."""

_L2_BYTES, _PORT_BYTES = 75e9, 110e9
"""Bytes a second that L2 gives one SM when all ask (few get more), and that an SM can take,
multicast included."""

_EPILOGUE_US = 2.0
"""Storing a tile of 128 x 256 while nothing is multiplied."""


def _plan_us(plan: Plan, problem: Problem, gpu: Gpu) -> float:
    """Waves of tiles, each as long as its products or its operands take; or the memory's time."""
    peak = gpu.flops[problem["dtype"]] / gpu.sms * 0.85 * _NARROW.get(plan.block_n, 0.95)
    math_us = 2 * plan.block_m * plan.block_n * BLOCK_K / peak * 1e6
    loaded = plan.block_m / plan.cluster_n + plan.block_n / plan.cluster_m
    l2_bytes = _L2_BYTES / min(max(plan.units, 1) * plan.cluster_size / plan.sms, 1)
    load_us = max(loaded * BLOCK_K * 2 / l2_bytes, plan.stage_bytes / _PORT_BYTES) * 1e6
    area = plan.block_m * plan.block_n / (128 * 256)
    tiles_a_block = 1 if plan.pingpong else max(plan.waves, 1.0)
    crowd = max(min(plan.units / plan.sms, plan.blocks_per_sm), 1)
    busy_us = plan.waves * plan.k_blocks * max(math_us, load_us) * crowd
    busy_us += _EPILOGUE_US * area * tiles_a_block
    busy_us += plan.reduction_us
    m, n, k = problem["M"], problem["N"], problem["K"]
    return overlapped_us(busy_us, 2 * (m * k + n * k + m * n), gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _plan_us(Plan.of(config, problem, gpu), problem, gpu)


def _default(problem: Problem, gpu: Gpu) -> Config:
    best = _best(problem, gpu)
    fallback = Config({name: values[0] for name, values in SPACE.items()} | {"swap": True})
    return fallback if best is None else best[1]


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="wgmma",
    summary="persistent, warp-specialized: TMA fills a ring that wgmma empties",
    archs=("sm_90a",),
    space=SPACE,
    illegal=_reject,
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
