"""Element types by name, and their storage in NumPy and CuPy arrays.

The checker and the tuner use *storage arrays*: for example, bfloat16 values are stored as
``uint16``, because NumPy and CuPy have no arithmetic for bfloat16. ``decode`` converts storage to
float32 values, and ``encode`` rounds float32 values to storage (to nearest, ties to even). Both
work on NumPy and CuPy arrays.

An element of float4_e2m1fn_x2 is a byte with two values, the first value in the low half. So the
last axis of a storage array is half as long as the last axis of its values.
"""

from __future__ import annotations

from typing import Any

STORAGE = {
    "bfloat16": "uint16",
    "float4_e2m1fn_x2": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e8m0fnu": "uint8",
    "float16": "float16",
    "float32": "float32",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
"""Element type -> NumPy dtype of its storage."""

E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""

E2M1_MAX = 6.0
"""Largest value in float4_e2m1fn_x2."""

_SIZES = {
    "bfloat16": 2, "float4_e2m1fn_x2": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "float16": 2,
    "float32": 4, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Size of an element of ``dtype`` in bytes."""
    return _SIZES[dtype]


def decode(array: Any, dtype: str) -> Any:
    """Float32 values of a storage array of element type ``dtype``; integers for int32 and int64.

    The shape stays, but for float4_e2m1fn_x2: (..., n) becomes (..., 2 n).
    """
    if dtype in ("int32", "int64"):
        return array
    if dtype == "bfloat16":
        return (array.astype("uint32") << 16).view("float32")
    if dtype == "float8_e4m3fn":
        return _decode_e4m3(array)
    if dtype == "float8_e8m0fnu":
        return _decode_e8m0(array)
    if dtype == "float4_e2m1fn_x2":
        return _decode_e2m1(array)
    return array.astype("float32")


def encode(values: Any, dtype: str) -> Any:
    """The storage array of finite float32 ``values`` rounded to ``dtype``.

    The shape stays, but for float4_e2m1fn_x2: (..., 2 n) becomes (..., n). uint8 takes values
    modulo 256. Values beyond the largest of float8_e4m3fn (448) or float4_e2m1fn_x2 (6) become the
    largest, as in the hardware's saturating conversions. For float8_e8m0fnu all values must be
    powers of two, or NaN.
    """
    if dtype == "uint8":
        return values.astype("int32").astype("uint8")
    if dtype == "float8_e4m3fn":
        return _encode_e4m3(values.astype("float32"))
    if dtype == "float8_e8m0fnu":
        return (values.astype("float32").view("uint32") >> 23 & 0xFF).astype("uint8")
    if dtype == "float4_e2m1fn_x2":
        return _encode_e2m1(values.astype("float32"))
    if dtype != "bfloat16":
        return values.astype(STORAGE[dtype])
    bits = values.astype("float32").view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


def _decode_e4m3(array: Any) -> Any:
    """Decodes a sign, 4 exponent bits (bias 7) and 3 mantissa bits; 0x7F is NaN, no code infinity.

    No intermediate value is a float32 subnormal, because CuPy's kernels flush those to zero.
    """
    bits = array.astype("uint32")
    exponent, mantissa = (bits >> 3) & 0xF, bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).view("float32") * (exponent != 0)
    magnitude = normal + mantissa.astype("float32") * 2.0**-9 * (exponent == 0)
    nan_bits = ((bits & 0x7F) == 0x7F).astype("uint32") * 0x7FC00000
    return (magnitude.view("uint32") | nan_bits | ((bits & 0x80) << 24)).view("float32")


def _encode_e4m3(values: Any) -> Any:
    """Rounds to nearest, ties to even; NaN becomes 0x7F.

    All cases are computed for every element, and masks select one of the results.
    """
    bits = values.view("uint32")
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = ((bits & 0x7FFFFFFF) * (~is_nan)).view("float32").clip(0.0, E4M3_MAX)
    # Codes below 2^-6 are 2^-9 apart, as float32 values are at 2^14: adding 2^14 rounds to them.
    subnormal = ((magnitude + 2.0**14) - 2.0**14) * 2.0**9
    exact = magnitude.view("uint32")
    normal = ((exact + 0x7FFFF + ((exact >> 20) & 1)) >> 20) - (120 << 3)
    is_small = magnitude < 2.0**-6
    code = normal * (~is_small) + subnormal.astype("uint32") * is_small
    code = code * (~is_nan) + is_nan * 0x7F
    return (code | ((bits >> 24) & 0x80)).astype("uint8")


def _decode_e8m0(array: Any) -> Any:
    """Decodes 2^(code - 127); 0xFF is NaN. The smallest value, 2^-127, is a float32 subnormal."""
    bits = array.astype("uint32")
    return (bits << 23 | ((bits == 0) | (bits == 0xFF)).astype("uint32") << 22).view("float32")


def _decode_e2m1(array: Any) -> Any:
    """Decodes a sign, 2 exponent bits (bias 1) and 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    codes = array[..., None].repeat(2, axis=-1)
    codes[..., 1] >>= 4
    bits = codes.reshape(*array.shape[:-1], 2 * array.shape[-1]).astype("uint32")
    magnitude = bits & 7
    normal = ((magnitude + (126 << 1)) << 22).view("float32") * (magnitude > 1)
    value = normal + magnitude.astype("float32") * 0.5 * (magnitude < 2)
    return (value.view("uint32") | ((bits & 8) << 28)).view("float32")


def _encode_e2m1(values: Any) -> Any:
    """Rounds to nearest, ties to even, and packs neighbours of the last axis into one byte."""
    bits = values.view("uint32")
    magnitude = (bits & 0x7FFFFFFF).view("float32").clip(0.0, E2M1_MAX)
    # Codes are 0.5 apart below 2, 1 apart below 4 and 2 apart from 4 on, as float32 values are at
    # 2^22, 2^23 and 2^24: adding that power of two rounds to them.
    offset = 2.0**22 * (1 + (magnitude >= 2) + 2 * (magnitude >= 4)).astype("float32")
    rounded = (magnitude + offset) - offset
    subnormal = (rounded * 2).astype("uint32") * (rounded < 1)
    normal = ((rounded.view("uint32") >> 22) - (126 << 1)) * (rounded >= 1)
    code = (subnormal + normal | ((bits >> 28) & 8)).astype("uint8")
    return code[..., ::2] | (code[..., 1::2] << 4)
