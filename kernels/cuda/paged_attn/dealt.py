"""`paged_attn` as `split`, with borders between row tiles dealt out as well as cached tokens.

Between two row tiles a thread block of `split` loses the time of about five KV tiles. 58 sequences
of 2,900 tokens in the mean, the longest of 34,700, take 83 us on an H200, since the thread block
with most short sequences ends last; FlashInfer takes 54. The list of work_list.cuh counts such a
border as so many KV tiles more; how many follows from the cost model of `split`.
"""

from __future__ import annotations

from functools import partial

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.paged_attn import split
from kernelcat.runtime.gpu import Gpu


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    plan = split.plan_of(config, problem)
    return split.program(problem, plan, gpu, max(round(plan.border_us / plan.tile_us), 1))


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
    unverified="it has not run on a GPU yet",
)
