"""NVFP4 and MXFP4: E2M1 values, two in a byte, with a scale for each block of a row.

E2M1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Of the two codes in a byte, the
low half holds the element of the even column.

    format   block           scale            global scale   value
    nvfp4    16 of a row     float8_e4m3fn    float32        e2m1 * scale * global_scale
    mxfp4    32 of a row     float8_e8m0fnu   none           e2m1 * scale

A (rows, K) matrix has (rows, K / block) scales. The ``linear`` layout stores them in this shape.
The ``swizzled`` layout is the one that cuBLASLt and CUTLASS read: scales are padded with zeros to
multiples of 128 rows and 4 columns and stored in tiles of 128 x 4, one tile after another. Within
a tile, scale (r, c) is byte ``r % 32 * 16 + r // 32 * 4 + c``.

Quantization is defined by float32 operations, each rounded to nearest, so that every machine
computes the same bytes. For a block ``h`` with ``amax = max |h|``:

    nvfp4    scale = e4m3(clamp(amax * c, 2^-6, 448)),  c = 1 / (6 * global_scale)
             inverse = 1 / (scale * global_scale)
    mxfp4    scale = 2^max(floor(log2(min(amax, largest float32))) - 2, -127)
             inverse = 1 / scale
    codes = e2m1(h * inverse)        to nearest, ties to even, saturating at +-6

The scale of mxfp4 is that of the OCP Microscaling Formats (MX) specification. Special values:

- A block of zeros gets the smallest scale (2^-6 or 2^-127), and its codes keep the zeros' signs.
- An element beyond 6 times the largest scale saturates. An infinity saturates too, and its block
  gets the largest scale (448 or 2^125).
- E2M1 has no NaN. A block with a NaN gets the scale NaN and codes of 0, so that dequantization
  makes all its elements NaN.
- The quantizer makes no subnormal E4M3 scale, but dequantization and products accept them.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Derived, ElementType
from kernelcat.reference._arrays import library_of

FORMATS = ("nvfp4", "mxfp4")
BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""Elements of a row that share a scale."""
LAYOUTS = ("linear", "swizzled")
LAYOUT_DOC = "order of the scales: rows, or tiles of 128 x 4 as cuBLASLt reads them"
TILE_ROWS, TILE_COLS = 128, 4
"""Scales in a tile of the swizzled layout."""

CODES = "float4_e2m1fn_x2"
CODES_DOC = "E2M1 codes, two in a byte: the even column in the low half"
SCALE = ElementType.of("format", nvfp4="float8_e4m3fn", mxfp4="float8_e8m0fnu")
SCALE_DOC = "factor of each 16 (nvfp4) or 32 (mxfp4) elements of a row"
NAN_SCALE = {"nvfp4": 0x7F, "mxfp4": 0xFF}
MIN_NVFP4_SCALE = 2.0**-6
"""The smallest scale that the quantizer makes for NVFP4: the smallest normal E4M3."""
GLOBAL_SCALE_RANGE = (2.0**-64, 2.0**64)
"""The least and the largest global scale. Within them no scale times a global scale, and no inverse
of such a product, is a subnormal or infinite float32."""


def block_of(axes):
    """Elements of a row that share a scale."""
    return BLOCKS[axes["format"]]


def block_error(problem) -> str | None:
    """Why rows of K elements cannot be divided into blocks, or None if they can."""
    block, k = block_of(problem.values), problem["K"]
    if k % block:
        return (
            f"K={k} must be a multiple of {block}: blocks of {problem['format']} are {block} long"
        )
    return None


