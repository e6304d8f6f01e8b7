"""`paged_attn` by mma.sync; cached tokens are divided evenly among the thread blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.cost_model import L2_TO_DRAM, LAUNCH_US, issue_us, row_share
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import mean_context, num_rows
from kernelcat.kernels.cuda.paged_attn.operands import (
    BYTES_IN_FLIGHT,
    MAX_REGISTERS,
    SM_REGISTERS,
    group,
    kind,
    params,
    token_bytes,
)
from kernelcat.reference._kv_cache import FP8, NVFP4, SCALED, cache_row
from kernelcat.reference.paged_attn import ENTRY, most_visible, tiles_seen
from kernelcat.runtime.gpu import Gpu

MAX_STAGES = 6
MAX_COPIES = 16
"""Units of 16 bytes that a thread copies of a tile of keys, at most."""
TILE_US, TOKEN_US, ROWS_TOKEN_US = 0.65, 0.011, 0.0168
"""Microseconds of a thread block for a KV tile, and of a warp for each of its tokens, with 16 rows
and with more. These numbers and the next ones are fitted to 183 times of 136 problems (H200)."""
ROW_TILE_US, MORE_ROWS = 4.36, 0.29
"""Microseconds that a thread block loses between two row tiles of 16 rows and 128 elements, whose
sums its warps merge, and the part of it that 16 rows more add."""
UNEVEN = 5.1
"""Short sequences lie side by side: where nearly all are short, thread blocks have up to so many
times as many row tiles more than on average."""
MERGE_US, MERGE_LOADS, ARRIVE_US = 0.59, 8, 1.7
"""Microseconds of the last thread block of a row tile for ``MERGE_LOADS`` partial results of the
vector of each thread, and until it knows that it is the last one."""
SPLIT_US = 5.1
"""From the launch until thread blocks know their ranges, and until the last row is stored."""
OVERLAP = 2.8
"""Order of the norm that adds up DRAM or L2, the tiles of a thread block, and instructions."""
INSTRUCTIONS = {FP8: (950, 6.8), NVFP4: (820, 5.8)}
"""Instructions of a thread for a cached token of a head, and for each of its elements."""
SOFTMAX_INSTRUCTIONS, MMA_EFFICIENCY = 19.6, 0.52
"""Instructions of a thread for a score of a tile of many rows; part of the peak rate that the
tile's products reach."""

TECHNIQUES = {
    "mma.sync": "HMMA",
    "ldmatrix": "LDSM",
    "cp.async": "LDGSTS",
    "exponential by one instruction": "MUFU.EX2",
}
SPACE = {
    "block_m": (16, 64, 128),
    "block_n": (32, 64, 128),
    "num_warps": (4, 8, 2),
    "blocks_per_sm": (1, 2, 3, 4),
}
"""``block_m`` rows (queries times the heads that share keys) against ``block_n`` tokens."""


