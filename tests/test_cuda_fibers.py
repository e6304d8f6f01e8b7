"""Kernels that run on the host give right results there, and planted faults are found."""

from __future__ import annotations

import cuda_fibers
import pytest

from kernelcat.catalog.implementation import Config
from kernelcat.kernels.cuda.moe_gemm import decoded, wgmma
from kernelcat.reference.moe_gemm import product
from kernelcat.verify import gate

pytestmark = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")

PROBLEM = product(40, 2, 3, 136, 400, gather=True, bias=True)
CONFIGS = {
    wgmma.IMPLEMENTATION.name: Config(tile="128x128", combine="ordered"),
    decoded.IMPLEMENTATION.name: Config(tile="128x128"),
}
TURNS = Config(tile="2x128x192", combine="ordered")

FAULTS = {
    "a stage is released before it is read": (
        "accumulate.cuh", "      wgmma_wait<1>();\n", "",
    ),
    "the producer does not wait for an empty stage": (
        "producer.cuh", "shared.empty[position.stage].wait(position.phase ^ 1);", "",
    ),
    "consumers do not wait for a full stage": (
        "accumulate.cuh", "    shared.full[stage].wait(position.phase);\n", "",
    ),
    "a barrier expects too many arrivals": (
        "wgmma.cu", "barrier.init(1 + Config::kCopyingThreads)",
        "barrier.init(2 + Config::kCopyingThreads)",
    ),
    "a barrier expects too few arrivals": (
        "wgmma.cu", "barrier.init(1 + Config::kCopyingThreads)", "barrier.init(1)",
    ),
    "gathered rows are not swizzled": (
        "producer.cuh", "swizzled<kRowBytes>((first + i % 2 * kThreads) * kVectorBytes)",
        "(first + i % 2 * kThreads) * kVectorBytes",
    ),
    "a consumer without rows does not release its stages": (
        "wgmma.cu", "      pass_over<Config>(shared, position, num_k);\n", "",
    ),
    "tiles of an expert begin at the wrong row": (
        "expert_tiles.cuh", "offsets[expert] + tile.m * BLOCK_M;", "tile.m * BLOCK_M;",
    ),
    "weights are those of the first expert": (
        "producer.cuh", "tile.expert * n + tile.col", "tile.col",
    ),
}  # fmt: skip
"""What is wrong -> file of moe_gemm, text, and its replacement."""

TURNS_PROBLEM = product(200, 2, 3, 400, 400, gather=True, bias=True)
TURNS_FAULTS = {
    "a consumer does not wait for its turn": (
        "moe_gemm/wgmma.cu", "      shared.turns()[consumer].wait(turn_phase);\n", "",
    ),
    "a consumer does not end its turn": (
        "moe_gemm/accumulate.cuh",
        "    if (lane_index() == 0) shared.turns()[1 - consumer].arrive();\n", "",
    ),
    "a consumer does not pass over the other one's stages": (
        "moe_gemm/wgmma.cu", "        skip(position, num_k);\n", "",
    ),
    "each row is the first one of A": (
        "moe_gemm/producer.cuh", "(rows[i] + static_cast<uint32_t>(place))", "place",
    ),
}  # fmt: skip
"""What is wrong where consumers take turns -> file of kernels/cuda, text, replacement."""

PAIRS = Config(tile="128x192-pair", combine="ordered")
PAIRS_PROBLEM = product(540, 2, 3, 400, 400, gather=True, bias=True)
PAIRS_FAULTS = {
    "a stage is filled that the other thread block still reads": (
        "moe_gemm/wgmma.cu", "barrier.init(Config::kClusterSize * Config", "barrier.init(Config",
    ),
    "a stage is released in one thread block only": (
        "moe_gemm/accumulate.cuh", "release_stage<Config::kClusterSize>(shared.empty[previous])",
        "release_stage<1>(shared.empty[previous])",
    ),
    "a thread block ends while the other one arrives at its barriers": (
        "moe_gemm/wgmma.cu", "  if constexpr (kPairs) cluster_sync();\n", "",
    ),
    "barriers are used before they are initialised": (
        "moe_gemm/wgmma.cu", "  if constexpr (kPairs) cluster_wait();\n", "",
    ),
    "both halves of the weights are the first one": (
        "moe_gemm/producer.cuh", "x, y + half * kRows, full", "x, y, full",
    ),
    "a row of tiles that is left has half of its weights": (
        "moe_gemm/producer.cuh", "if (is_shared && half != rank)", "if (half != rank)",
    ),
    "both tiles of a pair have the same rows": (
        "moe_gemm/tile_pairs.cuh", "first_m + m)", "first_m + m / 2 * 2)",
    ),
}  # fmt: skip
"""What is wrong with pairs of tiles -> file of kernels/cuda, text, replacement."""

