"""Element types by name, and how each is stored in NumPy and CuPy arrays.

Arrays inside the checker and the tuner hold *storage*: bfloat16 lies in ``uint16``, since CuPy and
NumPy have no arithmetic of their own for it. ``decode`` gives float32 values, ``encode`` rounds
them back (to nearest, ties to even). Both work on NumPy and CuPy arrays alike.

An element of float4_e2m1fn_x2 is a byte with two values, the first in its low half: its last axis
is half as long as that of the values.
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
}
"""Element type name -> the NumPy dtype its bytes are held in."""

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""

E2M1_MAX = 6.0
"""The largest value of a half of float4_e2m1fn_x2."""

_SIZES = {
    "bfloat16": 2, "float4_e2m1fn_x2": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "float16": 2,
    "float32": 4, "uint8": 1, "int32": 4,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes an element of ``dtype`` takes."""
    return _SIZES[dtype]


def decode(array: Any, dtype: str) -> Any:
    """Float32 values of a storage array of element type ``dtype``; int32 as it is."""
    if dtype == "int32":
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
    """Storage of finite float32 ``values`` rounded to ``dtype``.

    uint8 takes them modulo 256; what is beyond float8_e4m3fn's 448 or float4_e2m1fn_x2's 6 becomes
    that, as the hardware's saturating conversions make it. float8_e8m0fnu has powers of two only:
    the values must be such, or NaN.
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
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is NaN, and there is no infinity.

    No step makes a float32 subnormal, which CuPy's kernels flush to zero.
    """
    bits = array.astype("uint32")
    exponent, mantissa = (bits >> 3) & 0xF, bits & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).view("float32") * (exponent != 0)
    magnitude = normal + mantissa.astype("float32") * 2.0**-9 * (exponent == 0)
    missing = ((bits & 0x7F) == 0x7F).astype("uint32") * 0x7FC00000
    return (magnitude.view("uint32") | missing | ((bits & 0x80) << 24)).view("float32")


def _encode_e4m3(values: Any) -> Any:
    """To nearest, ties to even; NaN becomes 0x7F. Every branch is taken, and one result kept."""
    bits = values.view("uint32")
    missing = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = ((bits & 0x7FFFFFFF) * (~missing)).view("float32").clip(0.0, E4M3_MAX)
    # Below 2^-6 the step is 2^-9, which is float32's own step at 2^14.
    subnormal = ((magnitude + 2.0**14) - 2.0**14) * 2.0**9
    exact = magnitude.view("uint32")
    normal = ((exact + 0x7FFFF + ((exact >> 20) & 1)) >> 20) - (120 << 3)
    is_small = magnitude < 2.0**-6
    code = normal * (~is_small) + subnormal.astype("uint32") * is_small
    code = code * (~missing) + missing * 0x7F
    return (code | ((bits >> 24) & 0x80)).astype("uint8")


def _decode_e8m0(array: Any) -> Any:
    """2^(code - 127); 0xFF is NaN. The lowest, 2^-127, is a float32 subnormal."""
    bits = array.astype("uint32")
    return (bits << 23 | ((bits == 0) | (bits == 0xFF)).astype("uint32") << 22).view("float32")


def _decode_e2m1(array: Any) -> Any:
    """Sign, 2 bits of exponent (bias 1), 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
    codes = array[..., None].repeat(2, axis=-1)
    codes[..., 1] >>= 4
    bits = codes.reshape(*array.shape[:-1], 2 * array.shape[-1]).astype("uint32")
    magnitude = bits & 7
    normal = ((magnitude + (126 << 1)) << 22).view("float32") * (magnitude > 1)
    value = normal + magnitude.astype("float32") * 0.5 * (magnitude < 2)
    return (value.view("uint32") | ((bits & 8) << 28)).view("float32")


def _encode_e2m1(values: Any) -> Any:
    """To nearest, ties to even, in pairs."""
    bits = values.view("uint32")
    magnitude = (bits & 0x7FFFFFFF).view("float32").clip(0.0, E2M1_MAX)
    # The step is 0.5 below 2, then 1, and from 4 on 2: float32's own at 2^22, 2^23 and 2^24.
    far = 2.0**22 * (1 + (magnitude >= 2) + 2 * (magnitude >= 4)).astype("float32")
    rounded = (magnitude + far) - far
    subnormal = (rounded * 2).astype("uint32") * (rounded < 1)
    normal = ((rounded.view("uint32") >> 22) - (126 << 1)) * (rounded >= 1)
    code = (subnormal + normal | ((bits >> 28) & 8)).astype("uint8")
    return code[..., ::2] | (code[..., 1::2] << 4)
