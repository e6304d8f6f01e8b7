"""NVFP4 and MXFP4 as defined: special values, layouts, random bits, and how much they lose."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import Problem
from kernelcat.reference import _fp4, _nvfp4_peers, _philox
from kernelcat.reference.nvfp4_quantize import normalized, rotated, rows
from kernelcat.verify import gate

QUANTIZE, DEQUANTIZE = catalog.entry("nvfp4_quantize"), catalog.entry("nvfp4_dequantize")


def quantized(x, format: str = "nvfp4", global_scale: float = 1.0, **more):
    """Codes (rows, K) and scale bytes of ``x`` as bfloat16; ``more`` are optional arrays."""
    flags = {
        "rms_norm": "weight" in more,
        "hadamard": "signs" in more,
        "stochastic": "seed" in more,
    }
    problem = rows(*x.shape, format, **flags)
    arrays = {"x": dtypes.encode(np.float32(x), "bfloat16"), **more}
    if format == "nvfp4":
        arrays["global_scale"] = np.float32([global_scale])
    found = QUANTIZE.oracle(problem, arrays)
    codes = np.stack((found["q"] & 15, found["q"] >> 4), axis=-1).reshape(x.shape)
    return codes, found["scale"]


def restored(codes, scale, format: str = "nvfp4", global_scale: float | None = 1.0):
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    given = np.float32([global_scale]) if format == "nvfp4" else None
    return _fp4.dequantize(packed, scale, format, given)


def sqnr(x, found) -> float:
    """Signal to quantization noise, in dB."""
    return float(10 * np.log10((x**2).sum() / ((x - found) ** 2).sum()))


def block(*values: float, size: int = 16):
    """One block that begins with ``values``, then zeros."""
    return np.float32([[*values, *(size - len(values)) * [0.0]]])


# ---- special values -----------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "scale"), [("nvfp4", 0x08), ("mxfp4", 0)])
def test_a_block_of_zeros_has_the_least_scale_and_keeps_signs(format: str, scale: int) -> None:
    codes, scales = quantized(block(0.0, -0.0, size=32), format)
    assert codes.tolist() == [[0, 8, *30 * [0]]]
    assert (scales == scale).all()
    assert not restored(codes, scales, format).any()


def test_a_nan_takes_its_block_and_no_other() -> None:
    x = np.ones((2, 64), "float32")
    x[1, 5] = np.nan
    for format, size, nan in (("nvfp4", 16, 0x7F), ("mxfp4", 32, 0xFF)):
        codes, scales = quantized(x, format)
        assert scales[1, 0] == nan and (scales == nan).sum() == 1
        assert (codes[1, :size] == 0).all()
        found = restored(codes, scales, format)
        assert np.isnan(found[1, :size]).all() and np.isnan(found).sum() == size


def test_infinities_saturate_at_the_largest_scale() -> None:
    codes, scales = quantized(block(np.inf, -np.inf, 2000.0))
    assert scales.tolist() == [[0x7E]] and codes[0, :3].tolist() == [7, 15, 6]  # 2000 / 448 = 4.5
    assert restored(codes, scales)[0, :3].tolist() == [2688, -2688, 1792]
    codes, scales = quantized(block(np.inf, 3.0e38, size=32), "mxfp4")
    assert scales.tolist() == [[252]] and codes[0, :2].tolist() == [7, 7]


def test_outliers_saturate_beyond_what_the_global_scale_reaches() -> None:
    codes, scales = quantized(block(1e6, -5376.0, 896.0))
    assert scales.tolist() == [[0x7E]] and codes[0, :3].tolist() == [7, 15, 4]
    wide, same = quantized(block(1e6, -5376.0, 896.0), global_scale=1e6 / 2688)
    assert same.tolist() == [[0x7E]] and wide[0, :3].tolist() == [7, 8, 0]


def test_small_blocks_get_the_least_scale_never_a_subnormal_one() -> None:
    codes, scales = quantized(block(2.0**-7, -(2.0**-6), 2.0**-10))
    assert scales.tolist() == [[0x08]] and codes[0, :3].tolist() == [1, 10, 0]


def test_subnormal_scales_are_read_as_they_are() -> None:
    codes = np.uint8([[2, 7, *14 * [0]]])
    assert restored(codes, np.uint8([[1]]))[0, :2].tolist() == [2.0**-9, 6 * 2.0**-9]
    codes = np.uint8([[1, 7, *30 * [0]]])
    assert restored(codes, np.uint8([[0]]), "mxfp4")[0, :2].tolist() == [2.0**-128, 1.5 * 2.0**-125]


def test_subnormal_elements_count() -> None:
    codes, scales = quantized(block(2.0**-127, -(2.0**-133), 3 * 2.0**-129, size=32), "mxfp4")
    assert scales.tolist() == [[0]] and codes[0, :3].tolist() == [2, 8, 2]


def test_mxfp4_has_the_shared_exponent_of_ocp() -> None:
    for amax, exponent in ((1.0, -2), (1.99, -2), (6.0, 0), (7.9, 0), (8.0, 1)):
        codes, scales = quantized(block(amax, size=32), "mxfp4")
        assert scales.tolist() == [[127 + exponent]], amax
    assert codes[0, 0] == 6  # 8 = 4 * 2


def test_every_value_of_a_format_comes_back_as_it_was() -> None:
    values = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((values, -values))[None, :] * np.float32([[0.25], [1.0], [448.0]])
    assert (restored(*quantized(values)) == values).all()
    values = np.repeat(values, 2, axis=1)
    found = restored(*quantized(values[:2], "mxfp4"), "mxfp4")
    assert (found == values[:2]).all()


def test_the_global_scale_is_what_values_are_multiplied_by() -> None:
    x = np.float32(np.random.default_rng(0).standard_normal((64, 64)))
    g = _fp4.global_scale_of(float(abs(x).max()))
    codes, scales = quantized(x, global_scale=g)
    assert scales.max() == 0x7E and abs(codes & 7).max() == 7
    assert abs(restored(codes, scales, global_scale=g) - x).max() < 0.5
    assert _fp4.global_scale_of(0.0) == 2.0**-64 and _fp4.global_scale_of(2688.0) == 1.0


# ---- layouts ------------------------------------------------------------------------------------


def test_swizzled_scales_lie_where_cublaslt_reads_them() -> None:
    linear = np.arange(200 * 9, dtype="uint32").astype("uint8").reshape(200, 9)
    bytes_ = _fp4.swizzle(linear)
    assert bytes_.shape == (256, 12)
    used = np.zeros(bytes_.size, bool)
    for r, c in np.ndindex(linear.shape):
        at = ((r // 128) * 3 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        used[at] = True
        assert bytes_.flat[at] == linear[r, c]
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
def test_philox_gives_its_authors_answers(key, counter, words) -> None:
    found = _philox.philox(key, tuple(np.uint64([word]) for word in counter))
    assert tuple(int(word[0]) for word in found) == words


def test_stochastic_rounding_is_right_in_the_mean_and_only_goes_to_neighbours() -> None:
    values = np.float32([0.1, 0.3, 0.9, 1.1, 1.9, 2.25, 3.875, 4.5, 5.75])
    x = np.tile(block(6.0, *values), (8192, 1))
    codes, _ = quantized(x, seed=np.int32([1, -2]))
    x = dtypes.decode(dtypes.encode(x[0], "bfloat16"), "bfloat16")  # 0.1 is no bfloat16
    levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for i in range(1, 10):
        found = np.unique(levels[codes[:, i]])
        below = np.searchsorted(levels, x[i], side="right") - 1
        assert set(found) == {levels[below], levels[below + 1]}
        step = levels[below + 1] - levels[below]
        assert abs(levels[codes[:, i]].mean() - x[i]) < 4 * step / 2 / 8192**0.5
    assert (codes[:, 0] == 7).all()
    together = np.corrcoef(codes[:, 1:10].T) - np.eye(9)  # neighbours share two random bits
    assert abs(together).max() < 5 / 8192**0.5
    again, _ = quantized(np.tile(block(6.0, *values), (8192, 1)), seed=np.int32([1, -1]))
    assert (again != codes).any()


def test_the_transform_is_orthogonal_and_its_own_inverse() -> None:
    h = np.float32(np.random.default_rng(0).standard_normal((5, 64)))
    signs, ones = np.where(np.arange(16) % 3, 1, -1).astype("float32"), np.ones(16, "float32")
    turned = rotated(h, signs)
    assert np.allclose((turned**2).sum(), (h**2).sum())
    assert np.allclose(rotated(turned, ones) * np.tile(signs, 4), h, atol=1e-6)


def test_rms_norm_is_that_of_float64() -> None:
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((4, 720)), random.standard_normal(720)
    found = normalized(np.float32(x), np.float32(weight), 1e-5)
    wanted = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_options_follow_one_another() -> None:
    """RMSNorm, transform and rounding in one call are the same as one by one."""
    random = np.random.default_rng(0)
    x = dtypes.encode(np.float32(random.standard_normal((3, 64))), "bfloat16")
    x = dtypes.decode(x, "bfloat16")
    weight, signs, seed = np.ones(64, "float32"), np.ones(16, "float32"), np.int32([3, 4])
    codes, scales = quantized(
        x, global_scale=0.01, signs=signs, seed=seed, weight=dtypes.encode(weight, "bfloat16")
    )
    h = rotated(normalized(x, weight, 1e-5), signs).astype("float64")
    packed, wanted = _fp4.quantize(h, "nvfp4", np.float32([0.01]), _philox.nine_bits(seed, 3, 64))
    assert (scales == wanted).all() and (codes[:, ::2] | codes[:, 1::2] << 4 == packed).all()


# ---- accuracy -----------------------------------------------------------------------------------


def test_normal_weights_keep_enough_signal() -> None:
    x = np.float32(np.random.default_rng(0).standard_normal((256, 1024))) * np.float32(0.02)
    g = _fp4.global_scale_of(float(abs(x).max()))
    nvfp4 = sqnr(x, restored(*quantized(x, global_scale=g), global_scale=g))
    mxfp4 = sqnr(x, restored(*quantized(x, "mxfp4"), "mxfp4"))
    assert 18 <= nvfp4 < 24 and 12 <= mxfp4 < nvfp4


def test_what_was_rotated_comes_back_by_the_same_signs() -> None:
    random = np.random.default_rng(0)
    x = random.laplace(size=(256, 256)).astype("float32")
    g = _fp4.global_scale_of(float(abs(x).max()) * 4)
    signs = np.float32(random.choice([-1.0, 1.0], 16))
    turned = restored(*quantized(x, global_scale=g, signs=signs), global_scale=g)
    back = rotated(turned, np.ones(16, "float32"))
    assert sqnr(x, back * np.tile(signs, 16)) > 18 > 3 > sqnr(x, back)


# ---- the gate and the peers ---------------------------------------------------------------------


def test_one_wrong_bit_of_codes_or_scales_is_seen() -> None:
    from types import SimpleNamespace

    host = SimpleNamespace(xp=np, synchronize=lambda: None)
    prepared = gate.prepare(QUANTIZE, rows(5, 64), host)

    def answer(**flips: int):
        def run() -> None:
            for name, expected in prepared.expected.items():
                prepared.arrays[name][...] = expected
                prepared.arrays[name][2, 1] ^= flips.get(name, 0)

        return lambda arrays: run

    assert prepared.verify(answer()).passed
    assert not prepared.verify(answer(q=8)).passed
    assert not prepared.verify(answer(scale=1)).passed


@pytest.mark.parametrize("format", _fp4.FORMATS)
@pytest.mark.parametrize("name", ["nvfp4_quantize", "nvfp4_dequantize"])
def test_the_peers_mean_the_same(name: str, format: str) -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    entry = catalog.entry(name)
    problem = entry.problem(M=70, K=512, dtype="bfloat16", format=format)
    prepared = gate.prepare(entry, problem, SimpleNamespace(xp=np, synchronize=lambda: None), 3)
    arrays = {n: torch.from_numpy(a.copy()) for n, a in prepared.arrays.items()}
    given = arrays.get("global_scale")
    if name == "nvfp4_quantize":
        found = _nvfp4_peers.quantized(torch, arrays["x"].view(torch.bfloat16), format, given)
        for output, bytes_ in zip(("q", "scale"), found, strict=True):
            assert (bytes_.numpy() == prepared.expected[output]).all()
    else:
        x = _nvfp4_peers.dequantized(torch, arrays["q"], arrays["scale"], format, given)
        wanted = dtypes.decode(prepared.expected["x"], "bfloat16")
        assert np.array_equal(x.bfloat16().float().numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"K": 40}, "K=40 must be a multiple of 16"),
        ({"K": 48, "format": "mxfp4"}, "blocks of mxfp4 are 32 elements long"),
        ({"rms_norm": True, "eps": 0.0}, "eps must be 1e-12"),
    ],
)
def test_what_makes_no_sense_is_refused(axes: dict, words: str) -> None:
    from kernelcat.errors import InvalidArgument

    problem: Problem = rows(2, 64)
    with pytest.raises(InvalidArgument, match=words):
        QUANTIZE.problem(**{**problem.values, **axes})
