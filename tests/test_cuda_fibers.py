"""Kernels that run on the host give right results there, and planted faults are found."""

from __future__ import annotations

import shutil

import cuda_fibers
import pytest

from kernelcat.catalog import source
from kernelcat.catalog.implementation import Config
from kernelcat.kernels.cuda.moe_gemm import wgmma
from kernelcat.reference.moe_gemm import product
from kernelcat.verify import gate

pytestmark = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")

PROBLEM = product(40, 2, 3, 136, 400, gather=True, bias=True)
CONFIG = Config(tile="128x128")

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
        "producer.cuh", "swizzled<kRowBytes>(first * kVectorBytes)", "first * kVectorBytes",
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


def verdict():
    return gate.check(wgmma.IMPLEMENTATION, PROBLEM, CONFIG, cuda_fibers.Host(), seeds=(0,))


def test_a_kernel_is_right_on_the_host() -> None:
    assert verdict().passed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch, tmp_path) -> None:
    shutil.copytree(source.cuda_root(), tmp_path / "cuda")
    name, before, after = FAULTS[fault]
    path = tmp_path / "cuda" / "moe_gemm" / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    monkeypatch.setattr(source, "cuda_root", lambda: tmp_path / "cuda")
    try:
        assert not verdict().passed
    except AssertionError as error:
        assert "moe_gemm_wgmma" in str(error)
