"""`paged_attn` by mma.sync over an even share of the cached tokens for each block."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.cost_model import L2_TO_DRAM, LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.paged_attn.operands import (
    IN_FLIGHT,
    REGISTERS,
    kind,
    num_rows,
    params,
    q_len,
    span,
    token_bytes,
)
from kernelcat.reference.paged_attn import NVFP4, SCALED, cache_row
from kernelcat.runtime.gpu import Gpu

MAX_STAGES = 6
MAX_COPIES = 16
UNIT_US, TOKEN_US = 0.6, 0.012
"""What a block takes for a tile of tokens at least, and for each token of a warp."""
TILE_US = 1.5
"""What a block loses at the border of two tiles of rows."""

SPACE = {
    "block_m": (16, 64, 128),
    "block_n": (32, 64, 128),
    "num_warps": (4, 8, 2),
    "blocks_per_sm": (1, 2, 3, 4),
}
"""``block_m`` rows (queries times the heads that share keys) against ``block_n`` tokens."""


@dataclass(frozen=True)
class Plan:
    """What a block has of an SM."""

    block_m: int
    block_n: int
    num_warps: int
    blocks_per_sm: int
    head_dim: int
    row_bytes: int
    page_scales: bool
    block_scales: int

    @staticmethod
    def of(config: Config, problem: Problem) -> Plan:
        page_scales = problem["has_scales"] and problem["page_scales"]
        return Plan(
            **config,
            head_dim=problem["head_dim"],
            row_bytes=cache_row(problem.values) * dtypes.itemsize(problem["kv_dtype"]),
            page_scales=page_scales,
            block_scales=problem["head_dim"] // SCALED if problem["kv_dtype"] == NVFP4 else 0,
        )

    @property
    def tokens_per_warp(self) -> int:
        """Warps stand above each other on rows, then side by side on tokens."""
        return self.block_n * self.block_m // (16 * self.num_warps)

    @property
    def tile_bytes(self) -> int:
        return self.block_n * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        scales = 4 * self.page_scales + self.block_scales
        return 2 * (self.tile_bytes + self.block_n * scales)

    @property
    def query_bytes(self) -> int:
        return self.block_m * self.head_dim * 2

    def num_stages(self, gpu: Gpu) -> int:
        """As many as fit: the kernel also declares the rows of each stage and 2 KB at most."""
        room = (gpu.shared_bytes + 1024) // self.blocks_per_sm - 1024  # each block costs a KB more
        declared = 12 * self.block_n + 8
        stages = (room - 2048 - self.query_bytes) // (self.stage_bytes + declared)
        return min(stages, MAX_STAGES)

    @property
    def registers(self) -> int:
        """Sums, queries, scores and about 68 others, of a thread."""
        queries = self.head_dim // 4 if self.head_dim <= 128 else 0
        return self.head_dim // 2 + queries + self.tokens_per_warp + 68

    @property
    def merge_parts(self) -> int:
        """How often the warps' sums must go through a stage to be merged."""
        return ceil(self.num_warps * 64 * self.head_dim / (2 * self.tile_bytes))


