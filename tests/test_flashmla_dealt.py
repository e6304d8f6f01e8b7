"""CUDA's `flashmla/dealt` on the host: how work is dealt out, and results."""

from __future__ import annotations

import ctypes
import itertools
import random
from math import ceil
from pathlib import Path

import cuda_fibers
import numpy as np
import pytest

from kernelcat.catalog import source
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.flashmla import dealt, wgmma
from kernelcat.kernels.cuda.flashmla.operands import num_items
from kernelcat.reference._sequences import query_groups
from kernelcat.reference.flashmla import ENTRY, latent
from kernelcat.runtime import gpu
from kernelcat.verify import gate

needs_compiler = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
H200 = gpu.find("h200")

PLAN = """
#include "{folder}/flashmla/dealt_list.cuh"
namespace kernelcat {{
template <int kRowTiles>
__global__ void plan(const int* kv_lens, const int* cu_q, int* rows, int batch, int heads,
                     int min_share, int max_segments) {{
  using Tile = DealtTile<LatentTile<bfloat16, 64, kRowTiles, 1>>;
  using List = typename Tile::List;
  auto& planner = *reinterpret_cast<Planner<List, Tile::kNumWarps>*>(dynamic_shared);
  const List list = {{kv_lens, cu_q, batch, heads}};
  WorkCursor<List> first;
  const int team = blockIdx.x;
  const WorkPartition partition = planner.partition(list, gridDim.x, min_share, team, first);
  if (threadIdx.x != 0 || team >= partition.num_teams) return;
  int* row = rows + team * max_segments * 8;
  LatentSchedule<Tile>{{list, partition, team, 0}}.for_each(first, [&](const Segment& segment) {{
    const int values[] = {{segment.sequence_idx, segment.team_row, segment.num_team_rows,
                           segment.begin, segment.end, segment.first_team, segment.last_team, 1}};
    for (int value : values) *row++ = value;
  }});
}}
}}
"""
MAX_SEGMENTS = 2500
COST, LEAST_PIECE = 3, 2
"""kPieceCost and kMinPiece of dealt_list.cuh."""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.cu"
    path.write_text(PLAN.format(folder=source.cuda_root()))
    return path


def plan(file, q_lens, kv_lens, heads, row_tiles, teams, least) -> list[list[list[int]]]:
    """The segments of each team: sequence, first row, rows, first and last KV tile, teams."""
    cu_q = np.array([0, *itertools.accumulate(q_lens)], "int32")
    lens = np.array(kv_lens, "int32")
    rows = np.zeros((teams, MAX_SEGMENTS, 8), "int32")
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (lens, cu_q, rows)]
    numbers = [ctypes.c_int32(n) for n in (len(q_lens), heads, least, MAX_SEGMENTS)]
    arguments = [*pointers, *numbers]
    kernel = CudaSource(str(file), f"kernelcat::plan<{row_tiles}>")
    values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    grid = (ctypes.c_uint * 3)(teams, 1, 1)
    assert cuda_fibers.library(kernel).run(values, grid, wgmma.THREADS, 1, 1) == b""
    return [[row[:7] for row in team if row[7]] for team in rows.tolist()]


def row_tiles_of(q_lens, kv_lens, heads, tile_rows) -> dict[tuple[int, int], tuple[int, int]]:
    """(sequence, first row) of each row tile -> its rows and KV tiles."""
    found = {}
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for first in range(0, q_len * heads, tile_rows):
            end = min(first + tile_rows, q_len * heads)
            seen = kv_len
            if q_len > 64 and kv_len >= q_len and 64 * heads % tile_rows == 0:
                seen = kv_len - q_len + (end - 1) // heads + 1
            found[s, first] = end - first, max(ceil(seen / 64), 1)
    return found


