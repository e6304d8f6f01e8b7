"""The FP4 kernels in CUDA: corners of their spaces compile, and launches match declarations."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Float32, Int32
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.reference.nvfp4_quantize import rows
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

H200 = gpu.find("h200")
ALL = {"rms_norm": True, "hadamard": True, "stochastic": True, "scale_layout": "swizzled"}
WEIGHTS = catalog.entry("nvfp4_dequantize").named("7168x18432-nvfp4-swizzled")
CORNERS = [
    ("naive", rows(64, 4096, "mxfp4", **ALL), Config()),
    ("vectorized", rows(4096, 4096), Config(threads=512, unroll=4)),
    ("vectorized", rows(4096, 4096, "mxfp4", **ALL | {"rms_norm": False}),
     Config(threads=128, unroll=4)),
    ("vectorized", rows(64, 32768, **ALL), Config(threads=512, unroll=4)),
    ("naive", WEIGHTS, Config()),
    ("vectorized", WEIGHTS, Config(unroll=8)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "problem", "config"), CORNERS)
def test_a_corner_compiles_without_spills_and_gets_the_parameters_it_declares(
    variant: str, problem: Problem, config: Config
) -> None:
    implementation = catalog.implementation(problem.entry, "cuda", variant)
    assert implementation.why_not(config, problem, H200) is None
    (step,) = implementation.program(problem, config, H200).steps
    artifact = build(step.source, H200.arch)
    assert artifact.metadata["spill_bytes"] == 0
    assert step.block * artifact.metadata["registers"] <= 1 << 16
    declared_bytes = [4 if isinstance(param, (Int32, Float32)) else 8 for param in step.params]
    assert inspect.parameters(artifact.cubin, artifact.kernel) == declared_bytes


def test_a_row_must_fit_in_registers() -> None:
    vectorized = catalog.implementation("nvfp4_quantize", "cuda", "vectorized")
    problem = rows(4, 65536, rms_norm=True)
    for config in vectorized.whole_space():
        assert "K at most" in (vectorized.why_not(config, problem, H200) or "")
    naive = catalog.implementation("nvfp4_quantize", "cuda", "naive")
    assert naive.why_not(Config(), problem, H200) is None
