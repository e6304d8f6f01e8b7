"""CUDA's `paged_attn/wgmma` on the host: the order in which clusters take row tiles."""

from __future__ import annotations

import ctypes
import itertools
import random
from math import ceil
from pathlib import Path
from typing import NamedTuple

import cuda_fibers
import numpy as np
import pytest

from kernelcat.catalog import source
from kernelcat.jit.cuda import CudaSource

pytestmark = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")

BLOCK_M, BLOCK_N, GROUP = 128, 64, 32
QUERIES = BLOCK_M // GROUP
MAX_TILES = 1200
ORDER = """
#include "{folder}/paged_attn/prefill_schedule.cuh"
namespace kernelcat {{
template <int kClusterSize, bool kWindow>
__global__ void order(const int* kv_lens, const int* cu_q, int* rows, int batch, int kv_heads,
                      int window) {{
  using Kind = AttentionKind<bfloat16, bfloat16, 64, 16, kWindow, false, false, Scales::kNone>;
  using Tile = PrefillTile<Kind, {block_m}, {block_n}, 2, kClusterSize>;
  PrefillSchedule<Tile> schedule(kv_lens, cu_q, batch, kv_heads, {group}, window,
                                 blockIdx.x % kClusterSize);
  int* row = rows + blockIdx.x * {max_tiles} * 6;
  RowTile tile;
  while (schedule.next(tile)) {{
    if (threadIdx.x != 0) continue;
    const int values[] = {{tile.kv_head, tile.sequence_idx, tile.first_query, tile.num_queries,
                           tile.begin, tile.end}};
    for (int value : values) *row++ = value;
  }}
}}
}}
"""


class Tile(NamedTuple):
    """A row tile of a thread block, and its KV tiles."""

    kv_head: int
    sequence: int
    first_query: int
    num_queries: int
    begin: int
    end: int


@pytest.fixture(scope="module")
def order_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order") / "order.cu"
    path.write_text(
        ORDER.format(
            folder=source.cuda_root(), block_m=BLOCK_M, block_n=BLOCK_N, group=GROUP,
            max_tiles=MAX_TILES,
        )
    )  # fmt: skip
    return path


def order(file, q_lens, kv_lens, kv_heads, clusters, cluster, window) -> list[list[Tile]]:
    """The row tiles of each thread block, as it takes them."""
    cu_q = np.array([0, *itertools.accumulate(q_lens)], "int32")
    lens = np.array(kv_lens, "int32")
    rows = np.zeros((clusters * cluster, MAX_TILES, 6), "int32")
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (lens, cu_q, rows)]
    numbers = [ctypes.c_int32(n) for n in (len(q_lens), kv_heads, window)]
    arguments = [*pointers, *numbers]
    is_windowed = "true" if window else "false"
    kernel = CudaSource(str(file), f"kernelcat::order<{cluster}, {is_windowed}>")
    values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    grid = (ctypes.c_uint * 3)(clusters * cluster, 1, 1)
    assert cuda_fibers.library(kernel).run(values, grid, 32, 1, 1) == b""
    return [[Tile(*row) for row in block if row[5]] for block in rows.tolist()]


def all_tiles(q_lens, kv_lens, kv_heads, cluster, window) -> list[Tile]:
    """Every row tile, by the definition of a visible token."""
    found, step = [], cluster * QUERIES
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for first in range(0, q_len, step):
            context = kv_len - q_len
            begin = max(context + first + 1 - window, 0) // BLOCK_N if window else 0
            end = max(ceil(max(context + min(first + step, q_len), 0) / BLOCK_N), begin + 1)
            for rank, head in itertools.product(range(cluster), range(kv_heads)):
                query = first + rank * QUERIES
                found.append(Tile(head, s, query, min(QUERIES, q_len - query), begin, end))
    return found


def drawn(kind: str, dice: random.Random) -> tuple[list[int], list[int]]:
    """Numbers of queries and lengths."""
    if kind == "equal":
        return [30] * 5, [200] * 5
    if kind == "chunk beside decodes":
        kv_lens = [round(5000 ** dice.random()) for _ in range(70)]
        q_lens = [1] * len(kv_lens)
        s = dice.randrange(len(kv_lens))
        q_lens[s], kv_lens[s] = 90, 900
        return q_lens, kv_lens
    if kind == "ragged":
        q_lens = [dice.choice((0, 1, 4, 5, dice.randint(6, 90))) for _ in range(40)]
        return q_lens, [max(q + dice.choice((-3, 0, 1, dice.randint(0, 999))), 0) for q in q_lens]
    if kind == "far apart":
        return [40, 0, 9, 40], [40, 7, 3000, 9000]
    assert kind == "nothing"
    return [0] * 3, [5] * 3


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    "kind", ["equal", "chunk beside decodes", "ragged", "far apart", "nothing"]
)
def test_every_row_tile_is_taken_once_and_all_clusters_take_as_many(
    order_file, kind, cluster, window
) -> None:
    dice = random.Random(f"{kind} {cluster} {window}")
    for kv_heads, clusters in ((1, 1), (2, 7), (3, 66)):
        q_lens, kv_lens = drawn(kind, dice)
        blocks = order(order_file, q_lens, kv_lens, kv_heads, clusters, cluster, window)
        expected = all_tiles(q_lens, kv_lens, kv_heads, cluster, window)
        assert sorted(itertools.chain(*blocks)) == sorted(expected)
        counts = [len(block) for block in blocks]
        assert max(counts) - min(counts) <= 1
        for first in range(0, len(blocks), cluster):  # a cluster goes through the same KV tiles
            places = {tuple(t._replace(first_query=0, num_queries=0) for t in block)
                      for block in blocks[first : first + cluster]}  # fmt: skip
            assert len(places) == 1


@pytest.mark.parametrize("kind", ["equal", "ragged", "far apart"])
def test_row_tiles_that_see_the_most_come_first(order_file, kind) -> None:
    """Within 32 sequences; then no cluster has more than its share and one row tile."""
    q_lens, kv_lens = (lens[:32] for lens in drawn(kind, random.Random(kind)))
    (alone,) = order(order_file, q_lens, kv_lens, 2, 1, 1, 0)
    contexts = [max(kv - q, 0) for q, kv in zip(q_lens, kv_lens, strict=True)]
    levels = [contexts[t.sequence] // QUERIES + t.first_query // QUERIES for t in alone]
    assert levels == sorted(levels, reverse=True)
    blocks = order(order_file, q_lens, kv_lens, 2, 16, 1, 0)
    loads = [sum(t.end - t.begin for t in block) for block in blocks]
    longest = max(t.end - t.begin for t in alone)
    assert max(loads) <= sum(loads) / len(loads) + longest
