"""Oracles against independent formulations, in float64 or element by element."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat import catalog, check, dtypes, fuzz, gpu
from kernelcat.spec import Problem

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)


def gemm(problem: Problem, a, b, bias=None):
    """Sums of outer products over k, in float64."""
    d = np.zeros((problem["M"], problem["N"]))
    for k in range(problem["K"]):
        d += np.outer(a[:, k].astype("float64"), b[:, k].astype("float64"))
    return d if bias is None else d + bias


def tma_copy(problem: Problem, src):
    """Element by element."""
    out = np.empty((problem["rows"], problem["cols"]), src.dtype)
    for row in range(problem["rows"]):
        for col in range(problem["cols"]):
            out[row, col] = src[row, col]
    return out


INDEPENDENT = {"gemm": gemm, "tma_copy": tma_copy}


def test_every_entry_has_an_independent_formulation() -> None:
    assert set(INDEPENDENT) == set(catalog.names())


@pytest.mark.parametrize("name", catalog.names())
def test_the_oracle_agrees_with_it(name: str) -> None:
    entry = catalog.entry(name)

    @settings(max_examples=40, deadline=None)
    @given(problem=fuzz.problems(entry, limit=40), seed=st.integers(0, 5))
    def run(problem: Problem, seed: int) -> None:
        prepared = check.prepare(entry, problem, HOST, seed)
        inputs = {
            t.name: dtypes.decode(prepared.buffers[t.name].view, t.dtype_of(problem))
            for t in entry.inputs
            if t.present(problem)
        }
        (output,) = entry.outputs
        expected = prepared.expected[output.name]
        if expected.dtype != np.float32:
            expected = dtypes.decode(expected, output.dtype_of(problem))
        other = INDEPENDENT[name](problem, **inputs)
        assert np.allclose(expected, other, rtol=1e-5, atol=1e-5)

    run()


@pytest.mark.parametrize(
    ("problem", "flops", "moved"),
    [
        (Problem.of("gemm", M=3, N=5, K=7, dtype="float16", bias=False), 210, 2 * (21 + 35 + 15)),
        (Problem.of("gemm", M=3, N=5, K=7, dtype="float16", bias=True), 210, 2 * (21 + 35 + 20)),
        (
            Problem.of("tma_copy", rows=3, cols=5, src_stride=8, dst_stride=5, dtype="float32"),
            0,
            2 * 4 * 15,
        ),
    ],
    ids=str,
)
def test_the_least_work_is_counted(problem: Problem, flops: int, moved: int) -> None:
    entry = catalog.entry(problem.entry)
    assert (entry.flops(problem), entry.bytes_moved(problem)) == (flops, moved)


def test_gemm_inputs_make_a_lost_slice_of_k_visible() -> None:
    """D has variance about 1 whatever K is, far above the tolerance."""
    entry = catalog.entry("gemm")
    for k in (64, 1024):
        problem = entry.problem(M=64, N=64, K=k, dtype="bfloat16", bias=False)
        d = check.prepare(entry, problem, HOST).expected["d"]
        assert 0.8 < float(np.std(d)) < 1.2
