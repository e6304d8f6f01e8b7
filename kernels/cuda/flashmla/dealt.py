"""`flashmla` by `wgmma`'s kernel, whose work is dealt out by what it costs: a row tile ends at the
last token that it sees, and short sequences count more than their tokens."""

from __future__ import annotations

from dataclasses import replace

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import num_rows
from kernelcat.kernels.cuda.flashmla.operands import num_items
from kernelcat.kernels.cuda.flashmla.split import dealt, merge_us, num_teams
from kernelcat.kernels.cuda.flashmla.wgmma import (
    BLOCK,
    TILE_US,
    illegal,
    launch_us,
    launches,
    unpromising_teams,
)
from kernelcat.runtime.gpu import Gpu

START_US = 1.3
"""Microseconds of a thread block to find its work; the first queries and keys and the results are
in the cost of a piece."""
SMALL_PAGES = 0.08
"""Part of a KV tile's time that each TMA box besides the first adds, where pages hold less than a
tile; teams of four thread blocks lose a quarter of it. With pages of 16 tokens teams of one took
0.94 to 1.37 of the time of teams of four (four problems). Pages of one token have no boxes."""

SPACE = {
    "row_tiles": (2, 1, 4),
    "cluster": (1, 2),
    "least": (2, 4, 8),
    "combine": (True, False),
}
"""As in `wgmma`, but a team has at least ``least`` KV tiles or what costs as much."""


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_teams(config, problem, gpu, _items(problem, config), SPACE["least"])


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    program = launches(problem, config, gpu, "merge")
    if not program.steps:
        return program
    arguments = (
        f"kernelcat::{problem['dtype']}, {problem['page_size']}, "
        f"{config['row_tiles']}, {config['cluster']}"
    )
    tile = f"kernelcat::DealtTile<kernelcat::LatentTile<{arguments}>>"
    kernel = f"kernelcat::flashmla_wgmma<{arguments}, {tile}>"
    step = replace(program.steps[0], source=CudaSource("flashmla/dealt.cu", kernel))
    return replace(program, steps=(step, *program.steps[1:]))


def _items(problem: Problem, config: Config) -> int:
    """Pairs of a row tile and a KV tile that some row of it sees, of all sequences."""
    return max(num_items(problem, BLOCK * config["row_tiles"], BLOCK, causal=True), 1)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The bytes, or a team's share of the KV tiles and of the pieces; then the merge."""
    if num_rows(problem) == 0:
        return LAUNCH_US
    tile_rows, items = BLOCK * config["row_tiles"], _items(problem, config)
    max_teams = num_teams(problem, tile_rows, gpu.sms // config["row_tiles"])
    share, teams = dealt(problem, tile_rows, max_teams, items, config["least"])
    boxes = BLOCK / problem["page_size"] if 1 < problem["page_size"] < BLOCK else 1
    tile_us = TILE_US * (1 + SMALL_PAGES * (boxes - 1) / config["row_tiles"])
    return launch_us(problem, config, gpu, START_US + share * tile_us) + merge_us(
        problem, tile_rows, teams, config["combine"], gpu, all_at_once=True
    )


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="dealt",
    summary="wgmma's kernel; work dealt out by cost; row tiles end at the last token they see",
    archs=("sm_90a",),
    space=SPACE,
    illegal=illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "tma": "UTMALDG",
        "register reallocation": "USETMAXREG",
        "dependent launch": "ACQBULK",
        "exponential by one instruction": "MUFU.EX2",
    },
    rank=2,
)