def padded(extent, step: int):
    """The smallest multiple of ``step`` that is at least ``extent``."""
    return -(-extent // step) * step


def swizzled_shape(rows, cols):
    """Shape of (rows, cols) scales in the swizzled layout."""
    return padded(rows, TILE_ROWS), padded(cols, TILE_COLS)


def _scale_shape(axes, rows: str):
    shape = axes[rows], axes["K"] // block_of(axes)
    return swizzled_shape(*shape) if axes["scale_layout"] == "swizzled" else shape


def scale_sizes(rows: str) -> tuple[Derived, Derived]:
    """Shape of the scales of a matrix of axis ``rows`` and K columns, in the problem's layout."""
    return (
        Derived(f"{rows} padded to 128 if swizzled", lambda axes: _scale_shape(axes, rows)[0]),
        Derived(
            "K/16 or K/32 padded to 4 if swizzled",
            lambda axes: _scale_shape(axes, rows)[1],
        ),
    )


PACKED_K = Derived("K/2", lambda axes: axes["K"] // 2, tells=("K", lambda size, axes: 2 * size))
"""Bytes of a row of K codes."""


# ---- layouts ------------------------------------------------------------------------------------


def swizzle(scales, fill: int = 0):
    """Scales (rows, columns) in the order of the swizzled layout, padded with ``fill``; uint8."""
    xp = library_of(scales)
    rows, cols = scales.shape
    wide = xp.full(swizzled_shape(rows, cols), fill, dtype="uint8")
    wide[:rows, :cols] = scales
    parts = wide.reshape(wide.shape[0] // TILE_ROWS, 4, 32, wide.shape[1] // TILE_COLS, TILE_COLS)
    return parts.swapaxes(1, 3).reshape(wide.shape)


def unswizzle(scales, rows: int, cols: int):
    """The inverse of :func:`swizzle`: (rows, cols) scales without the padding.

    ``scales`` is an array of NumPy, CuPy or torch, of any element type.
    """
    tiles, tile_cols = scales.shape[0] // TILE_ROWS, scales.shape[1] // TILE_COLS
    parts = scales.reshape(tiles, tile_cols, 32, 4, TILE_COLS)
    return parts.swapaxes(1, 3).reshape(scales.shape)[:rows, :cols]


def to_layout(axes, scales):
    """Linear scales (rows, K / block) of uint8 in the problem's layout."""
    return swizzle(scales) if axes["scale_layout"] == "swizzled" else scales


def from_layout(axes, scales, rows: int):
    """Scales in the problem's layout, of any element type, as linear ones (rows, K / block)."""
    if axes["scale_layout"] == "swizzled":
        return unswizzle(scales, rows, axes["K"] // block_of(axes))
    return scales


# ---- quantization -------------------------------------------------------------------------------


def widen(x, dtype: str):
    """Float64 values of bfloat16 or float16 storage, subnormal ones included.

    A float32 copy would not do: CuPy's kernels flush float32 subnormals to zero.
    """
    if dtype != "bfloat16":
        return x.astype("float64")
    bits = x.astype("uint32")
    mask = 0x8000 | (bits & 0x7F80 != 0) * 0x7FFF  # only the sign bit of a subnormal remains
    normal = ((bits & mask) << 16).astype("uint32").view("float32").astype("float64")
    subnormal = (bits & 0x7F) * 2.0**-133 * (bits & 0x7F80 == 0)
    return normal + subnormal * (1.0 - (bits >> 15) * 2.0)


def block_scales(amax, format: str, global_scale=None):
    """Scales, as bytes, and float32 inverses of blocks whose largest magnitudes are ``amax``.

    ``amax`` is float32 of any shape, without NaN; both results have that shape.
    """
    xp = library_of(amax)
    if format == "mxfp4":
        bits = xp.minimum(amax, xp.float32(3.4028235e38)).view("uint32")
        code = xp.maximum(bits >> 23, 2) - 2
        return code.astype("uint8"), (254 - code << 23).astype("uint32").view("float32")
    one = xp.float32(1)
    per_six = one / (xp.float32(dtypes.E2M1_MAX) * global_scale)
    scale = (amax * per_six).clip(xp.float32(MIN_NVFP4_SCALE), xp.float32(dtypes.E4M3_MAX))
    code = dtypes.encode(scale, "float8_e4m3fn")
    return code, one / (dtypes.decode(code, "float8_e4m3fn") * global_scale)


def quantize(h, format: str, global_scale=None, random=None):
    """``(codes, scales)`` of ``h`` (rows, K), float64 whose values are representable in float32.

    ``codes`` is (rows, K / 2) uint8, ``scales`` (rows, K / block) uint8. ``random`` (rows, K), nine
    random bits for each element, makes rounding stochastic.
    """
    xp = library_of(h)
    block = BLOCKS[format]
    amax = abs(h).reshape(len(h), h.shape[1] // block, block).max(axis=2).astype("float32")
    has_nan = xp.isnan(amax)
    scales, inverse = block_scales(xp.where(has_nan, xp.float32(0), amax), format, global_scale)
    is_nan = has_nan.repeat(block, axis=1)
    scaled = xp.where(is_nan, 0.0, h) * inverse.astype("float64").repeat(block, axis=1)
    y = scaled.clip(-dtypes.E2M1_MAX, dtypes.E2M1_MAX).astype("float32")
    codes = dtypes.encode(y, CODES) if random is None else encode_stochastic(y, random)
    codes = codes * ~(is_nan[:, ::2])
    return codes.astype("uint8"), xp.where(has_nan, NAN_SCALE[format], scales).astype("uint8")


def encode_stochastic(y, random):
    """Codes (rows, K / 2) of float32 ``y`` (rows, K), at most 6 in magnitude, rounded at random.

    A value between two codes becomes the upper one with a probability equal to its place between
    them. ``|y| * 2^-14`` in float16 has the E2M1 code in the low bits of its exponent and the high
    bit of its mantissa (below 1 too, where the values of both types are evenly spaced), and nine
    bits of mantissa below. Adding nine random bits to these carries into the code with the right
    probability.
    """
    xp = library_of(y)
    bits = (abs(y) * xp.float32(2.0**-14)).astype("float16").view("uint16").astype("uint32")
    code = bits + random.astype("uint32") >> 9 | y.view("uint32") >> 28 & 8
    return (code[:, ::2] | code[:, 1::2] << 4).astype("uint8")


def dequantize(codes, scales, format: str, global_scale=None):
    """Float32 (rows, K) of ``codes`` (rows, K / 2) and linear ``scales`` (rows, K / block), uint8.

    ``global_scale`` is multiplied last.
    """
    values = dtypes.decode(codes, CODES)
    scale = dtypes.decode(scales, dict(SCALE.types)[format]).repeat(BLOCKS[format], axis=1)
    values = values * scale
    return values if global_scale is None else values * global_scale


def global_scale_of(amax: float) -> float:
    """NVFP4's global scale of a tensor whose largest magnitude is ``amax``: amax / (6 * 448).

    Values are multiplied by it when they are read; some libraries pass its inverse. The result is
    at least 2^-64, which a tensor of zeros gets, and at most 2^64.
    """
    low, high = GLOBAL_SCALE_RANGE
    return min(max(amax / (dtypes.E2M1_MAX * dtypes.E4M3_MAX), low), high)
