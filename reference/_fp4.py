"""NVFP4 and MXFP4: pairs of E2M1 values in a byte (the first in its low half) and block scales.

    format   elements a scale   scale            global scale   value
    nvfp4    16 of a row        float8_e4m3fn    float32        e2m1 * scale * global_scale
    mxfp4    32 of a row        float8_e8m0fnu   none           e2m1 * scale

Scales are (rows, K / block): ``linear`` as they are, ``swizzled`` padded by zeros to multiples of
(128, 4) in the order that cuBLASLt and CUTLASS read: tiles of 128 x 4 one after another, and in a
tile scale (r, c) is byte ``r % 32 * 16 + r // 32 * 4 + c``.

The arithmetic of quantization is float32, every operation rounded to nearest, so that bytes are
the same everywhere. Of a block ``h`` with ``amax = max |h|``:

    nvfp4    scale = e4m3(clamp(amax * c, 2^-6, 448)),  c = 1 / (6 * global_scale)
             inverse = 1 / (scale * global_scale)
    mxfp4    scale = 2^max(floor(log2(min(amax, largest float32))) - 2, -127)   (OCP's MX)
             inverse = 1 / scale
    codes = e2m1(h * inverse)        to nearest, ties to even, saturating at +-6

What follows, for both: a block of zeros has the least scale (2^-6 or 2^-127) and codes that keep
the signs of zeros; what lies beyond 6 times the largest scale saturates, and so do infinities,
which give their block the largest scale there is (448, 2^125). A NaN has no code: its block's scale
is NaN and its codes are 0, so that all of the block comes back as NaN. The quantizer makes no
subnormal E4M3 scale; what reads scales takes them as they are.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Derived, ElementType
from kernelcat.reference._arrays import library_of

FORMATS = ("nvfp4", "mxfp4")
BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""Elements of a row that share a scale."""
LAYOUTS = ("linear", "swizzled")
TILE_ROWS, TILE_COLS = 128, 4
"""Scales of a tile of the swizzled layout."""

CODES = "float4_e2m1fn_x2"
SCALE = ElementType.of("format", nvfp4="float8_e4m3fn", mxfp4="float8_e8m0fnu")
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF}
LEAST_SCALE = 2.0**-6
"""Of NVFP4 blocks when quantized: the least normal E4M3."""
GLOBAL_RANGE = (2.0**-64, 2.0**64)
"""What a global scale may be, so that nothing of it is subnormal or infinite."""


def block_of(axes):
    """Elements of a row that share a scale."""
    return 16 if axes["format"] == "nvfp4" else 32