PACKED_PROBLEM = product(40, 2, 3, 144, 416, gather=True, format="mxfp4", packing="tiles")
PACKED_FAULTS = {
    "a stage of packed weights is released before it is read": (
        "moe_gemm/decoded_sums.cuh", "&& k_block > 0) release_stage<1>(shared.empty[previous]);",
        ") release_stage<1>(shared.empty[stage]);",
    ),
    "the steps of a tile have one word": (
        "include/kernelcat/packed_tile.cuh", "{words.x, words.y,", "{words.x, words.x,",
    ),
}  # fmt: skip
"""What is wrong with the kernel of packed weights -> file of kernels/cuda, text, replacement."""
FLOAT8_PROBLEM = product(100, 2, 2, 136, 400, gather=True, format="fp8")
"""Experts of 100 rows: two passes a k-block."""
FLOAT8_FAULTS = {
    "products of float8 are promoted before they are computed": (
        "moe_gemm/float8_products.cuh", "wgmma_wait<1>();\n    pin(operands[1]);", "",
    ),
    "float8 weights are widened before the last ones have been multiplied": (
        "moe_gemm/float8_products.cuh", "wgmma_wait<1>();\n    pin(operands[0]);", "",
    ),
    "a stage of float8 weights is released before it is read": (
        "moe_gemm/float8_products.cuh", "shared.empty[previous]", "shared.empty[stage]",
    ),
    "both passes multiply the first rows": (
        "moe_gemm/float8_products.cuh", "first_row * kRowBytes", "0",
    ),
    "all columns have the first scale": (
        "moe_gemm/decoded_stage.cuh", "w_scales + k_block", "w_scales",
    ),
}  # fmt: skip
"""What is wrong with float8 weights -> file of kernels/cuda, text, replacement."""
CASES = [
    *((wgmma.IMPLEMENTATION, PROBLEM, None, (f"moe_gemm/{fault[0]}", *fault[1:]), id)
      for id, fault in FAULTS.items()),
    *((wgmma.IMPLEMENTATION, TURNS_PROBLEM, TURNS, fault, id)
      for id, fault in TURNS_FAULTS.items()),
    *((wgmma.IMPLEMENTATION, PAIRS_PROBLEM, PAIRS, fault, id)
      for id, fault in PAIRS_FAULTS.items()),
    *((decoded.IMPLEMENTATION, problem, None, fault, id)
      for problem, faults in ((PACKED_PROBLEM, PACKED_FAULTS), (FLOAT8_PROBLEM, FLOAT8_FAULTS))
      for id, fault in faults.items()),
]  # fmt: skip


def verdict(implementation, problem, config=None):
    config = config or CONFIGS[implementation.name]
    return gate.check(implementation, problem, config, cuda_fibers.Host(), seeds=(0,))


@pytest.mark.parametrize(
    ("implementation", "problem", "config"),
    [
        (wgmma.IMPLEMENTATION, PROBLEM, None),
        (wgmma.IMPLEMENTATION, TURNS_PROBLEM, TURNS),
        (wgmma.IMPLEMENTATION, PAIRS_PROBLEM, PAIRS),
        (decoded.IMPLEMENTATION, PACKED_PROBLEM, None),
    ],
    ids=["wgmma", "wgmma in turns", "wgmma in pairs", "decoded"],
)
def test_a_kernel_is_right_on_the_host(implementation, problem, config) -> None:
    assert verdict(implementation, problem, config).passed


@pytest.mark.parametrize(
    ("implementation", "problem", "config", "fault"),
    [pytest.param(*c[:4], id=c[4]) for c in CASES],
)
def test_a_planted_fault_is_found(
    implementation, problem, config, fault, monkeypatch, tmp_path
) -> None:
    cuda_fibers.plant(monkeypatch, tmp_path, *fault)
    try:
        assert not verdict(implementation, problem, config).passed
    except AssertionError as error:
        assert f"moe_gemm_{implementation.variant}" in str(error)