@dataclass(frozen=True)
class Plan:
    """What a thread block uses of an SM."""

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
        """Tokens of a KV tile for a warp: warps divide the rows first, then the tokens."""
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
        """As many as fit beside static shared memory: the rows of each stage, and up to 2 KB."""
        # The system reserves 1 KB of shared memory for each resident thread block.
        available = (gpu.shared_bytes + 1024) // self.blocks_per_sm - 1024
        static_bytes = 12 * self.block_n + 8  # of a stage
        stages = (available - 2048 - self.query_bytes) // (self.stage_bytes + static_bytes)
        return min(stages, MAX_STAGES)

    @property
    def registers(self) -> int:
        """Registers of a thread: accumulators, queries, scores and about 68 others."""
        queries = self.head_dim // 4 if self.head_dim <= 128 else 0
        return self.head_dim // 2 + queries + self.tokens_per_warp + 68

    @property
    def tile_us(self) -> float:
        """Microseconds of a thread block for a KV tile."""
        token_us = TOKEN_US if self.block_m == 16 else ROWS_TOKEN_US
        return TILE_US + token_us * (self.tokens_per_warp * self.head_dim / 128)

    @property
    def border_us(self) -> float:
        """Microseconds that a thread block loses between two row tiles."""
        rows = 1 + MORE_ROWS * (self.block_m // 16 - 1)
        return ROW_TILE_US * rows * self.head_dim / 128

    def merge_us(self, parts: int, rows: int) -> float:
        """Microseconds of the last thread block of a row tile to add up ``parts`` of ``rows``."""
        vectors = ceil(rows * self.head_dim / 4 / (32 * self.num_warps))  # of a thread
        return ARRIVE_US + MERGE_US * vectors * ceil((parts - 1) / MERGE_LOADS)

    @property
    def merge_passes(self) -> int:
        """Passes in which a stage has room to merge the accumulators of all warps."""
        return ceil(self.num_warps * 64 * self.head_dim / (2 * self.tile_bytes))


@lru_cache(16)  # each configuration of a choice asks three times
def plan_of(config: Config, problem: Problem) -> Plan:
    return Plan.of(config, problem)


def _rows(problem: Problem, queries: int) -> int:
    """Rows of a sequence and key-value head."""
    return int(queries * group(problem))


def _illegal_shape(plan: Plan) -> str | None:
    """Why the kernel does not compile for these tiles."""
    threads = 32 * plan.num_warps
    warp_rows = 16 * plan.num_warps
    if warp_rows < plan.block_m or (plan.block_m > 16) != (warp_rows == plan.block_m):
        return f"{plan.num_warps} warps of 16 rows do not divide {plan.block_m} rows"
    if plan.tokens_per_warp < 16:
        return f"{plan.tokens_per_warp} tokens for a warp are fewer than mma.sync's 16"
    if plan.block_n > threads:
        return f"{threads} threads are too few to look up {plan.block_n} tokens"
    if plan.tile_bytes < 16 * threads:
        return f"{threads} threads are more than the 16-byte units of {plan.tile_bytes} bytes"
    if plan.merge_passes > 4 or plan.head_dim // plan.merge_passes < 32:
        return f"a stage of {plan.stage_bytes} bytes is too small to merge accumulators in"
    return None


def illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = plan_of(config, problem)
    reason = _illegal_shape(plan)
    if reason is not None:
        return reason
    if plan.num_stages(gpu) < 2:
        return f"two stages do not fit the shared memory of {gpu.name}"
    if problem["pages"] * problem["kv_heads"] >= 1 << 31:
        return "the scales of all pages are more than 32-bit indices reach"
    return None


def unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan, rows = plan_of(config, problem), _rows(problem, problem["max_q"])
    threads = 32 * plan.num_warps
    if plan.tile_bytes > 16 * threads * MAX_COPIES:
        return f"a thread would copy more than {MAX_COPIES} units of 16 bytes of a tile of keys"
    registers = min(MAX_REGISTERS, SM_REGISTERS // (threads * plan.blocks_per_sm))
    if plan.registers > registers:
        return f"{plan.registers} registers of a thread would spill: there are {registers}"
    if plan.block_m > 16 and rows <= plan.block_m // 4:
        return f"tiles of {plan.block_m} rows would be mostly empty with {rows} rows"
    if plan.block_m == 16 and rows > 64:
        return f"tiles of 16 rows would read the cache {ceil(rows / 16)} times"
    return None


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return program(problem, plan_of(config, problem), gpu)


def program(problem: Problem, plan: Plan, gpu: Gpu, *more: int) -> Program:
    """The launch of `paged_attn_split`, with the template arguments ``more``."""
    if num_rows(problem) == 0:
        return Program(())
    stages, blocks = plan.num_stages(gpu), gpu.sms * plan.blocks_per_sm
    arguments = (plan.block_m, plan.block_n, plan.num_warps, stages, plan.blocks_per_sm, *more)
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
    return estimate(problem, config, gpu, UNEVEN)


def estimate(problem: Problem, config: Config, gpu: Gpu, most_uneven: float) -> float:
    """DRAM, L2, instructions, and a thread block's tiles one after another; ranges and merges.

    ``most_uneven`` is how many more borders than on average a thread block has at most.
    """
    if num_rows(problem) == 0:
        return LAUNCH_US
    plan = plan_of(config, problem)
    head_row_tiles, head_tokens = tiles_seen(problem, plan.block_m)
    row_tiles, tokens = (problem["kv_heads"] * each for each in (head_row_tiles, head_tokens))
    items = tokens / plan.block_n + 0.5 * row_tiles  # the last tile of a row tile is half empty
    block_tiles = items / (gpu.sms * plan.blocks_per_sm)
    in_flight = plan.blocks_per_sm * (plan.num_stages(gpu) - 1) * plan.stage_bytes
    flow = min(1.0, 0.3 + 0.7 * in_flight / BYTES_IN_FLIGHT)
    share = row_share(token_bytes(problem) // 2)
    moved, read = ENTRY.bytes_moved(problem), items * plan.stage_bytes
    l2_us = read / (gpu.bandwidth * L2_TO_DRAM * flow) * 1e6
    if moved > gpu.l2_bytes:
        moved = max(moved, read)  # row tiles of the same tokens do not have them at the same time
    dram_us = moved / (gpu.bandwidth * flow * share) * 1e6
    longest = max(most_visible(problem, plan.block_m), 1)
    uneven = 1 - min(mean_context(problem) / longest, 1.0)
    inner = max(block_tiles - 1, 0.0)
    borders = min(inner * row_tiles / items * (1 + most_uneven * uneven), inner)
    chain_us = ceil(block_tiles) * plan.tile_us + (1 + borders) * plan.border_us
    work_us = _work_us(plan, tokens, problem, gpu)
    parts = ceil(longest / plan.block_n / max(block_tiles, 1))
    rows = min(plan.block_m, _rows(problem, problem["max_q"]))
    merge_us = plan.merge_us(parts, rows) if parts > 1 else 0.0
    steady = max(dram_us, l2_us) ** OVERLAP + chain_us**OVERLAP + work_us**OVERLAP
    return float(steady ** (1 / OVERLAP) + merge_us + SPLIT_US)


def _work_us(plan: Plan, tokens: float, problem: Problem, gpu: Gpu) -> float:
    """Products and softmax of whole tiles, or of few rows the instructions for each token."""
    if plan.block_m > 16:
        scores = tokens * plan.block_m
        flops = 4 * scores * plan.head_dim
        math_us = flops / (gpu.flops[problem["dtype"]] * MMA_EFFICIENCY) * 1e6
        return math_us + issue_us(SOFTMAX_INSTRUCTIONS * scores, gpu)
    fixed, per_element = INSTRUCTIONS.get(problem["kv_dtype"], (600, 1.0))
    return issue_us(tokens * (fixed + per_element * 2 * plan.head_dim), gpu)


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="split",
    summary="mma.sync over packed heads; cached tokens divided evenly among thread blocks",
    archs=("sm_80+",),
    space=SPACE,
    illegal=illegal,
    unpromising=unpromising,
    program=_program,
    estimate=_estimate,
    techniques=TECHNIQUES,
    rank=2,
)
