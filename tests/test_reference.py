"""Oracles agree with independent formulations; least work, inputs and tolerances are sound."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from formulations import INDEPENDENT
from formulations.float8 import FP8
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import EXACT, Entry, Problem, Tolerance
from kernelcat.reference.kv_write import appended
from kernelcat.reference.out_router import routed
from kernelcat.reference.qkv_rope_write import projected
from kernelcat.runtime import gpu
from kernelcat.verify import fuzz, gate

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
LIMITS = {
    "flashmla": 8, "fp8_gemm": 270, "fp8_quantize": 140, "fp8_swiglu": 270, "mla_kv_write": 12,
    "moe_gemm": 200, "moe_mlp": 33, "nvfp4_dequantize": 64, "nvfp4_matmul": 128,
    "nvfp4_quantize": 64, "paged_attn": 8,
}  # fmt: skip
"""The largest sizes that are drawn, 40 for other entries: more than a block where there are blocks,
few where the formulation is slow."""
CLOSE = Tolerance(1e-5, 1e-5)
"""Tolerance for results that are not rounded to 8 bits."""


def test_every_complete_entry_has_an_independent_formulation() -> None:
    assert set(catalog.complete()) <= set(INDEPENDENT) <= set(catalog.names())


def in_float64(array):
    """A float32 array in float64; others as they are.

    Formulas are compared in float64: in float32 a score of 40 is off by 4e-6.
    """
    return array.astype("float64") if array.dtype == np.float32 else array


def check(entry: Entry, problem: Problem, seed: int) -> None:
    """Compare every output of the oracle with that of the independent formulation."""
    prepared = gate.prepare(entry, problem, HOST, seed)
    inputs = gate.decoded(entry, problem, prepared.arrays)
    independent = INDEPENDENT[entry.name](problem, **inputs)
    for output in filter(lambda tensor: tensor.present(problem), entry.outputs):
        expected, dtype = prepared.expected[output.name], output.dtype_of(problem)
        assert expected.shape == output.shape_of(problem)
        if expected.dtype != np.float32:
            expected = dtypes.decode(expected, dtype)
        # A value near the border between two values of 8 bits may be rounded to either of them, so
        # the entry's tolerance serves, unless the entry is exact.
        is_rounded = isinstance(output.tolerance, Tolerance) or dtypes.itemsize(dtype) == 1
        is_exact = entry.tolerance_of(problem, output) == EXACT
        allowed = entry.tolerance_of(problem, output) if is_rounded or is_exact else CLOSE
        if allowed is CLOSE:
            again = entry.oracle(problem, inputs)[output.name]
            assert np.array_equal(expected, again, equal_nan=True)
            precise = {n: in_float64(array) for n, array in inputs.items()}
            expected = entry.oracle(problem, precise)[output.name]
        assert np.allclose(
            expected,
            independent[output.name],
            rtol=allowed.relative,
            atol=allowed.absolute,
            # NaN stays in slots that are not written, and exact entries define results of NaN.
            equal_nan=output.updated or is_exact,
        )


@pytest.mark.parametrize("name", sorted(INDEPENDENT))
def test_an_oracle_agrees_with_its_independent_formulation(name: str) -> None:
    entry = catalog.entry(name)

    # Few random values of many choice axes go together.
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(problem=fuzz.problems(entry, limit=LIMITS.get(name, 40)), seed=st.integers(0, 5))
    def run(problem: Problem, seed: int) -> None:
        check(entry, problem, seed)

    run()


SMALL = {
    "out_router": (
        routed(5, 72, 40, 7, bias=True, router_bias=True),
        routed(3, 33, 70, dtype="float16", eps=1e-6),
        routed(40, 24, 56, 9, dtype="float16"),
    ),
    "qkv_rope_write": (
        projected(3, 3, 2, 64, 72, bias=True, context=40, q_len=2, page_size=1),
        projected(2, 2, 1, 64, 33, kv_dtype=FP8, has_scales=True, page_scales=True,
                  lengths="ragged", page_size=32),
        projected(2, 1, 2, 128, 40, style="interleaved", rotary_dim=64, dtype="float16",
                  kv_dtype="float16", has_scales=True, page_size=64, eps=1e-6),
        projected(2, 1, 1, 256, 24, dtype="float16", kv_dtype=FP8, page_size=128),
        projected(4, 2, 1, 64, 40, rotary_dim=0, page_size=16, q_len=3, lengths="skewed"),
    ),
}  # fmt: skip
"""Problems with every value of every choice axis."""


@pytest.mark.parametrize("name", SMALL)
def test_small_problems_have_every_choice(name: str) -> None:
    for axis in catalog.entry(name).axes:
        values = {problem[axis.name] for problem in SMALL[name]}
        assert values >= set(axis.values or ()), axis.name


@pytest.mark.parametrize("problem", [p for problems in SMALL.values() for p in problems], ids=str)
def test_an_oracle_agrees_at_every_choice(problem: Problem) -> None:
    check(catalog.entry(problem.entry), problem, 0)


def problem_of(name: str, **axes: int | str | bool) -> Problem:
    return catalog.entry(name).problem(**axes)


@pytest.mark.parametrize(
    ("problem", "flops", "moved"),
    [
        (problem_of("gemm", M=3, N=5, K=7, dtype="float16"), 210, 2 * (21 + 35 + 15)),
        (problem_of("gemm", M=3, N=5, K=7, dtype="float16", bias=True), 210, 2 * (21 + 35 + 20)),
        (
            problem_of("gemm", M=3, N=6, K=7, dtype="float16", activation="swiglu", residual=True),
            252,
            2 * (21 + 42 + 9 + 9),
        ),
        (problem_of("multicast_gemm", M=3, N=5, K=7, dtype="float16"), 210, 2 * (21 + 35 + 15)),
        (
            problem_of("fp8_gemm", M=3, N=130, K=300, dtype=FP8),
            2 * 3 * 130 * 300,
            3 * 300 + 130 * 300 + 2 * 3 * 130 + 4 * (3 * 3 + 2 * 3),
        ),
        (
            problem_of("fp8_quantize", M=3, K=300, dtype="float16", block="1x128"),
            900,
            3 * 900 + 4 * 9,
        ),
        (
            problem_of("fp8_quantize", M=130, K=300, dtype="float16", block="128x128"),
            39000,
            3 * 39000 + 4 * 6,
        ),
        (
            problem_of("fp8_swiglu", M=3, N=300, dtype="float16"),
            6 * 900,
            2 * 900 + 450 + 4 * 2 * 3,
        ),
        (
            appended(3, 4, 2, 64, rotary_dim=32, kv_dtype=FP8),
            3 * 6 * 16 * (4 + 2),
            3 * 64 * (2 * 2 * 4 + 3 * 2 * 2) + 4 * 32,
        ),
        (
            problem_of("tma_copy", rows=3, cols=5, src_stride=8, dst_stride=5, dtype="float32"),
            0,
            2 * 4 * 15,
        ),
    ],
    ids=str,
)
def test_the_least_work_is_counted(problem: Problem, flops: int, moved: int) -> None:
    entry = catalog.entry(problem.entry)
    assert (entry.flops(problem), entry.bytes_moved(problem)) == (flops, moved)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemm", "bfloat16"), ("multicast_gemm", "bfloat16"), ("fp8_gemm", FP8)]
)
def test_a_missing_slice_of_k_would_show(name: str, dtype: str) -> None:
    """D has a variance of about 1 for every K, which is far above the tolerance."""
    entry = catalog.entry(name)
    for k in (64, 1024):
        problem = entry.problem(M=128, N=256, K=k, dtype=dtype)
        d = gate.prepare(entry, problem, HOST).expected["d"]
        assert 0.8 < float(np.std(d)) < 1.2


def test_the_scale_of_another_block_makes_errors_beyond_the_tolerance() -> None:
    entry = catalog.entry("fp8_gemm")
    problem = entry.problem(M=64, N=256, K=2048, dtype=FP8)
    prepared = gate.prepare(entry, problem, HOST)
    tolerance = entry.tolerance_of(problem)
    values = {
        t.name: dtypes.decode(prepared.arrays[t.name], t.dtype_of(problem)) for t in entry.inputs
    }
    for name, axis in (("a_scale", 0), ("a_scale", 1), ("b_scale", 0), ("b_scale", 1)):
        wrong = values | {name: np.roll(values[name], 1, axis)}
        error = abs(entry.oracle(problem, wrong)["d"] - prepared.expected["d"])
        allowed = tolerance.absolute + tolerance.relative * abs(prepared.expected["d"])
        assert (error > allowed).mean() > 0.5


def test_fp8_gemm_multiplies_the_results_of_fp8_quantize() -> None:
    """The product of quantized operands is near the product of the unquantized ones."""
    random = np.random.default_rng(0)
    m, n, k = 40, 200, 300
    quantize, multiply = catalog.entry("fp8_quantize"), catalog.entry("fp8_gemm")
    arrays, exact = {}, []
    for name, rows, block in (("a", m, "1x128"), ("b", n, "128x128")):
        x = random.standard_normal((rows, k), dtype=np.float32) * k**-0.25
        x = dtypes.encode(x, "bfloat16")
        problem = quantize.problem(M=rows, K=k, dtype="bfloat16", block=block)
        out = quantize.oracle(problem, {"x": x})
        arrays |= {name: dtypes.decode(out["q"], FP8), f"{name}_scale": out["scale"]}
        exact.append(dtypes.decode(x, "bfloat16"))
    d = multiply.oracle(multiply.problem(M=m, N=n, K=k, dtype=FP8), arrays)["d"]
    assert np.abs(d - exact[0] @ exact[1].T).max() < 0.25
    assert np.std(d - exact[0] @ exact[1].T) < 0.05