def drawn(kind: str, dice: random.Random) -> tuple[list[int], list[int]]:
    """Numbers of queries and lengths."""
    near_pages = [0, 1, 63, 64, 65, 127, 128, 129]
    if kind == "decode":
        lens = [dice.choice([*near_pages, round(6000 ** dice.random())]) for _ in range(40)]
        return [1] * len(lens), lens
    if kind == "one long":
        lens = [dice.choice(near_pages) for _ in range(30)]
        lens[dice.randrange(30)] = 60000
        return [4] * 30, lens
    if kind == "many":
        q_lens = [dice.choice((0, 1, 1, 1, 2)) for _ in range(1000)]
        return q_lens, [round(700 ** dice.random()) for _ in q_lens]
    if kind == "chunks":
        q_lens = [dice.choice((0, 1, 64, 65, dice.randint(66, 300))) for _ in range(12)]
        return q_lens, [
            max(0, q + dice.choice((-3, 0, 1, 62, dice.randint(0, 900)))) for q in q_lens
        ]
    assert kind == "one tile"
    return [0, 0, 1, 0], [5, 0, 64, 9]


KINDS = ("decode", "one long", "many", "chunks", "one tile")


@needs_compiler
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_is_dealt_once_and_to_shares_that_cost_the_same(plan_file, kind, heads) -> None:
    dice = random.Random(f"{kind} {heads}")
    q_lens, kv_lens = drawn(kind, dice)
    row_tiles, teams, least = dice.choice((1, 2, 4)), dice.choice((5, 33, 66)), dice.choice((2, 8))
    dealt_out = plan(plan_file, q_lens, kv_lens, heads, row_tiles, teams, least)
    expected = row_tiles_of(q_lens, kv_lens, heads, 64 * row_tiles)
    piece = max(ceil(sum(n for _, n in expected.values()) / teams), least)
    costs = [n + COST * ceil(expected[s, 0][1] / piece) for (s, _), (_, n) in expected.items()]
    share = max(ceil(sum(costs) / teams), least + COST)

    owners: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for team, segments in enumerate(dealt_out):
        cost = sum(COST + end - begin for _, _, _, begin, end, *_ in segments)
        # More than the share: a row tile that another team begins, and boundaries that moved.
        assert cost <= share + COST + 2 * (LEAST_PIECE - 1)
        for segment in segments:
            owners.setdefault((segment[0], segment[1]), []).append((team, segment))
    assert list(owners) == list(expected)
    for row_tile, (num_rows, num_tiles) in expected.items():
        parts = owners[row_tile]
        first, last = parts[0][0], parts[-1][0]
        assert [team for team, _ in parts] == list(range(first, last + 1))
        tile = 0
        for _, (_, _, rows, begin, end, first_team, last_team) in parts:
            assert (rows, begin, first_team, last_team) == (num_rows, tile, first, last)
            assert len(parts) == 1 or end - begin >= LEAST_PIECE
            tile = end
        assert tile == num_tiles


@needs_compiler
@pytest.mark.parametrize(("batch", "tiles", "teams"), [(16, 64, 64), (1, 512, 64), (64, 16, 64)])
def test_equal_sequences_are_divided_evenly(plan_file, batch, tiles, teams) -> None:
    dealt_out = plan(plan_file, [1] * batch, [64 * tiles] * batch, 128, 2, teams, 2)
    share = batch * tiles // teams
    lengths = [[end - begin for *_, begin, end, _, _ in team] for team in dealt_out]
    assert lengths == [[share]] * teams


@needs_compiler
def test_a_launch_without_queries_has_no_teams(plan_file) -> None:
    assert plan(plan_file, [0, 0], [7, 0], 128, 2, 5, 2) == [[]] * 5


CASES = {
    "skewed": (latent(5, 1, 128, 400, lengths="skewed"), 2, 7),
    "ragged chunks": (latent(3, 70, 8, 130, lengths="ragged"), 1, 5),
    "a chunk of row tiles of 128": (latent(1, 150, 8, 200, lengths="ragged"), 2, 6),
    "one sequence": (latent(1, 1, 64, 1500, 128), 1, 11),
    "short sequences": (latent(9, 2, 3, 70, 16, lengths="ragged"), 1, 132),
    "few heads": (latent(5, 1, 20, 400, lengths="skewed"), 1, 7),
}  # fmt: skip
"""Problem, row tiles of a team, SMs."""


