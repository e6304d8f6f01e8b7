"""`paged_attn` as `split`, with borders between row tiles dealt out as well as cached tokens.

Between two row tiles a thread block of `split` loses the time of about five KV tiles. 58 sequences
of 2,900 tokens in the mean, the longest of 34,700, take 73 us on an H200, since the thread block
with most short sequences ends last. The list of work_list.cuh counts such a border as so many KV
tiles more: 55 us. The kernel is compiled for their number.
"""

from __future__ import annotations

from functools import partial

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.paged_attn import split
from kernelcat.runtime.gpu import Gpu

BORDER, BORDER_ROWS = 4.8, 1.9
"""What a border of 128 elements costs, and 16 rows of it more; in units of the fixed part of a KV
tile's time. These numbers and the next ones are the times of `split` on an H200."""
TOKEN, ROWS_TOKEN = 0.01, 0.03
"""What a token of a warp adds to a KV tile, in the same unit: with 16 rows, and with more."""


def border_items(plan: split.Plan) -> int:
    """KV tiles that take about the time of a border, at least one."""
    width = plan.head_dim / 128
    border = width * (BORDER + BORDER_ROWS * plan.block_m / 16)
    token = TOKEN if plan.block_m == 16 else ROWS_TOKEN
    return max(round(border / (1 + token * plan.tokens_per_warp * width)), 1)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    plan = split.plan_of(config, problem)
    return split.program(problem, plan, gpu, border_items(plan))


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="dealt",
    summary="as split; borders between row tiles are dealt out, too",
    archs=("sm_80+",),
    space=split.SPACE,
    illegal=split.illegal,
    unpromising=split.unpromising,
    program=_program,
    estimate=partial(split.estimate, most_uneven=0.0),
    techniques=split.TECHNIQUES,
    rank=2,
)
