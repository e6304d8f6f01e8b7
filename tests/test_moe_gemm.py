"""moe_gemm: every format against the second formulation, and what its programs launch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import cuda_fibers
import numpy as np
import pytest
from formulations.experts import moe_gemm

from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.kernels.cuda.moe_gemm import decoded, naive, wgmma
from kernelcat.reference._experts import ACTIVATIONS, DTYPES, FORMATS, FP4, FP8, PACKINGS
from kernelcat.reference.moe_gemm import ENTRY, product
from kernelcat.runtime import gpu
from kernelcat.verify import gate, inspect

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
CHOICES = [
    (format, act_dtype, packing)
    for format in FORMATS
    for act_dtype in ("bfloat16", "float16", FP8)
    for packing in PACKINGS
    if (packing == "rows" or format in FP4)
    and (format not in DTYPES or act_dtype == format)
]  # fmt: skip
"""Every format of weights with every type of activations and every packing it goes with."""


def problem_of(format: str, act_dtype: str, packing: str, **axes) -> Problem:
    """More than one block of scales along N and K, for any other ``axes``."""
    dtype = "bfloat16" if act_dtype == FP8 else act_dtype
    types = {"dtype": dtype, "format": format, "act_dtype": act_dtype, "packing": packing}
    return product(5, 2, 3, 144, 160, **types, **axes)


@pytest.mark.parametrize(("format", "act_dtype", "packing"), CHOICES)
def test_every_format_agrees_with_the_formulation(format, act_dtype, packing) -> None:
    problem = problem_of(format, act_dtype, packing, gather=True, bias=True, combine=True)
    assert ENTRY.constraint(problem) is None
    inputs = gate.decoded(ENTRY, problem, gate.prepare(ENTRY, problem, HOST, 1).arrays)
    expected = moe_gemm(problem, **inputs)["d"]
    assert np.allclose(ENTRY.oracle(problem, inputs)["d"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_residual_has_the_columns_of_the_result(activation: str) -> None:
    problem = product(
        3, 2, 4, 16, 32, combine=True, residual=True, bias=True, activation=activation
    )
    prepared = gate.prepare(ENTRY, problem, HOST, 0)
    expected = moe_gemm(problem, **gate.decoded(ENTRY, problem, prepared.arrays))["d"]
    assert prepared.expected["d"].shape == expected.shape
    assert np.allclose(prepared.expected["d"], expected, rtol=1e-5, atol=1e-5)


# ---- CUDA C++ on the host ------------------------------------------------------------------------

FLOAT8 = {"format": "fp8", "act_dtype": FP8}
ON_THE_HOST = {
    "one token": ("64x128", product(1, 1, 5, 64, 64, bias=True)),
    "no tokens": ("64x128", product(0, 1, 5, 64, 64)),
    "all experts": ("64x256", product(9, 6, 6, 270, 80, gather=True, activation="swiglu_oai")),
    "one expert": ("128x256", product(150, 1, 1, 200, 136, gather=True, activation="swiglu")),
    "odd columns": ("128x192", product(70, 2, 40, 129, 72, gather=True, bias=True)),
    "sums of odd columns": ("128x128", product(70, 3, 4, 135, 208, combine=True, bias=True)),
    "residual": ("256x128", product(150, 2, 2, 256, 64, combine=True, residual=True)),
    "sums by atomics": ("64x256 atomic", product(70, 3, 4, 135, 208, combine=True, bias=True)),
    "residual, by atomics": ("128x128 atomic", product(150, 2, 2, 160, 64, combine=True,
                                                       residual=True)),
    "a hot expert": ("128x128", product(200, 2, 24, 64, 64, skew="hot", dtype="float16",
                                        format="float16", act_dtype="float16")),
    "turns, gathered": ("2x128x192", product(150, 2, 3, 400, 416, gather=True, bias=True,
                                             activation="swiglu_oai")),
    "turns, one k-block": ("2x128x128", product(300, 2, 3, 270, 64, gather=True, bias=True,
                                                activation="swiglu")),
    "turns, summed": ("2x128x192", product(140, 2, 2, 400, 136, combine=True, residual=True)),
    "turns, by atomics": ("2x128x128 atomic", product(140, 2, 2, 272, 208, combine=True)),
    "turns, one tile": ("2x128x192", product(9, 1, 1, 64, 64)),
    "pairs, gathered": ("128x192-pair", product(700, 2, 4, 400, 416, gather=True, bias=True,
                                                activation="swiglu_oai")),
    "pairs, an odd number of tiles": ("128x256-pair", product(300, 1, 1, 700, 136, gather=True)),
    "pairs, summed": ("256x128-pair", product(600, 2, 2, 520, 208, combine=True, residual=True)),
    "pairs, by atomics": ("128x256-pair atomic", product(140, 2, 2, 272, 208, combine=True)),
    "pairs, of more than a group": ("128x192-pair", product(3300, 1, 1, 400, 64)),
    "pairs, one tile": ("128x256-pair", product(9, 1, 1, 64, 64)),
    "pairs in turns, gathered": ("2x128x192-pair", product(700, 2, 4, 400, 416, gather=True,
                                                           bias=True, activation="swiglu")),
    "pairs in turns, summed": ("2x128x192-pair", product(700, 2, 3, 520, 136, combine=True)),
    "float8, gathered": ("64x128", product(40, 2, 3, 140, 400, gather=True, **FLOAT8)),
    "float8, two blocks of rows": ("128x192", product(170, 1, 1, 270, 272, bias=True, **FLOAT8)),
    "float8, ahead": ("128x128", product(150, 1, 1, 136, 528, gather=True, activation="swiglu",
                                         **FLOAT8)),
    "float8, summed": ("256x128", product(200, 2, 2, 136, 144, combine=True, **FLOAT8)),
}  # fmt: skip
"""What is tested -> tile and problem."""


MXFP4, NVFP4 = ({"format": format, "packing": "tiles"} for format in FP4)
WEIGHTS8 = {"format": "fp8"}
DECODED_ON_THE_HOST = {
    "mxfp4, gathered": ("64x128", product(40, 2, 3, 144, 416, gather=True, bias=True,
                                          activation="swiglu_oai", **MXFP4)),
    "mxfp4, blocks of few rows": ("32x128", product(70, 2, 3, 144, 288, gather=True, bias=True,
                                                    activation="swiglu_oai", **MXFP4)),
    "mxfp4, blocks of 16 rows": ("16x128", product(40, 2, 3, 272, 160, gather=True,
                                                   activation="swiglu", **MXFP4)),
    "nvfp4, blocks of few rows": ("48x128", product(60, 2, 3, 272, 160, activation="swiglu_oai",
                                                    **NVFP4)),
    "mxfp4, a hot expert": ("128x128", product(70, 2, 4, 272, 160, skew="hot", **MXFP4)),
    "mxfp4, one tile": ("192x128", product(9, 1, 2, 16, 64, bias=True, **MXFP4)),
    "nvfp4, gathered": ("128x128", product(40, 2, 3, 144, 416, gather=True, activation="swiglu",
                                           **NVFP4)),
    "mxfp4, summed": ("64x128", product(33, 3, 5, 80, 64, combine=True, bias=True, residual=True,
                                        **MXFP4)),
    "nvfp4, float8 activations": ("64x128", product(33, 3, 5, 96, 208, gather=True, act_dtype=FP8,
                                                    **NVFP4)),
    "mxfp4, grouped float8 activations": ("128x128", product(33, 3, 5, 96, 160, act_dtype=FP8,
                                                            **MXFP4)),
    "mxfp4, three consumers": ("128x192", product(150, 2, 2, 272, 416, gather=True, bias=True,
                                                  activation="swiglu_oai", **MXFP4)),
    "nvfp4, three consumers": ("128x192", product(70, 2, 3, 400, 160, combine=True, **NVFP4)),
    "mxfp4, 256 rows of W": ("128x256", product(150, 2, 2, 400, 416, gather=True, bias=True,
                                                activation="swiglu_oai", **MXFP4)),
    "nvfp4, 256 rows of W": ("128x256", product(140, 2, 2, 272, 160, combine=True, bias=True,
                                                residual=True, **NVFP4)),
    "fp8, gathered": ("16x128", product(40, 2, 3, 144, 400, gather=True, bias=True,
                                        activation="swiglu_oai", **WEIGHTS8)),
    "fp8, two blocks of rows": ("64x128", product(90, 2, 2, 264, 272, activation="swiglu",
                                                  **WEIGHTS8)),
    "fp8, tiles of 80 rows": ("80x128", product(80, 2, 2, 136, 528, gather=True, bias=True,
                                                activation="swiglu", **WEIGHTS8)),
    "fp8, tiles of 96 rows": ("96x128", product(100, 2, 2, 136, 400, combine=True, **WEIGHTS8)),
    "fp8, two passes": ("128x128", product(150, 2, 2, 136, 528, activation="swiglu_oai",
                                           **WEIGHTS8)),
    "fp8, the last tile has few rows": ("128x128", product(150, 1, 1, 136, 400, gather=True,
                                                           combine=True, **WEIGHTS8)),
    "fp8, three passes": ("144x128", product(150, 2, 2, 136, 528, gather=True, bias=True,
                                             activation="swiglu", **WEIGHTS8)),
    "fp8, three passes, an odd number of k-blocks": ("144x128", product(
        100, 2, 2, 264, 400, combine=True, residual=True, **WEIGHTS8)),
    "fp8, 256 rows of W": ("48x256", product(60, 2, 3, 400, 400, gather=True, bias=True,
                                             activation="swiglu", **WEIGHTS8)),
    "fp8, 16 by 256": ("16x256", product(40, 2, 3, 400, 528, gather=True, activation="swiglu",
                                         **WEIGHTS8)),
    "fp8, 32 by 256": ("32x256", product(70, 3, 4, 272, 400, combine=True, residual=True,
                                         **WEIGHTS8)),
    "fp8, summed": ("32x128", product(70, 3, 4, 136, 208, combine=True, residual=True,
                                      **WEIGHTS8)),
    "fp8, float16": ("128x128", product(150, 2, 2, 130, 144, gather=True, dtype="float16",
                                        act_dtype="float16", **WEIGHTS8)),
    "nvfp4, float16": ("64x128", product(33, 3, 5, 80, 48, bias=True, dtype="float16",
                                         act_dtype="float16", **NVFP4)),
}  # fmt: skip
"""What is tested -> tile and problem of the kernel that decodes weights."""
HOST_CASES = [
    pytest.param(implementation, *case, id=f"{implementation.variant}, {name}")
    for implementation, cases in (
        (wgmma.IMPLEMENTATION, ON_THE_HOST), (decoded.IMPLEMENTATION, DECODED_ON_THE_HOST)
    )
    for name, case in cases.items()
]  # fmt: skip


def config_of(implementation: Implementation, words: str) -> Config:
    """The configuration of a tile, or of a tile and a way to combine rows."""
    tile, _, combine = words.partition(" ")
    values = {"tile": tile, "combine": combine or "ordered"}
    return Config({name: values[name] for name in implementation.space})


@pytest.mark.slow
@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("implementation", "tile", "problem"), HOST_CASES)
def test_a_kernel_of_tensor_cores_is_right_on_the_host(implementation, tile, problem) -> None:
    config, host = config_of(implementation, tile), cuda_fibers.Host()
    assert implementation.why_not(config, problem, host.gpu) is None
    verdict = gate.check(implementation, problem, config, host, seeds=(0,))
    assert verdict.passed, verdict.detail


@pytest.mark.slow
@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("change", [-60, 4, 60])
def test_scales_of_any_size_are_multiplied(change: int) -> None:
    """Where a scale is 2 or more, packed weights are decoded by two multiplications."""
    host, problem = cuda_fibers.Host(), product(20, 2, 3, 32, 192, **MXFP4)
    prepared = gate.prepare(ENTRY, problem, host, 1)
    scales = prepared.pristine["w_scale"]
    assert scales.dtype == "uint8" and scales.max() < 127
    scales[1:] += np.uint8(change % 256)  # the first expert stays as it is
    expected = ENTRY.oracle(problem, gate.decoded(ENTRY, problem, prepared.pristine))
    changed = replace(prepared, expected=expected)
    verdict = changed.verify(host.load(decoded.IMPLEMENTATION, problem, Config(tile="64x128")))
    assert verdict.passed, verdict.detail


@pytest.mark.slow
@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("format", "act_dtype", "packing"), CHOICES)
def test_the_naive_kernel_is_right_on_the_host(format, act_dtype, packing) -> None:
    problem = problem_of(format, act_dtype, packing, gather=True, bias=True, combine=True)
    verdict = gate.check(naive.IMPLEMENTATION, problem, Config(), cuda_fibers.Host(), seeds=(0,))
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize(
    ("implementation", "tile", "axes"),
    [
        (wgmma.IMPLEMENTATION, "2x128x192 atomic", {"combine": True}),
        (wgmma.IMPLEMENTATION, "2x128x192", FLOAT8),
        (decoded.IMPLEMENTATION, "128x192", WEIGHTS8),
        (decoded.IMPLEMENTATION, "128x256", {"act_dtype": FP8, **MXFP4}),
    ],
)
def test_tiles_whose_sums_would_spill_are_illegal(implementation, tile, axes) -> None:
    why = implementation.why_not(
        config_of(implementation, tile), product(300, 2, 3, 400, 160, **axes), HOST.gpu
    )
    assert why is not None and "registers" in why


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gptoss-up-8192", "gptoss-down-1024", "dsv3-up-64-fp8"])
def test_launches_depend_on_axes_only(name: str) -> None:
    """Offsets come as a pointer, and a persistent kernel fills the SMs."""
    problem = ENTRY.problems[name]
    config = wgmma.IMPLEMENTATION.default(problem, HOST.gpu)
    step = wgmma.IMPLEMENTATION.program(problem, config, HOST.gpu).steps[0]
    assert Pointer("offsets") in step.params
    assert step.grid == (HOST.gpu.sms, 1, 1)
    assert Int32(problem["experts"]) in step.params


PAIRED_TILES = [tile for tile in wgmma.SPACE["tile"] if tile.endswith("-pair")]


@pytest.mark.parametrize("tile", PAIRED_TILES)
@pytest.mark.parametrize("tokens", [1, 8192])
def test_pairs_are_computed_by_whole_clusters_that_run_at_the_same_time(tile, tokens) -> None:
    """Each of the two thread blocks loads half of the weights of a stage."""
    problem = product(tokens, 4, 32, 2880, 2880, combine=True)
    config = config_of(wgmma.IMPLEMENTATION, tile)
    step = wgmma.IMPLEMENTATION.program(problem, config, HOST.gpu).steps[0]
    assert step.cluster == (2, 1, 1)
    assert step.grid[0] % 2 == 0 and 0 < step.grid[0] <= HOST.gpu.sms
    (map_w,) = (p for p in step.params if isinstance(p, TensorMap) and p.tensor == "w")
    block_n = int(tile.removesuffix("-pair").split("x")[-1])
    assert map_w.box == (64, block_n // 2)


@pytest.mark.slow
@pytest.mark.parametrize("tile", PAIRED_TILES)
@pytest.mark.parametrize("name", ["gptoss-up-8192", "gptoss-down-8192"])
def test_pairs_are_multicast_and_fence_the_gpu_once(name: str, tile: str) -> None:
    """The fence belongs to the cluster's last barrier: releasing a stage needs none."""
    problem, config = ENTRY.problems[name], config_of(wgmma.IMPLEMENTATION, tile)
    if wgmma.IMPLEMENTATION.why_not(config, problem, HOST.gpu):
        pytest.skip("256 rows are not gathered")
    artifact = build(wgmma.IMPLEMENTATION.program(problem, config, HOST.gpu).steps[0].source,
                     "sm_90a")  # fmt: skip
    assert artifact.metadata["spill_bytes"] == 0
    report = inspect.inspect(artifact)
    assert report.has("UTMALDG*MULTICAST")
    assert inspect.disassemble(artifact.cubin).count("MEMBAR.ALL.GPU") == 1


def test_pairs_are_tried_where_experts_have_two_blocks_of_rows() -> None:
    """With few rows an expert no two tiles share weights."""
    pair = config_of(wgmma.IMPLEMENTATION, "128x256-pair")
    few, many = ENTRY.problems["gptoss-up-1024"], ENTRY.problems["gptoss-up-8192"]
    assert wgmma.IMPLEMENTATION.unpromising(pair, many, HOST.gpu) is None
    why = wgmma.IMPLEMENTATION.unpromising(pair, few, HOST.gpu)
    assert why is not None and "share weights" in why
