"""qkv_rope_write: its CUDA kernel on the CPU, and its oracle against a literal formulation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cuda_fibers import COMPILER, Host
from formulations.caches import kv_write

from kernelcat import dtypes
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.qkv_rope_write import NAIVE
from kernelcat.reference.qkv_rope_write import ENTRY, FP8, PROJECTIONS, projected
from kernelcat.runtime import gpu
from kernelcat.verify import gate

NUMPY = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
CASES = {
    "biases": projected(3, 3, 2, 64, 72, bias=True, context=40, q_len=2),
    "float8 with scales of pages": projected(
        2, 2, 1, 64, 33, kv_dtype=FP8, has_scales=True, page_scales=True, lengths="ragged"
    ),
    "interleaved, half of a head": projected(
        2, 1, 2, 128, 40, style="interleaved", rotary_dim=64, dtype="float16", kv_dtype="float16"
    ),
    "no queries, no RoPE, no columns": projected(1, 0, 1, 64, 0, rotary_dim=0, bias=True),
}


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", CASES)
def test_the_naive_kernel_is_right_on_the_host(name: str) -> None:
    every_block = Host(max_blocks=1 << 30)  # the grid has a thread block for each head
    verdict = gate.check(NAIVE, CASES[name], Config(), every_block, seeds=(0,))
    assert verdict.passed, verdict.detail


def formulated(problem: Problem, x, norm_weight, **arrays):
    """Token by token and head by head, in float64 where the definition rounds nothing."""
    results = {}
    for name, axis in PROJECTIONS.items():
        z = np.zeros((problem["tokens"], problem[axis], problem["head_dim"]), "float32")
        for t, row in enumerate(x):
            a = row.astype("float64")
            root = np.sqrt((a * a).sum() / max(len(a), 1) + problem["eps"])
            a = dtypes.decode(dtypes.encode((a / root * norm_weight).astype("float32"),
                                            problem["dtype"]), problem["dtype"])  # fmt: skip
            for head in range(problem[axis]):
                for dim in range(problem["head_dim"]):
                    z[t, head, dim] = arrays[f"w{name}"][head, dim].astype("float64") @ a
        results[name] = z + arrays[f"b{name}"] if problem["bias"] else z
    rest = {name: array for name, array in arrays.items() if name[0] not in "wb" or "_" in name}
    return kv_write(problem, **results, **rest)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_agrees_with_a_literal_formulation(name: str) -> None:
    problem = CASES[name]
    prepared = gate.prepare(ENTRY, problem, NUMPY, 3)
    inputs = gate.decoded(ENTRY, problem, prepared.arrays)
    independent = formulated(problem, **inputs)
    for output in ENTRY.outputs:
        tolerance = ENTRY.tolerance_of(problem, output)
        expected = ENTRY.oracle(problem, inputs)[output.name]
        allowed = tolerance.absolute + tolerance.relative * np.abs(expected)
        difference = np.abs(expected - independent[output.name])
        assert (difference <= allowed)[~np.isnan(expected)].all()
        assert (np.isnan(expected) == np.isnan(independent[output.name])).all()
        assert not difference.size or np.nanmedian(difference) < 1e-5
