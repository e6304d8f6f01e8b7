"""How the work is divided among teams of thread blocks, and how the partial results of rows that
several teams share are merged.

A team is one or more thread blocks with neighbouring rows of the same tokens, or with parts of the
columns."""

from __future__ import annotations

from math import ceil, log

from kernelcat.catalog.implementation import Int32, Pointer, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import context, mean_context
from kernelcat.kernels.cuda.flashmla.lengths import lengths_of
from kernelcat.kernels.cuda.flashmla.operands import max_rows, num_row_tiles
from kernelcat.reference._mla_row import LATENT
from kernelcat.reference._sequences import query_groups
from kernelcat.runtime.gpu import Gpu

NO_PARTS, ALL_PARTS = 1, 1 << 30
"""Values of ``max_inline_parts``: the last thread block merges up to so many partial results of a
row; a second kernel merges more."""
FULL = 0.9
"""Fraction of the teams that is enough if no row tile has to be split then."""

PIECE_COST = 3
"""KV tiles that a piece of a row tile costs besides its own, where work is dealt out by cost:
kPieceCost of dealt_list.cuh."""

BLOCK_N = 64
"""Tokens of a KV tile where teams have as many."""
RUN = 1.5
"""Short sequences that follow each other, for a natural logarithm of the number of sequences, where
most are short. With the lengths of 30 raced problems the busiest team had 0.6 to 1.7 of the pieces
that follow."""

TASK_BYTES = 16
"""Size of CombineTask."""
COMBINE_THREADS = 512
COMBINE_BLOCKS_PER_SM = {"combine": 2, "merge": 3}
"""Thread blocks of each second kernel, which keep enough loads in flight."""
COMBINE_US = 5.2
"""Microseconds of the second kernel."""
PARTIAL_ROW_US = 0.9e-3
"""Microseconds to write a row's partial result and to read it in the second kernel. This and the
kernels' other times are fitted to 476 times on an H200."""
FEW_PARTS, MANY_PARTS_US = 8, 1.4
"""Parts of a row that a warp of `combine` adds up alone; microseconds of a thread block for 128
columns of a row that has more."""
PART_US = 2.8
"""Microseconds of the last thread block for a partial result of 64 rows."""
MAX_READS = 4
"""Row tiles of a sequence whose reads of the same keys are counted; further ones read from L2."""

WORKSPACES = ("partials", "counters", "tasks")


def num_teams(problem: Problem, tile_rows: int, max_teams: int) -> int:
    """``max_teams``, or a few less where row tiles then need not be split."""
    tiles = max(num_row_tiles(problem, tile_rows), 1)
    if tiles > max_teams:
        whole = ceil(tiles / ceil(tiles / max_teams))
    else:
        whole = max_teams // tiles * tiles
    return whole if whole >= FULL * max_teams else max_teams


def workspaces(teams: int, tile_rows: int, team_blocks: int) -> dict[str, int]:
    """Bytes, for teams of ``team_blocks`` thread blocks that have ``tile_rows`` rows together."""
    return {
        "partials": 2 * teams * tile_rows * (LATENT + 2) * 4,
        "counters": teams * team_blocks * 4,
        "tasks": teams * TASK_BYTES,
    }


def combine_step(
    problem: Problem, tile_rows: int, teams: int, gpu: Gpu, kernel: str = "combine"
) -> Step:
    """The second kernel, which merges partial results of rows that several teams share.

    ``kernel`` is `combine`, or `merge`, which merges all rows at the same time.
    """
    name = f"kernelcat::flashmla_{kernel}<kernelcat::{problem['dtype']}, {tile_rows}>"
    return Step(
        CudaSource(f"flashmla/{kernel}.cu", name),
        (gpu.sms * COMBINE_BLOCKS_PER_SM[kernel], 1, 1),
        (*map(Pointer, ("partials", "tasks", "out", "lse")), Int32(teams)),
        COMBINE_THREADS,
        programmatic=True,
    )


