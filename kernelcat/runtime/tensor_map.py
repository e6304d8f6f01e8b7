"""TMA tensor maps: limits of the hardware, and descriptors that are encoded once per address."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from kernelcat.catalog.implementation import TensorMap
from kernelcat.dtypes import itemsize
from kernelcat.errors import InvalidArgument
from kernelcat.runtime import driver

MAX_DESCRIPTORS = 1024
"""Descriptors that one parameter remembers; when there are more, all are forgotten."""

_ALIGNMENT = 64  # of a CUtensorMap, in bytes
_Memory = ctypes.c_char * (128 + _ALIGNMENT)  # of a CUtensorMap, with room to align it
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
    if not 1 <= rank <= 5 or len(t.box) != rank or len(t.strides) != rank - 1:
        return (
            f"a TMA descriptor has 1 to 5 sizes, as many box sizes and one stride fewer, not "
            f"{rank}, {len(t.box)} and {len(t.strides)}"
        )
    why = _why_no_box(t.dtype, t.box, t.swizzle, t.l2_promotion)
    for size in t.shape:
        if not 0 < size <= 1 << 32:
            why = f"sizes {t.shape} must be 1 to 2**32"
    for stride in t.strides:
        if stride % 16 or not 0 < stride < 1 << 40:
            why = f"strides {t.strides} must be multiples of 16 bytes below 2**40"
    return why and f"TMA descriptor: {why}"


@lru_cache(256)
def _why_no_box(
    dtype: str, box: tuple[int, ...], swizzle: int, l2_promotion: int | None
) -> str | None:
    """Why the hardware copies no such boxes, or None; problems of other sizes share the answer."""
    row_bytes = box[0] * itemsize(dtype)
    if not all(0 < size <= 256 for size in box):
        return f"box {box} must be 1 to 256 in each dimension"
    if row_bytes % 16:
        return f"a box row of {row_bytes} bytes must be a multiple of 16 bytes"
    if swizzle not in _SWIZZLES:
        return f"swizzle {swizzle} must be 0, 32, 64 or 128 bytes"
    if swizzle and row_bytes > swizzle:
        return f"a box row of {row_bytes} bytes must fit the swizzle span of {swizzle} bytes"
    if l2_promotion is not None and l2_promotion not in _L2_PROMOTIONS:
        return f"l2_promotion {l2_promotion} must be 0, 64, 128 or 256 bytes"
    return None


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
        memory = _Memory()
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        if pointer:
            driver.opened().encode_tiled(
                address, _DTYPES[t.dtype], pointer, t.shape, t.strides, t.box,
                _SWIZZLES[t.swizzle], _L2_PROMOTIONS[t.promoted_bytes],
            )  # fmt: skip
        self._memory.append(memory)
        return address
