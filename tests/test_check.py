"""The verification gate: right results pass, and every kind of wrong result is caught and named."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import Problem
from kernelcat.reference.paged_attn import attention
from kernelcat.runtime import gpu
from kernelcat.verify import gate

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
GEMM = catalog.entry("gemm").problem(M=33, N=17, K=40, dtype="bfloat16", bias=True)
COPY = catalog.entry("tma_copy").problem(
    rows=5, cols=7, src_stride=9, dst_stride=8, dtype="float16"
)


def product(arrays: dict) -> None:
    a, b, bias = (dtypes.decode(arrays[n], "bfloat16") for n in ("a", "b", "bias"))
    arrays["d"][...] = dtypes.encode(a @ b.T + bias, "bfloat16")


def copy(arrays: dict) -> None:
    arrays["dst"][...] = arrays["src"]


def judge(problem: Problem, body: Callable[[dict], None]) -> gate.Verdict:
    prepared = gate.prepare(catalog.entry(problem.entry), problem, HOST, seed=3)
    return prepared.verify(lambda arrays: lambda: body(arrays))


@pytest.mark.parametrize(("problem", "body"), [(GEMM, product), (COPY, copy)])
def test_the_right_result_passes(problem: Problem, body: Callable[[dict], None]) -> None:
    verdict = judge(problem, body)
    assert verdict.passed, verdict


def wrong_element(arrays: dict) -> None:
    product(arrays)
    arrays["d"][2, 3] = 0


def unwritten_element(arrays: dict) -> None:
    product(arrays)
    arrays["d"][-1, -1] = 0xFFFF


def lost_slice_of_k(arrays: dict) -> None:
    product({**arrays, "a": arrays["a"][:, :-8], "b": arrays["b"][:, :-8], "d": arrays["d"]})


def writes_before(arrays: dict) -> None:
    product(arrays)
    ctypes.memset(arrays["d"].ctypes.data - 1, 0, 1)


def writes_after(arrays: dict) -> None:
    product(arrays)
    ctypes.memset(arrays["d"].ctypes.data + arrays["d"].nbytes, 0, 1)


def changes_its_input(arrays: dict) -> None:
    product(arrays)
    arrays["a"][0, 0] ^= 1


def writes_into_a_gap(arrays: dict) -> None:
    copy(arrays)
    ctypes.memset(arrays["dst"].ctypes.data + 7 * 2, 0, 1)


def flips_a_bit(arrays: dict) -> None:
    copy(arrays)
    arrays["dst"].view("uint16")[1, 1] ^= 1


@pytest.mark.parametrize(
    ("problem", "body", "message"),
    [
        (GEMM, wrong_element, r"1 of 561 elements off, first at \(2, 3\)"),
        (GEMM, unwritten_element, r"1 of 561 elements off, first at \(32, 16\): nan"),
        (GEMM, lost_slice_of_k, "elements off"),
        (GEMM, writes_before, "wrote outside of d"),
        (GEMM, writes_after, "wrote outside of d"),
        (GEMM, changes_its_input, "changed its input a"),
        (COPY, writes_into_a_gap, "wrote outside of dst"),
        (COPY, flips_a_bit, "dst: 1 of 35 differ"),
    ],
)
def test_every_kind_of_wrong_result_is_caught(problem: Problem, body, message: str) -> None:
    verdict = judge(problem, body)
    assert not verdict.passed
    assert re.search(message, verdict.detail), verdict.detail


def test_an_output_may_have_a_separate_tolerance() -> None:
    """A neighbouring float8 value of ``q`` passes; a scale that is 0.1 % off fails."""
    entry = catalog.entry("fp8_swiglu")
    problem = entry.problem(M=4, N=512, dtype="bfloat16")
    prepared = gate.prepare(entry, problem, HOST, seed=3)
    q = dtypes.encode(prepared.expected["q"], "float8_e4m3fn")

    def write(codes, scale):
        def body(arrays):
            arrays["q"][...] = codes
            arrays["scale"][...] = scale

        return prepared.verify(lambda arrays: lambda: body(arrays))

    neighbours = q + ((q & 0x7F) < 0x7E).astype("uint8")
    assert write(neighbours, prepared.expected["scale"]).passed
    assert not write(q + 2 * (q == 0x30).astype("uint8"), prepared.expected["scale"]).passed
    off = write(q, prepared.expected["scale"] * np.float32(1.001))
    assert not off.passed and off.detail.startswith("scale: ")


MERGE = catalog.entry("attn_merge").problem(
    parts=1, tokens=40, heads=4, head_dim=64, dtype="float16"
)
"""A problem in which some rows have no visible key: their lse is -inf."""


@pytest.mark.parametrize("value", [np.inf, np.nan, -1e30, 0.0])
def test_an_infinity_is_right_only_where_the_oracle_has_it(value: float) -> None:
    prepared = gate.prepare(catalog.entry("attn_merge"), MERGE, HOST, seed=3)
    out, lse = prepared.expected["out"], prepared.expected["lse"]
    without_keys = np.isneginf(lse)
    assert without_keys.any() and not without_keys.all()

    def write(written, **how):
        def body(arrays):
            arrays["out"][...], arrays["lse"][...] = out, written

        return prepared.verify(lambda arrays: lambda: body(arrays), **how)

    assert write(lse).passed
    for wrong in (np.where(without_keys, value, lse), np.where(without_keys, lse, -np.inf)):
        assert not write(wrong).passed


def test_a_peer_need_not_write_every_output() -> None:
    entry = catalog.entry("paged_attn")
    problem = attention(2, 4, 2, 64, 32, 16)
    prepared = gate.prepare(entry, problem, HOST, seed=3)

    def body(arrays):
        arrays["out"][...] = dtypes.encode(prepared.expected["out"], "bfloat16")

    assert prepared.verify(lambda arrays: lambda: body(arrays), peer=True).passed
    ours = prepared.verify(lambda arrays: lambda: body(arrays))
    assert not ours.passed and ours.detail.startswith("lse: ")


def test_memory_that_must_not_be_read_is_nan() -> None:
    prepared = gate.prepare(catalog.entry("tma_copy"), COPY, HOST)
    raw = prepared.buffers["src"].raw[: gate.GUARD_BYTES].view("float16")
    assert np.isnan(raw).all()


def test_float8_conversions_equal_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    values = dtypes.decode(codes, "float8_e4m3fn")
    known = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(values, known, equal_nan=True)
    finite = np.sort(values[np.isfinite(values)])
    ties = (finite[1:] + finite[:-1]) / 2
    drawn = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32) * 100
    some = np.concatenate([finite, ties, np.nextafter(ties, np.float32(1e9)), drawn / 1000, drawn])
    clipped = torch.from_numpy(some.clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert np.array_equal(dtypes.encode(some, "float8_e4m3fn"), clipped.numpy())
    assert dtypes.encode(np.float32([np.nan]), "float8_e4m3fn")[0] == 0x7F


def test_packed_float4_conversions_equal_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    values = dtypes.decode(codes, "float4_e2m1fn_x2")
    halves = np.stack([codes & 15, codes >> 4], axis=-1).ravel()
    known = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(values.view(np.uint32), known.view(np.uint32))
    assert np.array_equal(dtypes.encode(values, "float4_e2m1fn_x2"), codes)
    finite = np.unique(np.abs(known))
    ties = (finite[1:] + finite[:-1]) / 2
    near = np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(0))
    some = np.concatenate([finite, ties, *near, np.float32([6.9, 7, 1e9, np.inf])])
    some = np.concatenate([some, -some])
    rounded = some.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    back = dtypes.decode(dtypes.encode(some, "float4_e2m1fn_x2"), "float4_e2m1fn_x2")
    assert np.array_equal(back.view(np.uint32), rounded.view(np.uint32))


def test_float8_e8m0_conversions_equal_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    values = dtypes.decode(codes, "float8_e8m0fnu")
    known = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(values, known, equal_nan=True)
    assert np.array_equal(dtypes.encode(values, "float8_e8m0fnu"), codes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_stored_rounded_to_nearest_even(dtype: str) -> None:
    import ml_dtypes

    values = np.random.default_rng(0).standard_normal(4096, dtype="float32")
    values[:4] = (1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0)
    expected = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    back = dtypes.decode(dtypes.encode(values, dtype), dtype)
    assert np.array_equal(back, expected.astype("float32"))


@pytest.mark.parametrize("empty", [{"M": 0}, {"N": 0}, {"K": 0}])
def test_empty_problems_can_be_judged(empty: dict) -> None:
    problem = catalog.entry("gemm").problem(**{**GEMM.values, **empty})
    assert judge(problem, product).passed