def merge_us(
    problem: Problem,
    tile_rows: int,
    teams: int,
    combine: bool,
    gpu: Gpu,
    all_at_once: bool = False,
) -> float:
    """Microseconds to merge the partial results of the row tile that most teams share.

    ``all_at_once``: the second kernel is `merge`. `combine` takes rows of many parts one by one.
    """
    row_tiles = max(num_row_tiles(problem, tile_rows), 1)
    longest = teams / row_tiles * context(problem) / max(mean_context(problem), 1)
    rows_us = PARTIAL_ROW_US * _partial_rows(problem, tile_rows, teams)
    if combine:
        us = COMBINE_US + rows_us
        if not all_at_once and longest > FEW_PARTS:
            many = min(row_tiles, teams // (2 * FEW_PARTS))
            rounds = many * tile_rows * 4 / (gpu.sms * COMBINE_BLOCKS_PER_SM["combine"])
            us += MANY_PARTS_US * max(rounds - 1, 0)
        return us
    parts = ceil(longest) + (not _ends_with_row_tiles(problem, row_tiles, teams))
    return rows_us + PART_US * parts if parts > 1 else 0.0


def _ends_with_row_tiles(problem: Problem, row_tiles: int, teams: int) -> bool:
    """Whether no team ends within a part of a row tile: all row tiles are alike, and each has as
    many teams, or each team as many of them."""
    is_even = problem["tokens"] == problem["batch"] * problem["max_q"]
    is_even &= mean_context(problem) >= context(problem)
    return is_even and (teams % row_tiles == 0 or row_tiles % teams == 0)


def dealt(
    problem: Problem, tile_rows: int, max_teams: int, items: int, least: int
) -> tuple[int, int]:
    """KV tiles of a team and what costs as much, and how many teams have work, where work is dealt
    out by cost.

    As in dealt_list.cuh, row tiles have as many pieces as the mean number of KV tiles of a team
    makes of them; where lengths differ, half a piece is added for each.
    """
    row_tiles = max(num_row_tiles(problem, tile_rows), 1)
    piece = max(ceil(items / max_teams), least)
    pieces = row_tiles / 2 + items / piece
    if lengths_of(problem).spread == 0:
        pieces = row_tiles * ceil(items / row_tiles / piece)
    cost = items + PIECE_COST * max(pieces, row_tiles)
    share = max(ceil(cost / max_teams), least + PIECE_COST)
    return share, ceil(cost / share)


def most_pieces(problem: Problem, tile_rows: int, teams: int, items: int) -> float:
    """Pieces of row tiles of the team that has most of them, where each has as many KV tiles.

    Where lengths differ, it has the longest run of short sequences, which grows with the logarithm
    of the number of sequences.
    """
    row_tiles = max(num_row_tiles(problem, tile_rows), 1)
    if _ends_with_row_tiles(problem, row_tiles, teams):
        return max(row_tiles / teams, 1.0)
    short = query_groups(problem)[-1]  # decoding sequences, where others have chunks of prompts
    unevenness, share = 1 - mean_context(problem) / max(context(problem), 1), items / teams
    run = RUN * unevenness * log(short.sequences)
    run *= ceil(short.queries * problem["heads"] / tile_rows)
    least = max(lengths_of(problem).least / BLOCK_N, 1.0)  # KV tiles of the shortest sequence
    return max(min(row_tiles / teams + 1 + run, share / least + (least > 1), share), 1.0)


def _partial_rows(problem: Problem, tile_rows: int, teams: int) -> int:
    """Rows of all partial results: each end of a team's work within a row tile makes two."""
    row_tiles = max(num_row_tiles(problem, tile_rows), 1)
    parts = min(2 * teams, teams + row_tiles)
    if _ends_with_row_tiles(problem, row_tiles, teams):
        parts = teams if teams > row_tiles else 0
    return parts * min(tile_rows, max_rows(problem))


def times_read(problem: Problem, tile_rows: int) -> int:
    """How often a sequence's keys are read: once for each row tile, but not more than MAX_READS."""
    return min(ceil(max_rows(problem) / tile_rows), MAX_READS)
