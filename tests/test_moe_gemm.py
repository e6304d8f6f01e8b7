"""moe_gemm: every format against the second formulation, and what its programs launch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from formulations.experts import moe_gemm

from kernelcat.catalog.spec import Problem
from kernelcat.reference._experts import ACTIVATIONS, DTYPES, FORMATS, FP4, FP8, PACKINGS
from kernelcat.reference.moe_gemm import ENTRY, product
from kernelcat.runtime import gpu
from kernelcat.verify import gate

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
