"""CUDA's `paged_attn/split` and `dealt` on the host: how work is dealt out, and results."""

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
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.paged_attn import dealt, split
from kernelcat.reference.paged_attn import ENTRY, FP8, NVFP4, attention, uneven, with_chunk
from kernelcat.runtime import gpu
from kernelcat.verify import gate

pytestmark = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")

BLOCK_M, BLOCK_N, GROUP, WARPS = 16, 32, 4, 2
MAX_TILES = 1200
DEAL = """
#include "{folder}/paged_attn/work_list.cuh"
namespace kernelcat {{
template <int kBorderItems>
__global__ void deal(const int* kv_lens, const int* cu_q, int* rows, int batch, int kv_heads) {{
  using List = WorkList<{block_m}, {block_n}, false, kBorderItems>;
  auto& planner = *reinterpret_cast<Planner<List, {warps}>*>(dynamic_shared);
  const List list = {{kv_lens, cu_q, batch, kv_heads, {group}, 0}};
  const WorkPartition partition = planner.partition(list);
  if (blockIdx.x >= partition.num_blocks) return;
  const int64_t begin = partition.begin(blockIdx.x), end = partition.begin(blockIdx.x + 1);
  int skipped;
  WorkCursor<List> ahead = planner.find(list, partition, begin, skipped);
  BlockTiles<kBorderItems> tiles(static_cast<int>(end - begin) - skipped);
  int* row = rows + blockIdx.x * {max_tiles} * 5;
  for (int tile = 0; tiles.find(tile, ahead, list); ++tile) {{
    if (threadIdx.x != 0) continue;
    const int values[] = {{ahead.kv_head, ahead.sequence_idx, ahead.row_tile, ahead.kv_tile, 1}};
    for (int value : values) *row++ = value;
  }}
}}
}}
"""


@pytest.fixture(scope="module")
def deal_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deal") / "deal.cu"
    path.write_text(
        DEAL.format(
            folder=source.cuda_root(), block_m=BLOCK_M, block_n=BLOCK_N, group=GROUP, warps=WARPS,
            max_tiles=MAX_TILES,
        )
    )  # fmt: skip
    return path


def deal(file, q_lens, kv_lens, kv_heads, blocks, border) -> list[list[tuple[int, ...]]]:
    """The KV tiles of each thread block: head, sequence, row tile, KV tile."""
    cu_q = np.array([0, *itertools.accumulate(q_lens)], "int32")
    lens = np.array(kv_lens, "int32")
    rows = np.zeros((blocks, MAX_TILES, 5), "int32")
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (lens, cu_q, rows)]
    arguments = [*pointers, ctypes.c_int32(len(q_lens)), ctypes.c_int32(kv_heads)]
    kernel = CudaSource(str(file), f"kernelcat::deal<{border}>")
    values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    grid = (ctypes.c_uint * 3)(blocks, 1, 1)
    assert cuda_fibers.library(kernel).run(values, grid, 32 * WARPS, 1, 1) == b""
    return [[tuple(row[:4]) for row in block if row[4]] for block in rows.tolist()]


