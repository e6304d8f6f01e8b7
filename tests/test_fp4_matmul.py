"""`nvfp4_matmul`: the order of prepacked weights, how much signal is left, and its peer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog, check, dtypes, fp4
from kernelcat.errors import InvalidArgument, Unsupported
from kernelcat.reference import _fp4, _fp4_tiles
from kernelcat.reference.nvfp4_matmul import FP8, PACKINGS

torch = pytest.importorskip("torch")

ENTRY = catalog.entry("nvfp4_matmul")
HOST = SimpleNamespace(xp=np, synchronize=lambda: None)


def drawn(n: int, k: int, format: str):
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (n, k // 2), "uint8")
    return codes, random.integers(1, 120, (n, k // _fp4.BLOCKS[format]), "uint8")


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_a_lanes_word_is_its_part_of_a_left_operand(format: str) -> None:
    n, k, size = 48, 160, _fp4.BLOCKS[format]
    codes, scales = drawn(n, k, format)
    single = np.stack((codes & 15, codes >> 4), axis=-1).reshape(n, k)
    single = np.pad(single, ((0, 0), (0, 32)))
    packed = _fp4_tiles.pack_codes(codes)
    assert packed.shape == (48, 96)
    words = packed.reshape(3, 3, 32, 4, 4).view("<u4")[..., 0]  # tile row, tile, lane, step
    for row, tile, lane, step in np.ndindex(words.shape):
        r, c = 16 * row + lane // 4, 64 * tile + 16 * step + 2 * (lane % 4)
        registers = [(r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8)]
        wanted = sum(
            int(single[at[0], at[1] + i // 4]) << 4 * i for i, at in enumerate(registers * 2)
        )
        assert words[row, tile, lane, step] == wanted
    each = 64 // size
    found = _fp4_tiles.pack_scales(scales, format).reshape(3, 3, 8, 2, each)
    for row, col in np.ndindex(scales.shape):
        at = row // 16, col // each, row % 8, row % 16 // 8, col % each
        assert found[at] == scales[row, col]


@pytest.mark.parametrize("format", _fp4.FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (5, 96), (33, 320)])
def test_prepacked_weights_are_the_same_weights(n: int, k: int, format: str) -> None:
    codes, scales = drawn(n, k, format)
    element = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}[format]
    w = torch.from_numpy(codes).view(torch.float4_e2m1fn_x2)
    packed, scale = fp4.prepack(w, torch.from_numpy(scales).view(element))
    assert (packed.dtype, scale.dtype) == (torch.float4_e2m1fn_x2, element)
    bytes_ = packed.view(torch.uint8).numpy(), scale.view(torch.uint8).numpy()
    assert (_fp4_tiles.unpack_codes(bytes_[0], n, k) == codes).all()
    assert (_fp4_tiles.unpack_scales(bytes_[1], format, n, k) == scales).all()
    problem = ENTRY.problem(M=1, N=n, K=k, dtype="bfloat16", format=format, packing="tiles")
    shapes = {t.name: t.shape_of(problem) for t in ENTRY.inputs}
    assert (packed.shape, scale.shape) == (shapes["w"], shapes["w_scale"])


def test_prepack_says_what_it_cannot_take() -> None:
    w = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="scales are uint8; use float8_e4m3fn"):
        fp4.prepack(w, torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(InvalidArgument, match="4 x 64 in nvfp4 have 4 x 4 scales, not"):
        fp4.prepack(w, torch.zeros(4, 2, dtype=torch.uint8).view(torch.float8_e4m3fn))


def judge(**axes) -> check.Verdict:
    problem = ENTRY.problem(M=33, N=96, K=512, **axes)
    prepared = check.prepare(ENTRY, problem, HOST, 1)

    def tensors(arrays) -> dict:
        found = {}
        for tensor in ENTRY.present(problem):
            flat = torch.from_numpy(arrays[tensor.name].view(f"i{arrays[tensor.name].itemsize}"))
            found[tensor.name] = flat.view(getattr(torch, tensor.dtype_of(problem)))
        return found

    make = ENTRY.peers[0].load()
    return prepared.verify(lambda arrays: make(problem, tensors(arrays)), peer=True)


@pytest.mark.parametrize("format", _fp4.FORMATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_peer_means_the_same(packing: str, dtype: str, format: str, bias: bool) -> None:
    verdict = judge(dtype=dtype, format=format, bias=bias, packing=packing)
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_the_peer_takes_float8_without_what_follows_a_product(format: str) -> None:
    verdict = judge(dtype=FP8, format=format)
    assert verdict.passed, verdict.detail
    with pytest.raises(Unsupported):
        judge(dtype=FP8, format=format, bias=True)


def product_sqnr(format: str, scale_of_weights: float = 0.02) -> float:
    """Of the oracle's product with quantized normal weights against the exact one, in dB."""
    random = np.random.default_rng(0)
    a, w = (random.standard_normal(shape).astype("float32") for shape in ((64, 1024), (256, 1024)))
    a, w = dtypes.decode(dtypes.encode(a, "bfloat16"), "bfloat16"), w * np.float32(scale_of_weights)
    g = np.float32([_fp4.global_scale_of(float(abs(w).max()))]) if format == "nvfp4" else None
    codes, scales = _fp4.quantize(w.astype("float64"), format, g)
    problem = ENTRY.problem(M=64, N=256, K=1024, dtype="bfloat16", format=format)
    arrays = {
        "a": a,
        "w": dtypes.decode(codes, _fp4.CODES),
        "w_scale": dtypes.decode(scales, _fp4.SCALE.where(problem.values)),
        "global_scale": g,
    }
    exact = a @ w.T
    noise = ENTRY.oracle(problem, arrays)["d"] - exact
    return float(10 * np.log10((exact**2).sum() / (noise**2).sum()))


def test_products_keep_enough_signal() -> None:
    nvfp4, mxfp4 = product_sqnr("nvfp4"), product_sqnr("mxfp4")
    assert nvfp4 >= 16 and nvfp4 > mxfp4 >= 12


def test_subnormal_scales_and_lost_slices_are_beyond_the_tolerance() -> None:
    problem = ENTRY.problem(M=64, N=128, K=1024, dtype="bfloat16", format="nvfp4")
    prepared = check.prepare(ENTRY, problem, HOST)
    views = {
        t.name: dtypes.decode(prepared.arrays[t.name], t.dtype_of(problem))
        for t in ENTRY.inputs
        if t.present(problem)
    }
    d, tolerance = prepared.expected["d"], ENTRY.tolerance_of(problem)
    small = views["w_scale"].max(axis=1) < 2.0**-6
    assert 0.2 < small.mean() < 0.5 and 0.8 < d[:, ~small].std() < 1.2
    scales = views["w_scale"]
    flushed = np.where(scales < 2.0**-6, np.float32(0), scales)
    for wrong, rows in ((flushed, small), (np.roll(scales, 1, axis=1), ~small)):
        error = abs(ENTRY.oracle(problem, views | {"w_scale": wrong})["d"] - d)
        bad = error > tolerance.absolute + tolerance.relative * abs(d)
        assert bad[:, rows].mean() > 0.5
