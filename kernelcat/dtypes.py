"""Element types by name, and how each is stored in NumPy and CuPy arrays.

Arrays inside the checker and the tuner hold *storage*: bfloat16 lies in ``uint16``, since CuPy and
NumPy have no arithmetic of their own for it. ``decode`` gives float32 values, ``encode`` rounds
them back (to nearest, ties to even). Both work on NumPy and CuPy arrays alike.
"""

from __future__ import annotations

from typing import Any

STORAGE = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "uint8": "uint8",
    "int32": "int32",
}
"""Element type name -> the NumPy dtype its bytes are held in."""

_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1, "int32": 4}


def itemsize(dtype: str) -> int:
    """Bytes an element of ``dtype`` takes."""
    return _SIZES[dtype]


def decode(array: Any, dtype: str) -> Any:
    """Float32 values of a storage array of element type ``dtype``."""
    if dtype == "bfloat16":
        return (array.astype("uint32") << 16).view("float32")
    return array.astype("float32")


def encode(values: Any, dtype: str) -> Any:
    """Storage of finite float32 ``values`` rounded to ``dtype``; modulo 256 for uint8."""
    if dtype == "uint8":
        return values.astype("int32").astype("uint8")
    if dtype != "bfloat16":
        return values.astype(STORAGE[dtype])
    bits = values.astype("float32").view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")