def all_tiles(q_lens, kv_lens, kv_heads) -> list[tuple[int, ...]]:
    """The whole list in its order, by the definition of a visible token."""
    found = []
    for head, (s, (q_len, kv_len)) in itertools.product(
        range(kv_heads), enumerate(zip(q_lens, kv_lens, strict=True))
    ):
        for first in range(0, q_len * GROUP, BLOCK_M):
            last_query = (min(first + BLOCK_M, q_len * GROUP) - 1) // GROUP
            seen = max(kv_len - q_len + last_query + 1, 0)
            for tile in range(max(ceil(seen / BLOCK_N), 1)):
                found.append((head, s, first // BLOCK_M, tile))
    return found


def drawn(kind: str, dice: random.Random) -> tuple[list[int], list[int]]:
    """Numbers of queries and lengths."""
    near_tiles = [0, 1, 31, 32, 33, 64]
    if kind == "decode":
        return [1] * 30, [dice.choice([*near_tiles, round(900 ** dice.random())]) for _ in "x" * 30]
    if kind == "one long":
        lens = [dice.choice(near_tiles) for _ in range(40)]
        lens[dice.randrange(40)] = 5000
        return [dice.choice((0, 1, 2)) for _ in lens], lens
    if kind == "chunks":
        q_lens = [dice.choice((0, 1, 5, dice.randint(6, 90))) for _ in range(8)]
        return q_lens, [max(q + dice.choice((-3, 0, 1, dice.randint(0, 300))), 0) for q in q_lens]
    assert kind == "one tile"
    return [1], [dice.choice(near_tiles)]


@pytest.mark.parametrize("border", [0, 1, 5])
@pytest.mark.parametrize("kind", ["decode", "one long", "chunks", "one tile"])
def test_every_tile_is_dealt_out_once_and_all_get_as_much(deal_file, kind, border) -> None:
    dice = random.Random(f"{kind} {border}")
    for kv_heads, blocks in ((1, 1), (2, 7), (3, 24)):
        q_lens, kv_lens = drawn(kind, dice)
        q_lens[dice.randrange(len(q_lens))] = 1
        expected = all_tiles(q_lens, kv_lens, kv_heads)
        found = deal(deal_file, q_lens, kv_lens, kv_heads, blocks, border)
        assert list(itertools.chain(*found)) == expected
        row_tiles = len({tile[:3] for tile in expected})
        items = len(expected) + border * row_tiles
        busy = [block for block in found if block]
        assert len(busy) == min(blocks, items // (border + 1))
        for block in busy:
            within = len(block) + border * (len({tile[:3] for tile in block}) - 1)
            assert within <= ceil(items / len(busy))
            assert within + 2 * border >= items // len(busy)


FEW = Config(block_m=16, block_n=32, num_warps=2, blocks_per_sm=1)
MANY = Config(block_m=64, block_n=32, num_warps=4, blocks_per_sm=1)
CASES = {
    "lengths differ": (uneven(5, 4, 2, 64, 300, 16), FEW),
    "many short sequences": (uneven(28, 4, 2, 64, 400, 16), FEW),
    "more thread blocks than tiles": (uneven(2, 4, 1, 64, 40, 16), FEW),
    "a window and sinks": (attention(3, 8, 1, 128, 200, 16, q_len=2, window=50, has_sinks=True),
                           FEW),
    "a float8 cache": (
        with_chunk(attention(5, 8, 2, 64, 300, 16, lengths="skewed", kv_dtype=FP8,
                             has_scales=True), 1), FEW,
    ),
    "an NVFP4 cache with scales of pages": (
        with_chunk(attention(4, 4, 2, 128, 200, 16, lengths="skewed", kv_dtype=NVFP4,
                             has_scales=True, page_scales=True), 1), FEW,
    ),
    "a chunk and a softcap": (
        with_chunk(attention(4, 4, 2, 64, 300, 16, lengths="skewed", softcap=20.0), 40), MANY,
    ),
}  # fmt: skip


def check(implementation: Implementation, problem: Problem, config: Config) -> gate.Verdict:
    host = cuda_fibers.Host(max_blocks=6, sms=6)
    assert implementation.why_not(config, problem, host.gpu) is None
    return gate.check(implementation, problem, config, host, seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", [split.IMPLEMENTATION, dealt.IMPLEMENTATION],
                         ids=lambda each: each.variant)  # fmt: skip
def test_results_on_the_host_are_right(implementation: Implementation, case: str) -> None:
    verdict = check(implementation, *CASES[case])
    assert verdict.passed, verdict.detail


FAULTS = {
    "a thread block begins where the border does": ("work_list.cuh", "tile += skipped;", ""),
    "the next row tile has no border": (
        "work_list.cuh", "left -= num_tiles + kBorderItems;", "left -= num_tiles;",
    ),
    "parts of a row tile are counted from its border on": (
        "split_attention.cuh", "begin + skipped - (", "begin - (",
    ),
    "a stage is read before its copies have landed": (
        "split_attention.cuh", "wait_async_copies<kNumStages - 2>();",
        "wait_async_copies<kNumStages>();",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch, tmp_path: Path) -> None:
    name, before, after = FAULTS[fault]
    cuda_fibers.plant(monkeypatch, tmp_path, f"paged_attn/{name}", before, after)

    def is_wrong(problem: Problem, config: Config) -> bool:
        try:
            return not check(dealt.IMPLEMENTATION, problem, config).passed
        except AssertionError:  # the kernel hangs
            return True

    assert any(is_wrong(*case) for case in CASES.values())


def test_borders_cost_about_as_many_tiles_as_by_the_cost_model_of_split() -> None:
    """The model may be fitted anew. Where the two differ by more, fit the numbers of dealt, too."""
    for problem in ENTRY.problems.values():
        for config in split.IMPLEMENTATION.configs(problem, gpu.find("h200")):
            plan = split.plan_of(config, problem)
            ratio = plan.border_us / plan.tile_us
            assert abs(dealt.border_items(plan) - ratio) <= 0.5 + 0.1 * ratio


def test_the_kernel_is_compiled_for_the_tiles_of_a_border() -> None:
    h200 = gpu.find("h200")
    problem = ENTRY.problems["skewed-64x16384-32/8x128-p16"]
    for config, items in ((FEW, 6), (Config({**FEW, "block_n": 128, "num_warps": 4}), 5)):
        [step] = dealt.IMPLEMENTATION.program(problem, config, h200).steps
        [other] = split.IMPLEMENTATION.program(problem, config, h200).steps
        assert step.source.kernel == other.source.kernel.removesuffix(">") + f", {items}>"
