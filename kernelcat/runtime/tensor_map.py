"""TMA descriptors: what the hardware can take, and one descriptor an address, encoded once."""

from __future__ import annotations

import ctypes

from kernelcat.catalog.implementation import TensorMap
from kernelcat.dtypes import itemsize
from kernelcat.errors import InvalidArgument
from kernelcat.runtime import driver

KEPT = 1024
"""Descriptors a parameter keeps before it forgets them all."""

_ALIGNMENT = 64
_BYTES = 128
_DTYPES = {"uint8": 0, "float8_e4m3fn": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


def why_not(tensor_map: TensorMap) -> str | None:
    """Why the hardware cannot take ``tensor_map``, whatever the address; None when it can."""
    t = tensor_map
    if t.dtype not in _DTYPES:
        return f"a TMA descriptor has no element type {t.dtype}; use one of {', '.join(_DTYPES)}"
    rank = len(t.shape)
    if not 1 <= rank <= 5 or (len(t.box), len(t.strides)) != (rank, rank - 1):
        return "a TMA descriptor has 1 to 5 sizes, as many box sizes, and one stride less"
    row_bytes = t.box[0] * itemsize(t.dtype)
    rules = (
        (all(0 < size <= 1 << 32 for size in t.shape), f"sizes {t.shape} must be 1 to 2**32"),
        (all(s % 16 == 0 and 0 < s < 1 << 40 for s in t.strides),
         f"strides {t.strides} must be multiples of 16 bytes below 2**40"),
        (all(0 < size <= 256 for size in t.box), f"box {t.box} must be 1 to 256 in each dimension"),
        (row_bytes % 16 == 0, f"a box row takes {row_bytes} bytes, which is no multiple of 16"),
        (t.swizzle in _SWIZZLES, f"swizzle {t.swizzle} must be 0, 32, 64 or 128 bytes"),
        (t.swizzle == 0 or row_bytes <= t.swizzle,
         f"a box row takes {row_bytes} bytes, more than its swizzle span {t.swizzle}"),
        (t.promoted_bytes in _L2_PROMOTIONS,
         f"l2_promotion {t.l2_promotion} must be 0, 64, 128 or 256 bytes"),
    )  # fmt: skip
    return next((f"TMA descriptor: {why}" for legal, why in rules if not legal), None)


class Descriptors:
    """The descriptors of one parameter, by address. Belongs to one frame: not thread-safe."""

    __slots__ = ("_addresses", "_memory", "_tensor_map")

    def __init__(self, tensor_map: TensorMap) -> None:
        self._tensor_map = tensor_map
        self._addresses: dict[int, int] = {}
        self._memory: list[ctypes.Array[ctypes.c_char]] = []

    def at(self, pointer: int) -> int:
        """Host address of the descriptor for the tensor at ``pointer``, valid until the next call.

        Address 0 (an absent optional tensor) has a descriptor of zeros, which no kernel may use.
        """
        address = self._addresses.get(pointer)
        if address is None:
            if len(self._addresses) >= KEPT:
                self._addresses.clear()
                self._memory.clear()
            address = self._addresses[pointer] = self._encode(pointer)
        return address

    def _encode(self, pointer: int) -> int:
        t = self._tensor_map
        if pointer % 16:
            raise InvalidArgument(
                f"{t.tensor} starts at an address that is no multiple of 16 bytes, which TMA "
                "needs: copy it, or use an implementation without TMA"
            )
        memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        if pointer:
            driver.opened().encode_tiled(
                address, _DTYPES[t.dtype], pointer, t.shape, t.strides, t.box,
                _SWIZZLES[t.swizzle], _L2_PROMOTIONS[t.promoted_bytes],
            )  # fmt: skip
        self._memory.append(memory)
        return address
