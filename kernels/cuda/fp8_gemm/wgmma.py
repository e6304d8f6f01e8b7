"""`fp8_gemm` by wgmma on Hopper: tile shape, overlap, cluster and split k are tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kernelcat.catalog import ring_model
from kernelcat.catalog.implementation import Config, Implementation, Pointer, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import (
    CLUSTERS,
    SPLITS,
    Maps,
    PersistentPlan,
    illegal_split,
    launch,
    loaded_rows,
    two_numbers,
    unpromising_split,
)
from kernelcat.reference.fp8_gemm import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

BLOCK_K = 128
"""Columns of A and B in a stage: 128 bytes, and one block of scales."""
MAX_STAGES = 12
MAX_SWAPPED_COLS = 128
"""Columns of the widest swapped tiles that are tried."""

TECHNIQUES = {
    "wgmma": "QGMMA",
    "tma": "UTMALDG",
    "mbarrier": "SYNCS",
    "asynchronous copy": "LDGSTS",
    "register reallocation": "USETMAXREG",
    "dependent launch": "ACQBULK",
}
SPACE = {
    "tile": (
        *("64x16", "64x32", "64x64", "64x96", "64x128", "64x160", "64x192"),
        *("128x16", "128x32", "128x64", "128x96", "128x128", "128x160", "128x192"),
        *("192x16", "192x32", "192x64", "192x128"),
        *("256x16", "256x32", "256x64", "256x96", "256x128"),
    ),
    "swap": (False, True),
    "cluster": CLUSTERS,
    "overlap": ("turns", "ahead", "free"),
    "split_k": SPLITS,
}
"""
tile : BLOCK_M x BLOCK_N of D, or of its transpose where ``swap``
overlap : how promotions and wgmmas overlap: two warpgroups take turns at the tensor cores; each
    warpgroup starts the wgmmas of the next k-block ahead of a promotion; or neither
"""


@dataclass
class Plan(PersistentPlan):
    """A configuration in numbers, for one problem. What is tiled is D, or D^T where ``swap``."""

    overlap: str

    block_k = BLOCK_K

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        return Plan(*Plan.fields(config, problem, gpu), config["overlap"])

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return {64: 1, 192: 3}.get(self.block_m, 2)

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)

    @property
    def num_registers(self) -> int:
        """Registers of sums, products and scales in a thread."""
        sums = self.block_m // self.num_consumers * self.block_n // 128
        scales = self.block_n // 4 if self.swap else 4
        return sums + (2 if self.overlap == "ahead" else 1) * (self.block_n // 2 + scales)

    @property
    def group_m(self) -> int:
        """So many that a group has about 2048 rows, and a wave of it about as many columns."""
        return max(2048 // (self.block_m * self.cluster_m), 1)

    @property
    def stage_bytes(self) -> int:
        """Both operands, the scales of A's rows and two of B's, and two barriers."""
        rows_of_a = self.block_n if self.swap else self.block_m
        return (self.block_m + self.block_n) * BLOCK_K + 4 * (rows_of_a + 2) + 16

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit beside the alignment and a flag for each consumer."""
        return min((gpu.shared_bytes - KB - 16) // self.stage_bytes, MAX_STAGES)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * self.stage_bytes + KB + 16


@lru_cache(16)  # each configuration of a choice asks three times
def _plan(config: Config, problem: Problem, gpu: Gpu) -> Plan:
    return Plan.of(config, problem, gpu)


def operand_map(name: str, problem: Problem, rows: int, box_rows: int) -> TensorMap:
    """A (M, K) or B (N, K), in boxes of ``box_rows`` x ``BLOCK_K``."""
    k = problem["K"]
    return TensorMap(name, problem["dtype"], (k, rows), (k,), (BLOCK_K, box_rows), 128)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    def maps(name: str, rows: int, block: int, sharers: int) -> tuple[TensorMap, ...]:
        return (operand_map(name, problem, rows, loaded_rows(block, sharers)),)

    return program(problem, config, gpu, "wgmma", maps)


def program(problem: Problem, config: Config, gpu: Gpu, kernel: str, maps: Maps) -> Program:
    """The launch of ``fp8_gemm_<kernel>``, which takes the ``maps`` of its operands one by one."""
    plan = Plan.of(config, problem, gpu)
    if plan.num_tiles == 0:
        return Program(())
    a, b = ("b", "a") if plan.swap else ("a", "b")
    operands = (
        *maps(a, plan.rows, plan.block_m, plan.cluster_n),
        *maps(b, plan.cols, plan.block_n, plan.cluster_m),
        *map(Pointer, ("a_scale", "b_scale", "d")),
    )
    source = instance(
        f"fp8_gemm/{kernel}.cu",
        f"fp8_gemm_{kernel}",
        *(plan.block_m, plan.block_n, plan.num_stages(gpu), plan.swap),
        *(plan.cluster_m, plan.cluster_n, f"Overlap::k{plan.overlap.capitalize()}"),
    )
    return launch(plan, source, operands, problem, gpu)


# ---- which configurations serve ----------------------------------------------------------------


def illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] == 0 or problem["K"] % 16:
        return (
            f"K={problem['K']} must be a positive multiple of 16: TMA needs rows of a multiple of "
            "16 bytes"
        )
    plan = _plan(config, problem, gpu)
    return _illegal_tile(plan) or illegal_split(plan)


