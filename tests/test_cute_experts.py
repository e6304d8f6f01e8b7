"""`moe_gemm` and `moe_mlp` in CuTe DSL: right on the host, few launches, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config, Pointer
from kernelcat.kernels.cute.moe_gemm import hopper
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_gemm import product
from kernelcat.reference.moe_mlp import layer
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

FLOAT8 = {"format": "fp8", "act_dtype": FP8}
FLOAT16 = {"dtype": "float16", "act_dtype": "float16"}
TILES = {"packing": "tiles"}
CASES = {
    "gathered": ("", product(3, 2, 4, 18, 32, gather=True, bias=True, activation="swiglu_oai")),
    "summed": ("", product(3, 2, 4, 17, 48, combine=True, bias=True, residual=True)),
    "no columns of A": ("", product(3, 1, 2, 8, 0, gather=True, bias=True, activation="swiglu")),
    "float8": ("", product(2, 1, 2, 130, 16, **FLOAT8)),
    "float8 beside 16 bits": ("", product(2, 1, 2, 8, 144, gather=True, format="fp8")),
    "mxfp4, float16": ("", product(2, 2, 2, 9, 96, format="mxfp4", combine=True, **FLOAT16)),
    "mxfp4 in tiles": ("", product(1, 2, 2, 32, 96, format="mxfp4", **TILES)),
    "nvfp4 in tiles, float8": (
        "", product(1, 2, 2, 16, 144, format="nvfp4", act_dtype=FP8, **TILES)
    ),
    "nvfp4": ("", product(2, 2, 3, 10, 48, format="nvfp4", skew="hot", activation="swiglu")),
    "whole layer": ("", layer(3, 2, 4, 32, 16, bias=True, residual=True)),
    "whole layer, mxfp4": ("", layer(1, 2, 3, 32, 32, format="mxfp4", activation="swiglu_oai",
                                     dtype="float16", act_dtype="float16")),
    "tensor cores, gathered": (
        "64x128", product(37, 2, 2, 120, 80, gather=True, bias=True, activation="swiglu_oai")
    ),
    "tensor cores, odd columns": (
        "128x128", product(2, 1, 34, 129, 80, gather=True, bias=True, format="float16", **FLOAT16)
    ),
    "tensor cores, summed": ("128x192", product(33, 2, 2, 135, 64, combine=True, bias=True,
                                                residual=True)),
    "tensor cores, aligned sums": ("64x128", product(5, 5, 5, 16, 64, combine=True)),
    "tensor cores, a hot expert": ("256x128", product(100, 1, 9, 24, 80, gather=True, skew="hot")),
    "tensor cores, float8, gathered": (
        "64x128", product(12, 2, 2, 140, 144, gather=True, activation="swiglu", **FLOAT8)
    ),
    "tensor cores, float8, three groups": ("128x192", product(70, 1, 1, 200, 144, **FLOAT8)),
}  # fmt: skip
"""What is tested -> tile (none for the naive kernel) and problem."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cute_experts.py"))],
        input=json.dumps({name: [tile, p.entry, p.values] for name, (tile, p) in CASES.items()}),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernels_own_source_is_right_on_the_host(verdicts, name: str) -> None:
    passed, detail, _ = verdicts[name]
    assert passed, detail


# ---- launches and machine code -------------------------------------------------------------------

H200 = gpu.find("h200")
WGMMA = catalog.implementation("moe_gemm", "cute", "wgmma")
GROUPED = catalog.implementation("moe_mlp", "cute", "grouped")


def test_listing_the_kernels_does_not_import_the_dsl() -> None:
    code = "import sys, kernelcat.kernels.cute.moe_mlp; print('cutlass' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["gptoss-up-64", "gptoss-down-8192", "dsv3-up-1024-fp8"])
def test_candidates_are_few_and_fill_shared_memory(name: str) -> None:
    problem = catalog.entry("moe_gemm").problems[name]
    configs = list(WGMMA.configs(problem, H200))
    assert WGMMA.default(problem, H200) in configs and len(configs) <= 8
    for config in configs:
        product, *_ = WGMMA.program(problem, config, H200).steps
        ctas = product.grid[0] // H200.sms
        assert product.grid == (ctas * H200.sms, 1, 1) and Pointer("offsets") in product.params
        plan = hopper.Plan.of(config, problem)
        assert ctas * plan.shared_bytes(plan.stages) > 0.8 * H200.shared_bytes


def test_kernels_are_compiled_anew_for_few_sizes() -> None:
    """Sizes are parameters, so that fuzzing and other models do not compile again."""
    sources = {
        WGMMA.program(product(tokens, 2, experts, n, 64), Config(tile="64x128", stages=4), H200)
        .steps[0].source
        for tokens, experts, n in ((1, 2, 8), (70, 24, 264), (9, 32, 128))
    }  # fmt: skip
    assert len(sources) == 1


COMPILED = [
    ("gptoss-up-1024", "128x256", 4),
    ("dsv3-up-8192-fp8", "128x192", 5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile", "stages"), COMPILED)
def test_tiles_that_need_the_most_registers_do_not_spill(name: str, tile: str, stages: int) -> None:
    problem = catalog.entry("moe_gemm").problems[name]
    config = Config(tile=tile, stages=stages)
    assert WGMMA.why_not(config, problem, H200) is None
    product, *_ = WGMMA.program(problem, config, H200).steps
    artifact = jit.build(product.source, "sm_90a")
    report = inspect.inspect(artifact)
    assert artifact.metadata["spill_bytes"] == 0
    assert report.has("LDGSTS*128") == problem["gather"]
    assert report.has("USETMAXREG") == (product.block == 384)


@pytest.mark.parametrize(
    ("tokens", "axes", "num_launches"),
    [(64, {}, 4), (1024, {}, 5), (64, {"format": "fp8", "act_dtype": FP8}, 6)],
)
def test_a_layer_takes_few_launches(tokens: int, axes: dict, num_launches: int) -> None:
    """One or two to route, two products, the sum, and two that quantize to float8."""
    problem = layer(tokens, 4, 32, 2880, 2880, **axes)
    config = GROUPED.default(problem, H200)
    assert GROUPED.why_not(config, problem, H200) is None
    program = GROUPED.program(problem, config, H200)
    assert len(program.steps) == num_launches
    known = {tensor.name for tensor in catalog.entry("moe_mlp").tensors} | program.workspaces.keys()
    params = [param for step in program.steps for param in step.params]
    assert {param.tensor for param in params if isinstance(param, Pointer)} <= known


def test_a_layer_in_4_bits_says_which_product_is_not_served() -> None:
    problem = layer(64, 4, 32, 2880, 2880, format="mxfp4")
    reason = GROUPED.why_not(GROUPED.default(problem, H200), problem, H200)
    assert reason and "first product" in reason and "mxfp4" in reason
