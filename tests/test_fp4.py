"""The definitions of NVFP4 and MXFP4: special values, layouts, random bits, accuracy, peers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference import _fp4, _nvfp4_peers, _philox
from kernelcat.reference.nvfp4_quantize import hadamard, rms_norm, rows
from kernelcat.verify import gate

QUANTIZE, DEQUANTIZE = catalog.entry("nvfp4_quantize"), catalog.entry("nvfp4_dequantize")
MATMUL = catalog.entry("nvfp4_matmul")
HOST = SimpleNamespace(xp=np, synchronize=lambda: None)


def quantized(x, format: str = "nvfp4", global_scale: float = 1.0, **more):
    """Codes (rows, K) and scale bytes (rows, K / block) of x (rows, K) in bfloat16.

    ``more`` are optional arrays: weight, signs, seed.
    """
    flags = {
        "rms_norm": "weight" in more,
        "hadamard": "signs" in more,
        "stochastic": "seed" in more,
    }
    problem = rows(*x.shape, format, **flags)
    arrays = {"x": dtypes.encode(np.float32(x), "bfloat16"), **more}
    if format == "nvfp4":
        arrays["global_scale"] = np.float32([global_scale])
    outputs = QUANTIZE.oracle(problem, arrays)
    codes = np.stack((outputs["q"] & 15, outputs["q"] >> 4), axis=-1).reshape(x.shape)
    return codes, outputs["scale"]


def dequantized(codes, scale, format: str = "nvfp4", global_scale: float = 1.0):
    """Float32 (rows, K) of codes (rows, K) and scale bytes (rows, K / block)."""
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    factor = np.float32([global_scale]) if format == "nvfp4" else None
    return _fp4.dequantize(packed, scale, format, factor)


def sqnr(x, quantized_x) -> float:
    """Signal to quantization noise, in dB."""
    return float(10 * np.log10((x**2).sum() / ((x - quantized_x) ** 2).sum()))


def block(*values: float, size: int = 16):
    """One block (1, size): ``values``, then zeros."""
    return np.float32([[*values, *(size - len(values)) * [0.0]]])


# ---- special values -----------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "scale"), [("nvfp4", 0x08), ("mxfp4", 0)])
def test_a_block_of_zeros_has_the_smallest_scale_and_keeps_signs(format: str, scale: int) -> None:
    codes, scales = quantized(block(0.0, -0.0, size=32), format)
    assert codes.tolist() == [[0, 8, *30 * [0]]]
    assert (scales == scale).all()
    assert not dequantized(codes, scales, format).any()


def test_a_nan_makes_its_block_nan_and_no_other() -> None:
    x = np.ones((2, 64), "float32")
    x[1, 5] = np.nan
    for format, size, nan in (("nvfp4", 16, 0x7F), ("mxfp4", 32, 0xFF)):
        codes, scales = quantized(x, format)
        assert scales[1, 0] == nan and (scales == nan).sum() == 1
        assert (codes[1, :size] == 0).all()
        values = dequantized(codes, scales, format)
        assert np.isnan(values[1, :size]).all() and np.isnan(values).sum() == size


def test_infinities_saturate_at_the_largest_scale() -> None:
    codes, scales = quantized(block(np.inf, -np.inf, 2000.0))
    assert scales.tolist() == [[0x7E]] and codes[0, :3].tolist() == [7, 15, 6]  # 2000 / 448 = 4.5
    assert dequantized(codes, scales)[0, :3].tolist() == [2688, -2688, 1792]
    codes, scales = quantized(block(np.inf, 3.0e38, size=32), "mxfp4")
    assert scales.tolist() == [[252]] and codes[0, :2].tolist() == [7, 7]


def test_outliers_saturate_unless_the_global_scale_is_large_enough() -> None:
    codes, scales = quantized(block(1e6, -5376.0, 896.0))
    assert scales.tolist() == [[0x7E]] and codes[0, :3].tolist() == [7, 15, 4]
    wide, same = quantized(block(1e6, -5376.0, 896.0), global_scale=1e6 / 2688)
    assert same.tolist() == [[0x7E]] and wide[0, :3].tolist() == [7, 8, 0]


def test_blocks_of_small_values_get_the_smallest_scale_never_a_subnormal_one() -> None:
    codes, scales = quantized(block(2.0**-7, -(2.0**-6), 2.0**-10))
    assert scales.tolist() == [[0x08]] and codes[0, :3].tolist() == [1, 10, 0]


def test_dequantization_accepts_subnormal_scales() -> None:
    codes = np.uint8([[2, 7, *14 * [0]]])
    assert dequantized(codes, np.uint8([[1]]))[0, :2].tolist() == [2.0**-9, 6 * 2.0**-9]
    codes = np.uint8([[1, 7, *30 * [0]]])
    values = dequantized(codes, np.uint8([[0]]), "mxfp4")
    assert values[0, :2].tolist() == [2.0**-128, 1.5 * 2.0**-125]


def test_subnormal_elements_are_not_flushed_to_zero() -> None:
    codes, scales = quantized(block(2.0**-127, -(2.0**-133), 3 * 2.0**-129, size=32), "mxfp4")
    assert scales.tolist() == [[0]] and codes[0, :3].tolist() == [2, 8, 2]


def test_mxfp4_has_the_shared_exponent_of_the_ocp_specification() -> None:
    for amax, exponent in ((1.0, -2), (1.99, -2), (6.0, 0), (7.9, 0), (8.0, 1)):
        codes, scales = quantized(block(amax, size=32), "mxfp4")
        assert scales.tolist() == [[127 + exponent]], amax
    assert codes[0, 0] == 6  # 8 = 4 * 2


def test_values_that_a_format_can_represent_are_quantized_without_error() -> None:
    values = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((values, -values))[None, :] * np.float32([[0.25], [1.0], [448.0]])
    assert (dequantized(*quantized(values)) == values).all()
    values = np.repeat(values, 2, axis=1)
    assert (dequantized(*quantized(values[:2], "mxfp4"), "mxfp4") == values[:2]).all()


def test_the_global_scale_is_a_factor_of_the_values() -> None:
    x = np.float32(np.random.default_rng(0).standard_normal((64, 64)))
    g = _fp4.global_scale_of(float(abs(x).max()))
    codes, scales = quantized(x, global_scale=g)
    assert scales.max() == 0x7E and abs(codes & 7).max() == 7
    assert abs(dequantized(codes, scales, global_scale=g) - x).max() < 0.5
    assert _fp4.global_scale_of(0.0) == 2.0**-64 and _fp4.global_scale_of(2688.0) == 1.0


# ---- layouts ------------------------------------------------------------------------------------


def test_swizzled_scales_are_where_cublaslt_reads_them() -> None:
    linear = np.arange(200 * 9, dtype="uint32").astype("uint8").reshape(200, 9)
    bytes_ = _fp4.swizzle(linear)
    assert bytes_.shape == (256, 12)
    used = np.zeros(bytes_.size, bool)
    for r, c in np.ndindex(linear.shape):
        index = ((r // 128) * 3 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        used[index] = True
        assert bytes_.flat[index] == linear[r, c]
    assert not bytes_.ravel()[~used].any()
    assert (_fp4.unswizzle(bytes_, 200, 9) == linear).all()


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_has_the_known_answers_of_its_authors(key, counter, words) -> None:
    random = _philox.philox(key, tuple(np.uint64([word]) for word in counter))
    assert tuple(int(word[0]) for word in random) == words


def test_stochastic_rounding_keeps_the_mean_and_takes_neighbouring_codes() -> None:
    values = np.float32([0.1, 0.3, 0.9, 1.1, 1.9, 2.25, 3.875, 4.5, 5.75])
    x = np.tile(block(6.0, *values), (8192, 1))
    codes, _ = quantized(x, seed=np.int32([1, -2]))
    x = dtypes.decode(dtypes.encode(x[0], "bfloat16"), "bfloat16")  # 0.1 is not representable
    levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for i in range(1, 10):
        below = np.searchsorted(levels, x[i], side="right") - 1
        assert {*levels[codes[:, i]]} == {levels[below], levels[below + 1]}
        step = levels[below + 1] - levels[below]
        assert abs(levels[codes[:, i]].mean() - x[i]) < 4 * step / 2 / 8192**0.5
    assert (codes[:, 0] == 7).all()
    correlation = np.corrcoef(codes[:, 1:10].T) - np.eye(9)  # neighbours share two random bits
    assert abs(correlation).max() < 5 / 8192**0.5
    other_seed, _ = quantized(np.tile(block(6.0, *values), (8192, 1)), seed=np.int32([1, -1]))
    assert (other_seed != codes).any()


def test_the_hadamard_transform_is_orthogonal_and_its_own_inverse() -> None:
    h = np.float32(np.random.default_rng(0).standard_normal((5, 64)))
    signs, ones = np.where(np.arange(16) % 3, 1, -1).astype("float32"), np.ones(16, "float32")
    transformed = hadamard(h, signs)
    assert np.allclose((transformed**2).sum(), (h**2).sum())
    assert np.allclose(hadamard(transformed, ones) * np.tile(signs, 4), h, atol=1e-6)


def test_rms_norm_agrees_with_float64() -> None:
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((4, 720)), random.standard_normal(720)
    h = rms_norm(np.float32(x), np.float32(weight), 1e-5)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(h, expected, rtol=1e-5, atol=1e-5)


def test_options_are_applied_in_order() -> None:
    """One call equals RMSNorm, then the transform, then stochastic rounding."""
    random = np.random.default_rng(0)
    x = dtypes.encode(np.float32(random.standard_normal((3, 64))), "bfloat16")
    x = dtypes.decode(x, "bfloat16")
    weight, signs, seed = np.ones(64, "float32"), np.ones(16, "float32"), np.int32([3, 4])
    codes, scales = quantized(
        x, global_scale=0.01, signs=signs, seed=seed, weight=dtypes.encode(weight, "bfloat16")
    )
    h = hadamard(rms_norm(x, weight, 1e-5), signs).astype("float64")
    random = _philox.nine_bits(seed, 3, 64)
    expected_codes, expected_scales = _fp4.quantize(h, "nvfp4", np.float32([0.01]), random)
    assert (codes[:, ::2] | codes[:, 1::2] << 4 == expected_codes).all()
    assert (scales == expected_scales).all()


# ---- accuracy -----------------------------------------------------------------------------------


def test_normal_weights_keep_at_least_18_or_12_db() -> None:
    x = np.float32(np.random.default_rng(0).standard_normal((256, 1024))) * np.float32(0.02)
    g = _fp4.global_scale_of(float(abs(x).max()))
    nvfp4 = sqnr(x, dequantized(*quantized(x, global_scale=g), global_scale=g))
    mxfp4 = sqnr(x, dequantized(*quantized(x, "mxfp4"), "mxfp4"))
    assert 18 <= nvfp4 < 24 and 12 <= mxfp4 < nvfp4


def test_the_same_signs_undo_the_transform_after_dequantization() -> None:
    random = np.random.default_rng(0)
    x = random.laplace(size=(256, 256)).astype("float32")
    g = _fp4.global_scale_of(float(abs(x).max()) * 4)
    signs = np.float32(random.choice([-1.0, 1.0], 16))
    transformed = dequantized(*quantized(x, global_scale=g, signs=signs), global_scale=g)
    back = hadamard(transformed, np.ones(16, "float32"))
    assert sqnr(x, back * np.tile(signs, 16)) > 18 > 3 > sqnr(x, back)


# ---- the gate and the peers ---------------------------------------------------------------------


def test_one_wrong_bit_of_codes_or_scales_fails_the_gate() -> None:
    prepared = gate.prepare(QUANTIZE, rows(5, 64), HOST)

    def kernel(**flips: int):
        """Writes the expected outputs, with one element of those in ``flips`` changed."""

        def run() -> None:
            for name, expected in prepared.expected.items():
                prepared.arrays[name][...] = expected
                prepared.arrays[name][2, 1] ^= flips.get(name, 0)

        return lambda arrays: run

    assert prepared.verify(kernel()).passed
    assert not prepared.verify(kernel(q=8)).passed
    assert not prepared.verify(kernel(scale=1)).passed


def tensors(entry, problem, arrays):
    """Storage arrays as torch tensors of the entry's element types."""
    torch = pytest.importorskip("torch")
    return {
        t.name: torch.from_numpy(arrays[t.name].copy()).view(getattr(torch, t.dtype_of(problem)))
        for t in entry.present(problem)
    }


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_torchs_quantizer_is_exact(format: str) -> None:
    torch = pytest.importorskip("torch")
    problem = QUANTIZE.problem(M=70, K=512, dtype="bfloat16", format=format)
    prepared = gate.prepare(QUANTIZE, problem, HOST, 3)
    arrays = tensors(QUANTIZE, problem, prepared.arrays)
    q, scale = _nvfp4_peers.quantize(torch, arrays["x"], format, arrays.get("global_scale"))
    assert (q.numpy() == prepared.expected["q"]).all()
    assert (scale.numpy() == prepared.expected["scale"]).all()