def _illegal_tile(plan: Plan) -> str | None:
    """What the kernel cannot do, or has no registers for."""
    if plan.overlap == "ahead" and plan.block_m // plan.num_consumers > 64:
        return "a second set of products for 128 rows a warpgroup does not fit in registers"
    if plan.overlap == "turns" and plan.num_consumers != 2:
        return f"only two warpgroups can take turns, and there are {plan.num_consumers}"
    if not plan.swap and plan.block_n % 32:
        return f"tiles of {plan.block_n} columns are not stored, only multiples of 32"
    budget = 136 if plan.num_consumers == 3 else 200
    if plan.num_registers > budget:
        return (
            f"{plan.num_registers} registers of sums, products and scales do not fit into {budget}"
        )
    return None


def hopeless(config: Config) -> str | None:
    """Tiles and clusters that win nowhere."""
    block_m, block_n = two_numbers(config["tile"])
    shares_b, shares_a = (sharers > 1 for sharers in two_numbers(config["cluster"]))
    if config["swap"] and block_n > MAX_SWAPPED_COLS:
        return f"swapped tiles of {block_n} columns take more registers than they are worth"
    if not config["swap"] and block_n < 64:
        return f"tiles of {block_m} x {block_n} read operands too often"
    if (shares_a and block_m < block_n) or (shares_b and block_m > block_n):
        return "a cluster should share the operand of which a tile needs more"
    return None


def unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := hopeless(config):
        return why
    plan = _plan(config, problem, gpu)
    return _unpromising_tile(plan) or _unpromising_cluster(plan) or unpromising_split(plan)


def _unpromising_tile(plan: Plan) -> str | None:
    """Tiles that cannot win: mostly empty, or so small that operands are read too often."""
    block_m, block_n = plan.block_m, plan.block_n
    if plan.swap:
        most = MAX_SWAPPED_COLS
        narrowest = min(n for n in (16, 32, 64, 96, most) if n >= min(plan.cols, most))
        if plan.cols > 256:
            return f"M={plan.cols} rows fill wgmma's 64 rows without swapped operands"
        if block_n != narrowest:
            return (
                f"swapped tiles are as wide as M={plan.cols}, at most {most}: {narrowest} columns"
            )
    elif plan.rows <= 32:
        return f"M={plan.rows} rows leave wgmma's 64 mostly empty"
    elif block_m < min(plan.rows, 128):
        return f"tiles of {block_m} x {block_n} read operands too often"
    elif block_n >= 2 * plan.cols and block_n > 64:
        return f"tiles of {block_n} columns are mostly empty at N={plan.cols}"
    if block_m >= 2 * plan.rows and block_m > 64:
        return f"tiles of {block_m} rows are mostly empty at {plan.rows} rows"
    return None


def _unpromising_cluster(plan: Plan) -> str | None:
    if plan.cluster_size == 1:
        return None
    if plan.num_tiles < plan.num_clusters:
        return "in a single wave L2 has what a cluster would share"
    return None


# ---- which one without measuring ---------------------------------------------------------------

_RING = replace(
    ring_model.BITS_8,
    start_us=2.05,
    l2_bytes_per_us=130e3,
    port_bytes_per_us=138e3,
    tile_rates=((16, 0.89), (64, 0.98), (128, 0.9), (256, 1.0)),
)
"""With rows outside of the product counted, loads from L2 are faster. Fitted with the next to 100
times of this kernel on an H200 and an H100, which differ from the estimate by 1.07."""
_SLOWDOWN = {"turns": 1.27, "ahead": 1.0, "free": 1.28}
"""Time of the tensor cores beside promotions, over that of ``ahead``."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return estimate(problem, config, gpu, is_fitted=False)


def estimate(problem: Problem, config: Config, gpu: Gpu, is_fitted: bool) -> float:
    """Waves of tiles, each as long as its products or its operands take; or the memory's time.

    Where nothing ``is_fitted``, the last tiles load rows outside of the product, too.
    """
    plan = _plan(config, problem, gpu)
    slowdown = _SLOWDOWN[plan.overlap] * (
        ring_model.ONE_CONSUMER if plan.num_consumers == 1 else 1.0
    )
    tiles = plan.ring_tiles(plan.waves, max(plan.waves, 1.0))
    if not is_fitted:
        tiles = tiles._replace(outside=plan.outside / max(plan.waves, 1.0))
    return _RING.gemm_us(
        tiles, gpu, problem["dtype"],
        ENTRY.bytes_moved(problem), slowdown=slowdown, extra_us=plan.sums_us(_RING),
    )  # fmt: skip


IMPLEMENTATION = Implementation(
    entry="fp8_gemm",
    language="cuda",
    variant="wgmma",
    summary="persistent, warp-specialized: 128-deep wgmma sums promoted in registers",
    archs=("sm_90a",),
    space=SPACE,
    illegal=illegal,
    unpromising=unpromising,
    hopeless=hopeless,
    program=_program,
    estimate=_estimate,
    techniques=TECHNIQUES,
    rank=1,
)