@needs_compiler
@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_are_right_on_the_host(case: str, combine: bool) -> None:
    problem, row_tiles, sms = CASES[case]
    config = Config(row_tiles=row_tiles, cluster=1, least=2, combine=combine)
    host = cuda_fibers.Host(max_blocks=sms, sms=sms)
    verdict = gate.check(dealt.IMPLEMENTATION, problem, config, host, seeds=(0,))
    assert verdict.passed, verdict.detail


def estimate(problem: Problem, implementation=dealt.IMPLEMENTATION) -> float:
    return min(
        implementation.estimate(problem, config, H200)
        for config in implementation.configs(problem, H200)
        if implementation.why_not_try(config, problem, H200) is None
    )


def test_the_model_counts_what_rows_see_and_the_pages_there_are() -> None:
    chunk = latent(1, 3000, 128, 3000)
    assert 0.45 < estimate(chunk) / estimate(chunk, wgmma.IMPLEMENTATION) < 0.6
    full, half = latent(128, 1, 128, 4096), latent(128, 1, 128, 4096, pages=4096)
    assert 0.45 < estimate(half) / estimate(full) < 0.65


# ---- what a call is assumed to have ------------------------------------------------------------


def queries(batch: int, tokens: int, max_q: int, pages: int, width: int) -> Problem:
    return ENTRY.problem(
        batch=batch, tokens=tokens, max_q=max_q, pages=pages, table_width=width, heads=16,
        page_size=64, dtype="bfloat16", kv_dtype="bfloat16", sm_scale=0.1,
    )  # fmt: skip


def test_sequences_of_equal_queries_are_one_group() -> None:
    assert query_groups(queries(4, 4, 1, 100, 50)) == ((4, 1, 1600.0),)
    assert query_groups(queries(3, 120, 40, 9, 3)) == ((3, 40, 192.0),)


@pytest.mark.parametrize(
    ("batch", "tokens", "max_q", "pages", "width"),
    [
        (7, 386, 380, 1390, 1303),
        (8, 91, 84, 62, 25),
        (13, 40, 4, 445, 182),
        (2, 547, 546, 1531, 1393),
    ],
)
def test_groups_have_the_sequences_and_the_tokens_of_the_call(
    batch: int, tokens: int, max_q: int, pages: int, width: int
) -> None:
    groups = query_groups(queries(batch, tokens, max_q, pages, width))
    assert sum(group.sequences for group in groups) == batch
    assert sum(group.sequences * group.queries for group in groups) == tokens
    assert all(group.queries <= min(max_q, group.tokens) <= width * 64 for group in groups)
    cached = sum(group.sequences * group.tokens for group in groups)
    assert cached == pytest.approx(pages * 64, rel=0.05)


def test_a_chunk_beside_sequences_that_write_counts_its_row_tiles_by_its_own_tokens() -> None:
    """380 of 386 query tokens in one of seven sequences: 95 tiles of 64 rows, and six of one."""
    problem = queries(7, 386, 380, 1390, 1303)
    chunk, others = query_groups(problem)
    assert (chunk.sequences, chunk.queries) == (1, 380) and others[:2] == (6, 1)
    assert 380 < chunk.tokens < (1390 - 1303) * 64  # the longest sequence is another one
    tiles = [group.tokens / 64 for group in (chunk, others)]
    assert num_items(problem, 64, 64) == pytest.approx(95 * tiles[0] + 6 * tiles[1], rel=1e-3)


def test_a_chunk_has_at_least_what_the_others_have_no_room_for() -> None:
    """Three sequences of up to 50 pages: the chunk's has 50 if all are full, and 48 of 148."""
    full, _ = query_groups(queries(3, 75, 73, 150, 50))
    assert full.tokens == pytest.approx(50 * 64)
    crowded, _ = query_groups(queries(3, 75, 73, 148, 50))
    assert 48 * 64 < crowded.tokens < 50 * 64
    alone, others = query_groups(queries(3, 75, 73, 52, 50))
    assert 73 < alone.tokens < 50 * 64 and others.tokens > 64