@pytest.mark.parametrize("format", _fp4.FORMATS)
def test_torchs_dequantizer_is_exact(format: str) -> None:
    torch = pytest.importorskip("torch")
    problem = DEQUANTIZE.problem(M=70, K=512, dtype="bfloat16", format=format)
    prepared = gate.prepare(DEQUANTIZE, problem, HOST, 3)
    arrays = tensors(DEQUANTIZE, problem, prepared.arrays)
    q, scale = (arrays[name].view(torch.uint8) for name in ("q", "scale"))
    x = _nvfp4_peers.dequantize(torch, q, scale, format, arrays.get("global_scale"))
    expected = dtypes.decode(prepared.expected["x"], "bfloat16")
    assert np.array_equal(x.bfloat16().float().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("format", _fp4.FORMATS)
@pytest.mark.parametrize(
    ("dtype", "packing", "more"),
    [
        ("bfloat16", "rows", {"bias": True, "activation": "swiglu"}),
        ("float16", "tiles", {"activation": "gelu"}),
        ("float8_e4m3fn", "tiles", {}),
        ("float4_e2m1fn_x2", "rows", {"bias": True}),
    ],
)
def test_cublas_with_dequantized_weights_is_right(format, dtype, packing, more) -> None:
    """The peer of `nvfp4_matmul`, on the CPU."""
    problem = MATMUL.problem(M=24, N=48, K=160, dtype=dtype, format=format, packing=packing, **more)
    prepared = gate.prepare(MATMUL, problem, HOST)
    arrays = tensors(MATMUL, problem, prepared.arrays)
    _nvfp4_peers.torch_matmul()(problem, arrays)()
    expected, d = prepared.expected["d"], arrays["d"].float().numpy()
    assert np.abs(d - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"K": 40}, "K=40 must be a multiple of 16"),
        ({"K": 48, "format": "mxfp4"}, "K=48 must be a multiple of 32: blocks of mxfp4"),
        ({"rms_norm": True, "eps": 0.0}, "eps=0.0 must be at least 1e-12"),
    ],
)
def test_an_invalid_problem_is_refused(axes: dict, words: str) -> None:
    problem: Problem = rows(2, 64)
    with pytest.raises(InvalidArgument, match=words):
        QUANTIZE.problem(**{**problem.values, **axes})
