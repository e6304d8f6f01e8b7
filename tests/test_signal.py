"""Signal to quantization noise: the gate rejects errors that no single element shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from kernelcat import catalog, dtypes
from kernelcat.catalog.digest import digest
from kernelcat.cli import main
from kernelcat.reference.nvfp4_matmul import DTYPES, FORMATS, LEAST_SQNR, PACKINGS
from kernelcat.store import Measurement, Store
from kernelcat.verify import gate

HOST = SimpleNamespace(xp=np, synchronize=lambda: None)
ENTRY = catalog.entry("nvfp4_matmul")


def judge(prepared: gate.Prepared, d: np.ndarray) -> gate.Verdict:
    def write() -> None:
        kind = ENTRY.outputs[0].dtype_of(prepared.problem)
        prepared.arrays["d"][...] = dtypes.encode(d, kind)

    return prepared.verify(lambda arrays: write)


def prepared(m: int, n: int, k: int, seed: int = 0, **axes) -> gate.Prepared:
    axes = {"dtype": "bfloat16", "format": "nvfp4", **axes}
    return gate.prepare(ENTRY, ENTRY.problem(M=m, N=n, K=k, **axes), HOST, seed)


def test_the_ratio_is_in_decibels() -> None:
    exact = np.float32([3, -4])
    assert gate.sqnr_db(exact * np.float32(1.125), exact) == pytest.approx(18.062, abs=1e-3)
    assert gate.sqnr_db(exact, exact) is gate.sqnr_db(exact, 0 * exact) is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_right_result_keeps_its_signal(packing: str, dtype: str, format: str) -> None:
    case = prepared(64, 128, 576, dtype=dtype, format=format, packing=packing)
    verdict = judge(case, case.expected["d"])
    assert verdict.passed, verdict.detail
    assert verdict.sqnr_db is not None and LEAST_SQNR[format] < verdict.sqnr_db < 21


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu"])
def test_the_right_result_keeps_its_signal_after_an_activation(activation: str) -> None:
    case = prepared(64, 256, 512, activation=activation, bias=True)
    verdict = judge(case, case.expected["d"])
    assert verdict.passed and verdict.sqnr_db is not None and 15 < verdict.sqnr_db < 30


def product_of_small_weights() -> gate.Prepared:
    """A product whose only row of weights has subnormal scales, so that D is about 2^-7."""
    for seed in range(20):
        case = prepared(1024, 1, 16384, seed)
        if case.expected["d"].std() < 0.02:
            return case
    raise AssertionError("a third of the rows should be small")


def test_a_constant_offset_is_within_tolerance_but_below_the_required_signal() -> None:
    case = product_of_small_weights()
    d = case.expected["d"]
    right, sloppy = judge(case, d), judge(case, d + np.float32(1.9e-3))
    assert right.passed and right.sqnr_db is not None and right.sqnr_db > 19
    assert not sloppy.passed and sloppy.max_error < 2e-3
    assert "dB of signal to quantization noise, less than 16.0" in sloppy.detail
    without_signal_check = replace(case, entry=replace(ENTRY, signal=None))
    assert judge(without_signal_check, d + np.float32(1.9e-3)).passed


def test_every_copy_of_a_result_must_keep_the_signal() -> None:
    case = product_of_small_weights()
    d = case.expected["d"]
    copy = case.copy()

    def judge_copies(first: np.ndarray, second: np.ndarray) -> gate.Verdict:
        def run() -> None:
            case.arrays["d"][...] = dtypes.encode(first, "bfloat16")
            copy.arrays["d"][...] = dtypes.encode(second, "bfloat16")

        return case.verify_run(run, copies=[copy])

    both, noisier = judge_copies(d, d), judge_copies(d, d + np.float32(5e-4))
    assert both.passed and noisier.passed and both.sqnr_db is not None
    assert noisier.sqnr_db is not None and noisier.sqnr_db < both.sqnr_db - 0.01
    sloppy = judge_copies(d, d + np.float32(1.9e-3))
    assert not sloppy.passed and sloppy.detail.startswith("copy 2: d: ")


def test_copies_with_other_bits_are_found_in_results_guard_bands_and_inputs() -> None:
    case = product_of_small_weights()
    copies = [case.copy() for _ in range(5)]
    assert case.unlike(copies) == []
    copies[1].arrays["d"][0, 0] = 1
    copies[2].buffers["d"].raw[0] ^= 1
    copies[4].arrays["a"][0, 0] += 1
    assert case.unlike(copies) == [1, 2, 4]
    copies[1].reset()
    assert case.unlike(copies) == [2, 4] and case.unlike([]) == []


def test_small_problems_are_measured_but_not_judged() -> None:
    for sizes in ((1, 4, 2048), (64, 64, 48)):
        case = prepared(*sizes)
        assert ENTRY.signal is not None and ENTRY.signal.least(case.problem) is None
        assert judge(case, case.expected["d"]).sqnr_db is not None


def test_several_verdicts_keep_the_smallest_signal() -> None:
    verdicts = [gate.Verdict(True, e, sqnr_db=s) for e, s in ((0.1, 19.0), (0.2, None), (0, 18.0))]
    both = verdicts[0].with_another(verdicts[1]).with_another(verdicts[2])
    assert (both.max_error, both.sqnr_db) == (0.2, 18.0)


ROW = {
    "entry": "nvfp4_matmul", "problem_name": "64x8192x8192", "config": {}, "gpu": "h200",
    "environment": {}, "protocol": {"regime": "graph", "l2": "cold", "state": "burst"},
    "run": "r1", "kind": "measured", "status": "passed", "median_us": 20.0, "ci_us": [19.0, 21.0],
    "samples": 9, "sm_clock_mhz": None, "power_w": None, "temperature_c": None, "max_error": 0.001,
}  # fmt: skip


def test_show_prints_the_signal_measured_of_current_sources_only(shipped: Path) -> None:
    tiled = catalog.implementation("nvfp4_matmul", "triton", "tiled")
    problem = ENTRY.problems["64x8192x8192"].values

    def row(language: str, variant: str, source: str, sqnr_db: float, minute: int) -> Measurement:
        subject = {"language": language, "variant": variant, "source": source, "sqnr_db": sqnr_db}
        when = {"created_at": f"2026-11-22T00:{minute:02}:00Z", "problem": problem}
        return Measurement.from_json({**ROW, **subject, **when})

    now = digest(tiled)
    with Store.open() as store:
        store.add([
            row("triton", "tiled", now, 20.04, 0), row("triton", "naive", "older", 3.0, 1),
            row("peer", "cublas", "", 19.96, 0),
        ])  # fmt: skip
    shown = CliRunner().invoke(main, ["show", "nvfp4_matmul"]).output
    line = next(line for line in shown.splitlines() if " at least 16.0: " in line)
    assert line.split()[0] == "64x8192x8192"
    assert "triton/tiled 20.0" in line and "cublas 20.0" in line
    assert "triton/naive" not in line
    assert "not measured yet: at least 12.0 or 16.0" in shown
    assert "signal to quantization noise" not in CliRunner().invoke(main, ["show", "gemm"]).output