def _rows(problem: Problem, queries: int) -> int:
    """Rows of a sequence and key-value head."""
    return int(queries * (problem["heads"] // problem["kv_heads"]))


def _shape_reason(plan: Plan) -> str | None:
    """Why the kernel cannot be made with these tiles."""
    threads = 32 * plan.num_warps
    if 16 * plan.num_warps < plan.block_m or (plan.block_m > 16) != (
        16 * plan.num_warps == plan.block_m
    ):
        return f"{plan.num_warps} warps do not fit {plan.block_m} rows"
    if plan.tokens_per_warp < 16:
        return f"a warp would have {plan.tokens_per_warp} tokens of a tile; mma.sync takes 16"
    if plan.block_n > threads:
        return "fewer threads than tokens to look up"
    if plan.tile_bytes < 16 * threads:
        return "more threads than 16-byte units in a tile of keys"
    if plan.tile_bytes > 16 * threads * MAX_COPIES:
        return f"a thread would copy more than {MAX_COPIES} units of a tile of keys"
    if plan.merge_parts > 4 or plan.head_dim // plan.merge_parts < 32:
        return "a stage is too small to merge sums in"
    if plan.registers > 255 or plan.registers * threads * plan.blocks_per_sm > REGISTERS:
        return f"{plan.blocks_per_sm} blocks an SM would leave too few registers"
    return None


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan, rows = Plan.of(config, problem), _rows(problem, problem["max_q"])
    reason = _shape_reason(plan)
    if reason is not None:
        return reason
    if plan.num_stages(gpu) < 2:
        return f"two stages do not fit {gpu.name}'s shared memory"
    if plan.block_m > 16 and rows <= plan.block_m // 4:
        return f"tiles of {plan.block_m} rows are mostly empty at {rows}"
    if plan.block_m == 16 and rows > 64:
        return f"tiles of 16 rows would read the cache {ceil(rows / 16)} times"
    if problem["pages"] * problem["kv_heads"] >= 1 << 31:
        return "the scales of pages are counted in 32 bits"
    return None


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if num_rows(problem) == 0:
        return Program(())
    plan = Plan.of(config, problem)
    stages, blocks = plan.num_stages(gpu), gpu.sms * plan.blocks_per_sm
    arguments = (plan.block_m, plan.block_n, plan.num_warps, stages, plan.blocks_per_sm)
    source = CudaSource(
        "paged_attn/split.cu",
        f"kernelcat::paged_attn_split<{', '.join((kind(problem), *map(str, arguments)))}>",
    )
    step = Step(
        source,
        (blocks, 1, 1),
        params(problem, "partials", "counters"),
        32 * plan.num_warps,
        stages * plan.stage_bytes + plan.query_bytes,
    )
    slot_bytes = plan.block_m * (plan.head_dim + 2) * 4
    return Program((step,), {"partials": 2 * blocks * slot_bytes, "counters": 4 * blocks})


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The longest of DRAM, L2 and tensor cores; then what the borders of tiles cost."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    plan = Plan.of(config, problem)
    rows = _rows(problem, q_len(problem))
    row_tiles = problem["batch"] * problem["kv_heads"] * ceil(rows / plan.block_m)
    queries = min(ceil(plan.block_m * q_len(problem) / rows), q_len(problem))
    per_tile = ceil(span(problem, queries) / plan.block_n)
    blocks = gpu.sms * plan.blocks_per_sm
    share = ceil(row_tiles * per_tile / blocks)
    units = share * blocks  # each block's share is a whole number of them
    l2_bytes = units * plan.stage_bytes
    read = problem["batch"] * problem["kv_heads"] * span(problem, q_len(problem))
    dram_bytes = read * token_bytes(problem)
    in_flight = plan.blocks_per_sm * (plan.num_stages(gpu) - 1) * plan.stage_bytes
    busy = min(1.0, 0.3 + 0.7 * in_flight / IN_FLIGHT)
    efficiency = 0.55 if plan.block_m > 16 else 0.3
    flops = 4 * units * plan.block_m * plan.block_n * plan.head_dim
    math_us = flops / (gpu.flops[problem["dtype"]] * efficiency) * 1e6
    l2_us = l2_bytes / (gpu.bandwidth * L2_TO_DRAM * busy) * 1e6
    token_us = TOKEN_US * plan.tokens_per_warp * plan.head_dim / 128
    latency_us = share * (UNIT_US + token_us)
    borders = (1 + share / per_tile) * TILE_US / plan.blocks_per_sm
    merged = min(blocks / row_tiles, per_tile) * 0.05
    dram_us = copy_us(dram_bytes, gpu, 0.9 * busy)
    return max(dram_us, math_us, l2_us, latency_us) + borders + merged


def _default(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model."""
    configs = [c for c in IMPLEMENTATION.whole_space() if _reject(c, problem, gpu) is None]
    fallback = Config(block_m=16, block_n=32, num_warps=2, blocks_per_sm=1)
    return min(configs, key=lambda c: _estimate(problem, c, gpu), default=fallback)


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="split",
    summary="mma.sync over packed heads; an even share of the cached tokens for each block",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_reject,
    default=_default,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "ldmatrix": "LDSM",
        "cp.async": "LDGSTS",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=2,
)
