"""`nvfp4_matmul`: the layout of prepacked weights, the signal of its products, and its peer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.call import signature, torch_operators
from kernelcat.call.arrays import ArrayInfo
from kernelcat.errors import InvalidArgument, Unsupported
from kernelcat.layers import fp4
from kernelcat.reference import _fp4, _fp4_tiles
from kernelcat.reference.nvfp4_matmul import DTYPES, FP4, FP8, OUT, PACKINGS
from kernelcat.verify import gate

torch = pytest.importorskip("torch")

ENTRY = catalog.entry("nvfp4_matmul")
HOST = SimpleNamespace(xp=np, synchronize=lambda: None)


def draw_weights(n: int, k: int, format: str):
    """Random codes, n x k/2 bytes, and random scales, n x k/BLOCKS[format] bytes."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (n, k // 2), "uint8")
    return codes, random.integers(1, 120, (n, k // _fp4.BLOCKS[format]), "uint8")


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_each_word_of_packed_codes_is_the_operand_of_one_lane(format: str) -> None:
    n, k, size = 48, 160, _fp4.BLOCKS[format]
    codes, scales = draw_weights(n, k, format)
    single = np.stack((codes & 15, codes >> 4), axis=-1).reshape(n, k)
    single = np.pad(single, ((0, 0), (0, 32)))
    packed = _fp4_tiles.pack_codes(codes)
    assert packed.shape == (48, 96)
    words = packed.reshape(3, 3, 32, 4, 4).view("<u4")[..., 0]  # tile row, tile, lane, step
    for row, tile, lane, step in np.ndindex(words.shape):
        r, c = 16 * row + lane // 4, 64 * tile + 16 * step + 2 * (lane % 4)
        registers = [(r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8)]
        expected = sum(
            int(single[at[0], at[1] + i // 4]) << 4 * i for i, at in enumerate(registers * 2)
        )
        assert words[row, tile, lane, step] == expected
    scales_per_tile = 64 // size
    packed_scales = _fp4_tiles.pack_scales(scales, format).reshape(3, 3, 8, 2, scales_per_tile)
    for row, col in np.ndindex(scales.shape):
        at = row // 16, col // scales_per_tile, row % 8, row % 16 // 8, col % scales_per_tile
        assert packed_scales[at] == scales[row, col]


@pytest.mark.parametrize("format", _fp4.FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (5, 96), (33, 320)])
def test_unpacking_prepacked_weights_gives_the_weights(n: int, k: int, format: str) -> None:
    codes, scales = draw_weights(n, k, format)
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


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_unswizzling_swizzled_scales_gives_the_scales(format: str) -> None:
    n, k = 140, 288
    _, scales = draw_weights(n, k, format)
    element = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}[format]
    swizzled = fp4.swizzle(torch.from_numpy(scales).view(element))
    problem = ENTRY.problem(M=1, N=n, K=k, dtype=FP4, format=format)
    w_scale = next(t for t in ENTRY.inputs if t.name == "w_scale")
    assert (tuple(swizzled.shape), swizzled.dtype) == (w_scale.shape_of(problem), element)
    bytes_ = swizzled.view(torch.uint8).numpy()
    assert (_fp4.unswizzle(bytes_, *scales.shape) == scales).all()
    assert bytes_.sum(dtype=int) == scales.sum(dtype=int)  # padding is zero
    with pytest.raises(InvalidArgument, match="scales are uint8"):
        fp4.swizzle(torch.from_numpy(scales))


def test_prepack_refuses_wrong_scales() -> None:
    w = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="scales are uint8; use float8_e4m3fn"):
        fp4.prepack(w, torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(InvalidArgument, match="4 x 64 in nvfp4 have 4 x 4 scales, not"):
        fp4.prepack(w, torch.zeros(4, 2, dtype=torch.uint8).view(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_problem_is_inferred_from_the_arguments(dtype: str) -> None:
    """With A in 4 bits too, where A has K/2 columns of packed codes."""
    problem = ENTRY.problem(M=33, N=80, K=96, dtype=dtype, format="mxfp4")
    infos, fakes = {}, []
    for tensor in ENTRY.inputs:
        if not tensor.present(problem):
            fakes.append(None)
            continue
        shape, kind = tensor.shape_of(problem), tensor.dtype_of(problem)
        fakes.append(torch.empty(shape, dtype=getattr(torch, kind), device="meta"))
        strides = tensor.strides_of(problem)
        infos[tensor.name] = ArrayInfo(16, shape, strides, kind, "cuda:0", "torch")
    assert signature.infer(ENTRY, infos, {"N": 80}) == problem
    d = torch_operators._fake(ENTRY, fakes, {"N": 80, "packing": "rows", "activation": "none"})
    assert (tuple(d.shape), str(d.dtype)) == ((33, 80), f"torch.{OUT.where(problem.values)}")


def test_both_operands_take_the_swizzled_scales_of_nvfp4_quantize() -> None:
    """D of the oracle equals the product of two dequantized outputs of `nvfp4_quantize`."""
    random = np.random.default_rng(0)
    m, n, k = 140, 130, 208
    a, w = (random.standard_normal(size).astype("float32") for size in ((m, k), (n, k)))
    quantized, operands = {}, {}
    entry = catalog.entry("nvfp4_quantize")
    for name, x in (("a", a), ("w", w)):
        g = np.float32([_fp4.global_scale_of(float(abs(x).max()))])
        axes = {"dtype": "bfloat16", "format": "nvfp4", "scale_layout": "swizzled"}
        problem = entry.problem(M=len(x), K=k, **axes)
        out = entry.oracle(problem, {"x": dtypes.encode(x, "bfloat16"), "global_scale": g})
        scales = _fp4.unswizzle(out["scale"], len(x), k // 16)
        operands[name] = _fp4.dequantize(out["q"], scales, "nvfp4", g)
        quantized[name] = out["q"], out["scale"], g
    problem = ENTRY.problem(M=m, N=n, K=k, dtype=FP4, format="nvfp4")
    arrays = {
        "a": dtypes.decode(quantized["a"][0], _fp4.CODES),
        "a_block_scale": dtypes.decode(quantized["a"][1], "float8_e4m3fn"),
        "w": dtypes.decode(quantized["w"][0], _fp4.CODES),
        "w_scale": dtypes.decode(quantized["w"][1], "float8_e4m3fn"),
        "global_scale": quantized["a"][2] * quantized["w"][2],
    }
    d = ENTRY.oracle(problem, arrays)["d"]
    assert np.allclose(d, operands["a"] @ operands["w"].T, rtol=1e-4, atol=1e-4)
    assert gate.sqnr_db(d, a @ w.T) > 16


def judge(**axes) -> gate.Verdict:
    problem = ENTRY.problem(M=33, N=96, K=512, **axes)
    prepared = gate.prepare(ENTRY, problem, HOST, 1)

    def tensors(arrays) -> dict:
        views = {}
        for tensor in ENTRY.present(problem):
            flat = torch.from_numpy(arrays[tensor.name].view(f"i{arrays[tensor.name].itemsize}"))
            views[tensor.name] = flat.view(getattr(torch, tensor.dtype_of(problem)))
        return views

    make = ENTRY.peers[0].load()
    return prepared.verify(lambda arrays: make(problem, tensors(arrays)), peer=True)


@pytest.mark.parametrize("format", _fp4.FORMATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", FP4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_peer_passes_the_gate(packing: str, dtype: str, format: str, bias: bool) -> None:
    verdict = judge(dtype=dtype, format=format, bias=bias, packing=packing)
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_the_peer_takes_float8_only_without_an_epilogue(format: str) -> None:
    verdict = judge(dtype=FP8, format=format)
    assert verdict.passed, verdict.detail
    with pytest.raises(Unsupported):
        judge(dtype=FP8, format=format, bias=True)


def product_sqnr(format: str, scale_of_weights: float = 0.02) -> float:
    """Signal to quantization noise of the oracle's product, in dB.

    The weights are normally distributed with the given scale, then quantized; the signal is the
    product with the exact weights.
    """
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


def test_products_keep_16_db_in_nvfp4_and_12_db_in_mxfp4() -> None:
    nvfp4, mxfp4 = product_sqnr("nvfp4"), product_sqnr("mxfp4")
    assert nvfp4 >= 16 and nvfp4 > mxfp4 >= 12


def test_subnormal_scales_and_lost_slices_are_beyond_the_tolerance() -> None:
    problem = ENTRY.problem(M=64, N=128, K=1024, dtype="bfloat16", format="nvfp4")
    prepared = gate.prepare(ENTRY, problem, HOST)
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
