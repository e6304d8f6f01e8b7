"""`fp8_swiglu`: its oracle against `gemm` and `fp8_quantize`, its tolerances, its CUDA kernels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")
HOST = SimpleNamespace(xp=np, gpu=H200, synchronize=lambda: None)
FP8 = "float8_e4m3fn"
ENTRY = catalog.entry("fp8_swiglu")
FUSED = catalog.implementation("fp8_swiglu", "cuda", "fused")


def problem_of(m: int, n: int, dtype: str = "bfloat16") -> Problem:
    return ENTRY.problem(M=m, N=n, dtype=dtype)


def test_the_oracle_agrees_with_gemm_and_fp8_quantize_up_to_rounding_between_them() -> None:
    m, n, k = 40, 600, 64
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((rows, k), dtype=np.float32) * k**-0.25 for rows in (m, n))
    multiply, quantize = catalog.entry("gemm"), catalog.entry("fp8_quantize")

    def product(activation: str) -> np.ndarray:
        problem = multiply.problem(M=m, N=n, K=k, dtype="bfloat16", activation=activation)
        return dtypes.encode(multiply.oracle(problem, {"a": a, "b": b})["d"], "bfloat16")

    x = dtypes.decode(product("none"), "bfloat16")
    fused = ENTRY.oracle(problem_of(m, n), {"x": x})
    problem = quantize.problem(M=m, K=n // 2, dtype="bfloat16", block="1x128")
    separate = quantize.oracle(problem, {"x": product("swiglu")})
    assert fused["scale"].shape == separate["scale"].shape
    assert np.allclose(fused["scale"], separate["scale"], rtol=2**-6)
    assert np.allclose(fused["q"], dtypes.decode(separate["q"], FP8), rtol=2**-3, atol=2**-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_in_float64_changes_fewer_than_one_value_in_a_thousand(dtype: str) -> None:
    """q computed in float64 nearly always equals q of the oracle."""
    problem = problem_of(64, 1024, dtype)
    prepared = gate.prepare(ENTRY, problem, HOST)
    x = dtypes.decode(prepared.arrays["x"], dtype).astype("float64")
    y = x[:, ::2] * x[:, 1::2] * np.exp(-np.logaddexp(0, -x[:, ::2]))
    inverse = 1 / prepared.expected["scale"].astype("float64").T.repeat(128, axis=1)
    q = dtypes.decode(dtypes.encode((y * inverse).astype("float32"), FP8), FP8)
    assert (q != prepared.expected["q"]).mean() < 1e-3


def test_swapped_gates_and_shifted_scales_exceed_the_tolerances() -> None:
    problem = problem_of(64, 1024)
    prepared = gate.prepare(ENTRY, problem, HOST)
    x, expected = dtypes.decode(prepared.arrays["x"], "bfloat16"), prepared.expected
    q, scale = ENTRY.outputs
    swapped = ENTRY.oracle(problem, {"x": x.reshape(64, -1, 2)[:, :, ::-1].reshape(64, -1)})
    wrong = [(q, swapped["q"]), (scale, swapped["scale"])]
    wrong += [(scale, np.roll(expected["scale"], 1, axis)) for axis in (0, 1)]
    for tensor, values in wrong:
        tolerance = tensor.tolerance or ENTRY.tolerance_of(problem)
        allowed = tolerance.absolute + tolerance.relative * abs(expected[tensor.name])
        assert (abs(values - expected[tensor.name]) > allowed).mean() > 0.5


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.slow
def test_the_largest_unroll_compiles_without_spills(arch: str) -> None:
    chosen = next(c for c in FUSED.configs(problem_of(4096, 4096), H200) if c["unroll"] == 8)
    (step,) = FUSED.program(problem_of(4096, 4096, "float16"), chosen, H200).steps
    assert build(step.source, arch).metadata["spill_bytes"] == 0


@pytest.mark.parametrize(
    ("m", "n"), [(1, 2), (2, 8), (3, 256), (17, 258), (300, 522), (1 << 24, 256)]
)
def test_every_row_and_column_is_covered(m: int, n: int) -> None:
    legal = list(FUSED.configs(problem_of(m, n), H200))
    assert FUSED.default(problem_of(m, n), H200) in legal
    for chosen in legal:
        (step,) = FUSED.program(problem_of(m, n), chosen, H200).steps
        rows = chosen["num_warps"] * chosen["unroll"]
        assert step.grid[0] == -(-m // rows) * -(-n // 256)


@pytest.mark.parametrize(("m", "n"), [(0, 256), (5, 0)])
def test_an_empty_problem_launches_nothing(m: int, n: int) -> None:
    for implementation in catalog.in_language("fp8_swiglu", "cuda"):
        for chosen in implementation.configs(problem_of(m, n), H200):
            assert implementation.program(problem_of(m, n), chosen, H200).steps == ()
