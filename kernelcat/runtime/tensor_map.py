"""TMA tensor maps: limits of the hardware, and descriptors that are encoded once per address."""

from __future__ import annotations

import ctypes

from kernelcat.catalog.implementation import TensorMap
from kernelcat.dtypes import itemsize
from kernelcat.errors import InvalidArgument
from kernelcat.runtime import driver

MAX_DESCRIPTORS = 1024
"""Descriptors that one parameter remembers; when there are more, all are forgotten."""

_ALIGNMENT = 64  # of a CUtensorMap, in bytes
_BYTES = 128  # size of a CUtensorMap
# Values of the enums CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
_DTYPES = {"uint8": 0, "float8_e4m3fn": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


def why_not(tensor_map: TensorMap) -> str | None:
    """Why the hardware cannot use ``tensor_map`` at any address; None when it can."""
    t = tensor_map
    if t.dtype not in _DTYPES:
        return f"a TMA descriptor has no element type {t.dtype}; use one of {', '.join(_DTYPES)}"
    rank = len(t.shape)
    if not 1 <= rank <= 5 or (len(t.box), len(t.strides)) != (rank, rank - 1):
        return (
            f"a TMA descriptor has 1 to 5 sizes, as many box sizes and one stride fewer, not "
            f"{rank}, {len(t.box)} and {len(t.strides)}"
        )
    row_bytes = t.box[0] * itemsize(t.dtype)
    if not all(0 < size <= 1 << 32 for size in t.shape):
        why = f"sizes {t.shape} must be 1 to 2**32"
    elif not all(s % 16 == 0 and 0 < s < 1 << 40 for s in t.strides):
        why = f"strides {t.strides} must be multiples of 16 bytes below 2**40"
    elif not all(0 < size <= 256 for size in t.box):
        why = f"box {t.box} must be 1 to 256 in each dimension"
    elif row_bytes % 16:
        why = f"a box row of {row_bytes} bytes must be a multiple of 16 bytes"
    elif t.swizzle not in _SWIZZLES:
        why = f"swizzle {t.swizzle} must be 0, 32, 64 or 128 bytes"
    elif t.swizzle and row_bytes > t.swizzle:
        why = f"a box row of {row_bytes} bytes must fit the swizzle span of {t.swizzle} bytes"
    elif t.promoted_bytes not in _L2_PROMOTIONS:
        why = f"l2_promotion {t.l2_promotion} must be 0, 64, 128 or 256 bytes"
    else:
        return None
    return f"TMA descriptor: {why}"


class Descriptors:
    """Descriptors of one parameter by address. They belong to one frame and are not thread-safe."""

    __slots__ = ("_addresses", "_memory", "_tensor_map")

    def __init__(self, tensor_map: TensorMap) -> None:
        self._tensor_map = tensor_map
        self._addresses: dict[int, int] = {}
        self._memory: list[ctypes.Array[ctypes.c_char]] = []

    def at(self, pointer: int) -> int:
        """Host address of the descriptor for a tensor at ``pointer``, valid until the next call.

        For an absent tensor (``pointer`` 0) the descriptor is all zeros, and no kernel may use it.

        Raises
        ------
        InvalidArgument
            ``pointer`` is not a multiple of 16.
        """
        address = self._addresses.get(pointer)
        if address is None:
            if len(self._addresses) >= MAX_DESCRIPTORS:
                self._addresses.clear()
                self._memory.clear()
            address = self._addresses[pointer] = self._encode(pointer)
        return address

    def _encode(self, pointer: int) -> int:
        t = self._tensor_map
        if pointer % 16:
            raise InvalidArgument(
                f"{t.tensor} starts at {pointer:#x}, which must be a multiple of 16 bytes for TMA: "
                f"copy {t.tensor}, or use an implementation without TMA"
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
