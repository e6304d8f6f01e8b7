"""`nvfp4_matmul` for many rows: wgmma with weights in registers, decoded from a ring."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kernelcat.gpu import KB, Gpu
from kernelcat.implementation import (
    Config,
    Implementation,
    Int64,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.persistent import (
    PersistentPlan,
    launch,
    overlapped_us,
    reject_split,
)
from kernelcat.kernels.cuda.nvfp4_matmul.operands import (
    EPILOGUE,
    UNVERIFIED,
    WEIGHTS,
    activation,
    cpp,
    is_empty,
    is_nvfp4,
    math_dtype,
    types,
    why_not_tiles,
)
from kernelcat.model import copy_us
from kernelcat.reference.nvfp4_matmul import ENTRY, FP8
from kernelcat.spec import Problem

MIN_STAGES = 3
SPACE = {"tile": ("128x64", "128x128", "128x256"), "split_k": (1, 2, 3, 4, 6, 8)}
"""
tile : rows of W x rows of A
split_k : pieces of the k range of tiles of the last wave
"""


@dataclass(frozen=True)
class Plan(PersistentPlan):
    """A configuration in numbers: what is tiled is D^T, so ``rows`` are those of W."""

    scale_block: int

    block_k = 128

    @staticmethod
    def of(config: Config, problem: Problem, gpu: Gpu) -> Plan:
        chosen = Config({**config, "swap": True, "cluster": "1x1"})
        block = 16 if problem["format"] == "nvfp4" else 32
        return Plan(**PersistentPlan.fields(chosen, problem, gpu), scale_block=block)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 2

    @property
    def threads(self) -> int:
        return 384

    @property
    def group_m(self) -> int:
        """Tile rows of W in a group of the order: W's tiles are small, so there are many."""
        return 16

    @property
    def stage_bytes(self) -> int:
        """Rows of A in 16 bits, codes and scales; whole atoms of the swizzle."""
        weights = self.block_m * (self.block_k // 2 + self.block_k // self.scale_block)
        return int(2 * self.block_n * self.block_k + ceil(weights / KB) * KB)

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit, two barriers with each."""
        return min((gpu.shared_bytes - KB - 64) // (self.stage_bytes + 16), 12)

    def shared_bytes(self, gpu: Gpu) -> int:
        return self.num_stages(gpu) * (self.stage_bytes + 16) + KB + 64


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    plan = Plan.of(config, problem, gpu)
    m, k, dtype = problem["M"], problem["K"], math_dtype(problem)
    is_float8 = problem["dtype"] == FP8
    map_a = TensorMap(
        "wide" if is_float8 else "a", dtype, (k, m), (2 * k,), (64, plan.block_n), 128,
        l2_promotion=128,
    )  # fmt: skip
    arguments = (
        f"kernelcat::{dtype}", types(problem)[1], is_nvfp4(problem), activation(problem),
        cpp(is_float8), plan.block_n, plan.num_stages(gpu), cpp(bool(plan.workspaces)),
    )  # fmt: skip
    kernel = f"kernelcat::nvfp4_matmul_wgmma<{', '.join(map(str, arguments))}>"
    source = CudaSource("nvfp4_matmul/wgmma.cu", kernel)
    program = launch(plan, source, (map_a, *WEIGHTS, *EPILOGUE), problem, gpu)
    if not is_float8:
        return program
    widen = _widen_rows(m * k // 16, gpu)
    return Program((widen, *program.steps), {**program.workspaces, "wide": 2 * m * k})


def _widen_rows(vectors: int, gpu: Gpu) -> Step:
    """A in float8 to bfloat16, in a workspace."""
    source = CudaSource("nvfp4_matmul/widen_rows.cu", "kernelcat::nvfp4_matmul_widen_rows")
    blocks = min(ceil(vectors / 256), 8 * gpu.sms)
    params = (Pointer("a"), Pointer("wide"), Int64(vectors))
    return Step(source, (blocks, 1, 1), params, 256, programmatic=True)


# ---- which configurations serve ----------------------------------------------------------------


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    why = why_not_tiles(problem)
    if why or is_empty(problem):
        return why
    plan = Plan.of(config, problem, gpu)
    if plan.num_stages(gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if plan.block_n > 64 and plan.block_n >= 2 * plan.cols:
        return f"tiles of {plan.block_n} rows are at least half empty for M={plan.cols}"
    if plan.block_n < 256 and plan.cols >= 32 * plan.block_n:
        return f"tiles of {plan.block_n} rows decode W more often than M={plan.cols} needs"
    return reject_split(plan)


# ---- which one without measuring ---------------------------------------------------------------

_MATH = {64: 0.60, 128: 0.74, 256: 0.82}
"""Rows of A a tile -> share of the peak: decoding is under products, but not all of it."""

_EPILOGUE_US = 2.5
"""Storing a tile of 128 x 256 while nothing is multiplied."""


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles, each as long as its products or loads take; or the memory's time."""
    plan = Plan.of(config, problem, gpu)
    peak = gpu.flops[math_dtype(problem)] / gpu.sms * _MATH[plan.block_n]
    math_us = 2 * plan.block_m * plan.block_n * plan.block_k / peak * 1e6
    load_us = plan.stage_bytes / 60e9 * 1e6
    busy_us = plan.waves * plan.k_blocks * max(math_us, load_us)
    busy_us += _EPILOGUE_US * plan.block_n / 256 * max(plan.waves, 1.0) + plan.reduction_us
    widen_us = 0.0
    if problem["dtype"] == FP8:
        widen_us = copy_us(3 * problem["M"] * problem["K"], gpu)
    return widen_us + overlapped_us(busy_us, ENTRY.bytes_moved(problem), gpu)


def _default(problem: Problem, gpu: Gpu) -> Config:
    serving = IMPLEMENTATION.configs(problem, gpu)
    fallback = Config({name: values[0] for name, values in SPACE.items()})
    return min(serving, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="nvfp4_matmul",
    language="cuda",
    variant="wgmma",
    summary="for many rows: wgmma with weights in registers, decoded from a ring of packed ones",
    archs=("sm_90a",),
    space=SPACE,
    reject=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "bulk copy": "UBLKCP",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
    },
    rank=2,
    unverified=UNVERIFIED,
)
