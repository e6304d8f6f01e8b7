"""`moe_gemm` by WGMMA on Hopper: the tile's shape and the number of stages are tuned."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from kernelcat import dtypes
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.moe_gemm import wgmma
from kernelcat.kernels.cuda.moe_gemm.operands import GROUPS, d_cols, is_empty, num_rows
from kernelcat.kernels.cuda.moe_gemm.plan import ROW_BYTES, Tiling
from kernelcat.kernels.cute.moe_gemm.operands import GROUP_KINDS
from kernelcat.kernels.cute.moe_gemm.weighted_sum import VECTOR, weighted_sum
from kernelcat.reference._fp8 import BLOCK
from kernelcat.reference.moe_gemm import A_ROWS
from kernelcat.runtime.gpu import KB, Gpu

STAGES = (8, 7, 6, 5, 4)
MIN_LISTED = 32
"""Experts that the lists of tiles have room for at least; a power of two, to compile seldom."""
PAIRED_TILE = (64, 128)
"""Tiles of which an SM may run two thread blocks: 128 registers a thread hold the sums."""
PAIR_GAIN = 0.97
"""Time of two thread blocks that hide each other's stores, over that of one: a guess."""


@dataclass(frozen=True)
class Plan(Tiling):
    """A configuration in numbers, for one problem."""

    element_bytes: int
    """Bytes of an element of A and of the weights."""
    stages: int
    bias: bool

    @staticmethod
    def of(config: Config, problem: Problem) -> Plan:
        return Plan(
            **Tiling.fields(config, problem),
            element_bytes=dtypes.itemsize(problem["act_dtype"]),
            stages=config["stages"],
            bias=problem["bias"],
        )

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return 2 if self.block_m > 64 else 1

    @property
    def max_experts(self) -> int:
        """Experts that the lists of tiles have room for."""
        return max(1 << (self.experts - 1).bit_length(), MIN_LISTED)

    def shared_bytes(self, stages: int) -> int:
        """What a thread block with ``stages`` takes: lists, bias, scales and barriers, stages."""
        num_scales = self.block_m + self.block_n // gcd(self.block_n, BLOCK)
        stage_scales = 4 * num_scales if self.element_bytes == 1 else 0
        bias_bytes = 4 * self.block_n * self.num_consumers * self.bias
        first = 8 * (self.max_experts + 1) + 16 + bias_bytes + stages * (16 + stage_scales)
        return ceil(first / KB) * KB + stages * (self.block_m + self.block_n) * ROW_BYTES

    def fits(self, stages: int, gpu: Gpu, ctas: int = 1) -> bool:
        """Whether ``ctas`` thread blocks fit on an SM; each takes 1 KB more from the system."""
        return ctas * (self.shared_bytes(stages) + KB) <= gpu.shared_bytes + KB

    def ctas_per_sm(self, gpu: Gpu) -> int:
        """Thread blocks that run on an SM at once."""
        can_pair = (self.block_m, self.block_n) == PAIRED_TILE and self.element_bytes == 2
        return 2 if can_pair and self.fits(self.stages, gpu, 2) else 1


# ---- program -----------------------------------------------------------------------------------


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    product = _product(problem, Plan.of(config, problem), gpu)
    if not problem["combine"]:
        return Program((product,))
    sums = weighted_sum(problem, "partial_rows", "d", "float32", d_cols(problem))
    return Program((product, sums), {"partial_rows": 4 * num_rows(problem) * _pitch(problem)})


def _pitch(problem: Problem) -> int:
    """Elements from one row of the product's result to the next."""
    cols = d_cols(problem)
    return ceil(cols / VECTOR) * VECTOR if problem["combine"] else cols


def _product(problem: Problem, plan: Plan, gpu: Gpu) -> Step:
    """The grouped product; with ``combine`` into partial rows."""
    dtype, combine, pitch = problem["dtype"], problem["combine"], _pitch(problem)
    ctas = plan.ctas_per_sm(gpu)
    constants = {
        **{axis: problem[axis] for axis in ("dtype", "act_dtype", "activation", "gather", "bias")},
        "block_m": plan.block_m,
        "block_n": plan.block_n,
        "num_stages": plan.stages,
        "max_experts": plan.max_experts,
        "ctas_per_sm": ctas,
        "is_partial": combine,
        "is_aligned": pitch % VECTOR == 0,
    }
    operand, element = f"*{problem['act_dtype']}", f"*{dtype}"
    out = "*float32" if combine else element
    kinds = (operand, "*float32", operand, "*float32", element, *GROUP_KINDS, out)
    num_ctas = min(plan.max_tiles, gpu.sms * ctas)
    sizes = (
        plan.rows, A_ROWS.of(problem.values), problem["top_k"], plan.experts, plan.n, plan.k,
        pitch, num_ctas,
    )  # fmt: skip
    return Step(
        CuteSource(
            "moe_gemm.wgmma:Wgmma", (*kinds, *["int32"] * len(sizes)), tuple(constants.items())
        ),
        (num_ctas, 1, 1),
        (
            *map(Pointer, ("a", "a_scale", "w", "w_scale", "bias")),
            *GROUPS,
            Pointer("partial_rows" if combine else "d"),
            *map(Int32, sizes),
        ),
        block=128 * (plan.num_consumers + 1),
    )


# ---- which configurations serve ----------------------------------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = Plan.of(config, problem)
    if why := wgmma.why_not_multiplied(problem, plan):
        return why
    if not plan.fits(plan.stages, gpu):
        return (
            f"{plan.stages} stages take {plan.shared_bytes(plan.stages)} bytes of shared memory; "
            f"{gpu.sku} has {gpu.shared_bytes}"
        )
    return None


def _in_cuda(config: Config) -> Config:
    """The configuration of CUDA C++'s kernel with the same tiles."""
    return Config(tile=config["tile"], combine="ordered")


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := wgmma.IMPLEMENTATION.unpromising(_in_cuda(config), problem, gpu):
        return why
    plan = Plan.of(config, problem)
    ctas = plan.ctas_per_sm(gpu)
    if any(stages > plan.stages and plan.fits(stages, gpu, ctas) for stages in STAGES):
        return f"more than {plan.stages} stages fit"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of CUDA C++'s kernel, whose tiles are the same."""
    us = wgmma.IMPLEMENTATION.estimate(problem, _in_cuda(config), gpu)
    return us * (PAIR_GAIN if Plan.of(config, problem).ctas_per_sm(gpu) == 2 else 1.0)


WGMMA = Implementation(
    entry="moe_gemm",
    language="cute",
    variant="wgmma",
    summary="persistent, warp-specialized: tiles found on the device; rows gathered by cp.async",
    archs=("sm_90a",),
    space={"tile": wgmma.TILES, "stages": STAGES},
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "mbarrier": "SYNCS",
        "warp vote": "VOTE",
        "dependent launch": "ACQBULK",
    },
    rank=1,
)
