"""`rms_norm`: its oracle against other entries, its tolerances, CUDA kernels on the host."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_host import HostCuda

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import gpu
from kernelcat.verify import gate

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
ENTRY = catalog.entry("rms_norm")
REGISTERS = catalog.implementation("rms_norm", "cuda", "registers")
OUTPUTS = {"same": ("y",), "fp8": ("q", "scale"), "nvfp4": ("codes", "block_scale")}


def problem_of(m: int, n: int, out_format: str = "same", **axes: bool | str) -> Problem:
    return ENTRY.problem(M=m, N=n, **{"dtype": "bfloat16", "out_format": out_format, **axes})


def test_the_oracle_of_nvfp4_is_that_of_nvfp4_quantize_with_its_norm() -> None:
    prepared = gate.prepare(ENTRY, problem_of(9, 96, "nvfp4"), HOST)
    problem = catalog.entry("nvfp4_quantize").problem(M=9, K=96, dtype="bfloat16", rms_norm=True)
    expected = catalog.entry("nvfp4_quantize").oracle(problem, prepared.arrays)
    assert np.array_equal(prepared.expected["codes"], expected["q"])
    assert np.array_equal(prepared.expected["block_scale"], expected["scale"])


def test_the_oracle_of_fp8_is_fp8_quantize_of_the_result_up_to_its_rounding() -> None:
    same, fp8 = (gate.prepare(ENTRY, problem_of(9, 300, f), HOST) for f in ("same", "fp8"))
    quantize = catalog.entry("fp8_quantize")
    problem = quantize.problem(M=9, K=300, dtype="bfloat16", block="1x128")
    expected = quantize.oracle(problem, {"x": dtypes.encode(same.expected["y"], "bfloat16")})
    assert np.allclose(fp8.expected["scale"], expected["scale"], rtol=2**-8)
    q = dtypes.decode(expected["q"], "float8_e4m3fn")
    assert np.allclose(fp8.expected["q"], q, rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_have_a_mean_square_of_one(residual: bool) -> None:
    problem = problem_of(40, 1000, residual=residual)
    prepared = gate.prepare(ENTRY, problem, HOST)
    weight = dtypes.decode(prepared.arrays["weight"], "bfloat16")
    x = (
        prepared.expected["residual"]
        if residual
        else dtypes.decode(prepared.arrays["x"], "bfloat16")
    )
    unit = (prepared.expected["y"] / weight).astype("float64")
    power = (x.astype("float64") ** 2).mean(axis=1)
    assert np.allclose((unit**2).mean(axis=1), power / (power + 1e-5), rtol=1e-5)


@pytest.mark.parametrize("out_format", ["same", "fp8"])
@pytest.mark.parametrize("fault", ["eps", "weight", "residual"])
def test_faults_exceed_the_tolerances(out_format: str, fault: str) -> None:
    """An eps, a column of the weight, or a residual that is left out."""
    prepared = gate.prepare(ENTRY, problem_of(60, 300, out_format, residual=True), HOST)
    arrays = {n: dtypes.decode(prepared.arrays[n], "bfloat16") for n in ("x", "weight", "residual")}
    eps = 1e-12 if fault == "eps" else 1e-5
    if fault == "weight":
        arrays["weight"] = np.roll(arrays["weight"], 1)
    if fault == "residual":
        arrays["residual"] *= 0
    wrong = ENTRY.oracle(problem_of(60, 300, out_format, residual=True, eps=eps), arrays)
    for name in OUTPUTS[out_format]:
        tensor = next(t for t in ENTRY.outputs if t.name == name)
        view = prepared.arrays[name]
        view[...] = dtypes.encode(wrong[name], tensor.dtype_of(prepared.problem))
        if fault != "eps" or name == "scale" or out_format == "same":
            assert not prepared._compare(tensor, view).passed


# ---- CUDA on the host ---------------------------------------------------------------------------

# Scales in float32 show the order of the sum, but not in every row: hence cases of several rows.
CASES = {
    "naive": ("naive", {}, (7, 333), {"residual": True}),
    "naive, fp8": ("naive", {}, (5, 300), {"out_format": "fp8"}),
    "naive, nvfp4": ("naive", {}, (5, 208), {"out_format": "nvfp4", "residual": True}),
    "a warp for each row": ("registers", {"threads": 32, "rows": 4}, (7, 520), {"residual": True}),
    "a warp for each row, eight vectors": (
        "registers", {"threads": 32, "rows": 2}, (15, 1800),
        {"dtype": "float16", "out_format": "fp8"},
    ),
    "one vector for each thread": ("registers", {"threads": 32, "rows": 1}, (2, 100), {}),
    "rows that are no multiple of 16 bytes": (
        "registers", {"threads": 64, "rows": 2}, (3, 1001), {"residual": True},
    ),
    "rows that are no multiple of 16 bytes, fp8": (
        "registers", {"threads": 32, "rows": 2}, (3, 501),
        {"residual": True, "out_format": "fp8"},
    ),
    "fp8": ("registers", {"threads": 128, "rows": 2}, (15, 2880), {"out_format": "fp8"}),
    "nvfp4": (
        "registers", {"threads": 64, "rows": 2}, (3, 1040),
        {"residual": True, "out_format": "nvfp4", "dtype": "float16"},
    ),
    "more sums than lanes": (
        "registers", {"threads": 512, "rows": 1}, (8, 16000),
        {"residual": True, "out_format": "fp8"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def device() -> HostCuda:
    return HostCuda()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", CASES)
def test_a_cuda_kernel_gives_the_bits_of_the_oracle(name: str, device: HostCuda) -> None:
    variant, config, (m, n), axes = CASES[name]
    implementation = catalog.implementation("rms_norm", "cuda", variant)
    problem = problem_of(m, n, **axes)
    assert implementation.why_not(Config(config), problem, device.gpu) is None
    prepared = gate.prepare(ENTRY, problem, device)
    verdict = prepared.verify_run(
        device.load(implementation, problem, Config(config))(prepared.arrays)
    )
    assert verdict.passed, verdict.detail
    for tensor in ENTRY.outputs:
        if tensor.present(problem):
            expected = prepared.expected[tensor.name]
            if expected.dtype == np.float32:
                expected = dtypes.encode(expected, tensor.dtype_of(problem))
            assert np.array_equal(prepared.arrays[tensor.name], expected)


def test_a_row_has_vectors_enough() -> None:
    """Every legal configuration holds a row, and rows that are too long are refused."""
    for n in (1, 8, 256, 257, 2880, 7168, 16384):
        for config in REGISTERS.configs(problem_of(400, n), HOST.gpu):
            constants = REGISTERS.program(problem_of(400, n), config, HOST.gpu).steps[0].source
            *_, threads, rows, unroll, _ = constants.kernel.rstrip(">").split(", ")
            assert int(threads) * int(unroll) * 8 >= n
            assert int(threads) * int(rows) <= 1024
    longest = problem_of(1, 70000)
    assert not list(REGISTERS.configs(longest, HOST.gpu))
    assert "N at most" in str(REGISTERS.why_not(Config(threads=1024, rows=1), longest, HOST.gpu))