def _padded(axes, extent, step):
    return -(-extent // step) * step if axes["scale_layout"] == "swizzled" else extent


def scale_sizes(rows: str) -> tuple[Derived, Derived]:
    """Sizes of the scales of a matrix of axis ``rows`` and K columns."""
    return (
        Derived(f"{rows}, swizzled to 128", lambda axes: _padded(axes, axes[rows], TILE_ROWS)),
        Derived(
            "K/16 (nvfp4) or K/32 (mxfp4), swizzled to 4",
            lambda axes: _padded(axes, axes["K"] // block_of(axes), TILE_COLS),
        ),
    )


HALF_K = Derived("K/2", lambda axes: axes["K"] // 2)


def swizzle(scales, fill: int = 0):
    """(rows, columns) bytes in the swizzled layout's order, padded with ``fill``."""
    xp = library_of(scales)
    rows, cols = scales.shape
    tiles, tile_cols = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    padded = xp.full((tiles * TILE_ROWS, tile_cols * TILE_COLS), fill, dtype="uint8")
    padded[:rows, :cols] = scales
    parts = padded.reshape(tiles, 4, 32, tile_cols, TILE_COLS)
    return parts.transpose(0, 3, 2, 1, 4).reshape(padded.shape)


def unswizzle(scales, rows: int, cols: int):
    """The inverse of :func:`swizzle`, without the padding."""
    tiles, tile_cols = scales.shape[0] // TILE_ROWS, scales.shape[1] // TILE_COLS
    parts = scales.reshape(tiles, tile_cols, 32, 4, TILE_COLS)
    return parts.transpose(0, 3, 2, 1, 4).reshape(scales.shape)[:rows, :cols]


def laid_out(axes, scales):
    """(rows, K / block) bytes as the problem's layout has them."""
    return swizzle(scales) if axes["scale_layout"] == "swizzled" else scales


def linear(axes, scales, rows: int):
    """(rows, K / block) of scales in the problem's layout, whatever they are stored as."""
    if axes["scale_layout"] == "swizzled":
        return unswizzle(scales, rows, axes["K"] // block_of(axes))
    return scales


# ---- quantization -------------------------------------------------------------------------------


def exact(x, dtype: str):
    """Float64 values of bfloat16 or float16 storage, subnormals among them.

    CuPy's kernels would flush a bfloat16 subnormal as a float32.
    """
    if dtype != "bfloat16":
        return x.astype("float64")
    bits = x.astype("uint32")
    kept = 0x8000 | (bits & 0x7F80 != 0) * 0x7FFF
    normal = ((bits & kept) << 16).astype("uint32").view("float32").astype("float64")
    subnormal = (bits & 0x7F) * 2.0**-133 * (bits & 0x7F80 == 0)
    return normal + subnormal * (1.0 - (bits >> 15) * 2.0)


def scales_of(amax, format: str, global_scale=None):
    """``(bytes, inverse)`` of blocks with the largest elements ``amax`` (float32, no NaN)."""
    xp = library_of(amax)
    if format == "mxfp4":
        bits = xp.minimum(amax, xp.float32(3.4028235e38)).view("uint32")
        code = xp.maximum(bits >> 23, 2) - 2
        return code.astype("uint8"), (254 - code << 23).astype("uint32").view("float32")
    one = xp.float32(1)
    per_six = one / (xp.float32(dtypes.E2M1_MAX) * global_scale)
    scale = (amax * per_six).clip(xp.float32(LEAST_SCALE), xp.float32(dtypes.E4M3_MAX))
    code = dtypes.encode(scale, "float8_e4m3fn")
    return code, one / (dtypes.decode(code, "float8_e4m3fn") * global_scale)


def quantize(h, format: str, global_scale=None, random=None):
    """``(codes, scales)`` of float64 ``h`` (rows, K) whose values are float32's.

    Codes are packed, (rows, K / 2) bytes; scales (rows, K / block). ``random`` (rows, K), nine
    bits each, asks for stochastic rounding.
    """
    xp = library_of(h)
    size = BLOCKS[format]
    amax = abs(h).reshape(len(h), h.shape[1] // size, size).max(axis=2).astype("float32")
    missing = xp.isnan(amax)
    scales, inverse = scales_of(xp.where(missing, xp.float32(0), amax), format, global_scale)
    lost = missing.repeat(size, axis=1)
    wide = xp.where(lost, 0.0, h) * inverse.astype("float64").repeat(size, axis=1)
    y = wide.clip(-dtypes.E2M1_MAX, dtypes.E2M1_MAX).astype("float32")
    codes = dtypes.encode(y, CODES) if random is None else stochastic(y, random)
    codes = codes * ~(lost[:, ::2])
    return codes.astype("uint8"), xp.where(missing, NAN_SCALE[format], scales).astype("uint8")


def stochastic(y, random):
    """Packed codes of float32 ``y`` (at most 6), rounded up with the chance that is its fraction.

    The magnitude times 2^-14 is rounded to float16, whose bits hold a code (the exponent's and the
    mantissa's highest, also below 1, where numbers of both types are evenly spaced) and nine bits
    below, to which nine random bits are added.
    """
    xp = library_of(y)
    bits = (abs(y) * xp.float32(2.0**-14)).astype("float16").view("uint16").astype("uint32")
    code = bits + random.astype("uint32") >> 9 | y.view("uint32") >> 28 & 8
    return (code[:, ::2] | code[:, 1::2] << 4).astype("uint8")


def dequantize(codes, scales, format: str, global_scale=None):
    """Float32 (rows, K) of packed codes and linear scales as bytes; times ``global_scale`` last."""
    values = dtypes.decode(codes, CODES)
    scale = dtypes.decode(scales, dict(SCALE.types)[format]).repeat(BLOCKS[format], axis=1)
    values = values * scale
    return values if global_scale is None else values * global_scale


def global_scale_of(amax: float) -> float:
    """NVFP4's global scale for a tensor whose largest element is ``amax``: amax / (6 * 448).

    It is what values are *multiplied* by when they are read; some libraries pass its inverse.
    Tensors of zeros get the least that a global scale may be.
    """
    least, most = GLOBAL_RANGE
    return min(max(amax / (dtypes.E2M1_MAX * dtypes.E4M3_MAX), least), most)
