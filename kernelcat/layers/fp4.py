"""4-bit weights from what checkpoints and quantizers hold to what `nvfp4_matmul` reads fastest."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kernelcat.errors import InvalidArgument

_fp4: Any = importlib.import_module("kernelcat.reference._fp4")
_fp4_tiles: Any = importlib.import_module("kernelcat.reference._fp4_tiles")

BLOCKS: dict[str, int] = _fp4.BLOCKS
"""Format -> elements of a row that share a scale."""


def global_scale_of(amax: float) -> float:
    """NVFP4's global scale for a tensor whose largest element is ``amax``: amax / (6 * 448).

    Values are multiplied by it when they are read.
    """
    return float(_fp4.global_scale_of(amax))


def format_of(scale: Any) -> str:
    """``nvfp4`` or ``mxfp4``, by the scales' element type; ``InvalidArgument`` for any other."""
    name = str(scale.dtype).removeprefix("torch.")
    found = _fp4.SCALE.value_of(name)
    if found is None:
        raise InvalidArgument(f"scales are {name}; use {_fp4.SCALE}")
    return str(found)


def prepack(w: Any, scale: Any) -> tuple[Any, Any]:
    """Weights in rows to weights in tiles, once, when a model is loaded (``packing="tiles"``).

    Parameters
    ----------
    w : (N, K / 2) pairs of codes, torch's ``float4_e2m1fn_x2``
    scale : (N, K / 16) ``float8_e4m3fn`` (NVFP4) or (N, K / 32) ``float8_e8m0fnu`` (MXFP4), linear

    Returns
    -------
    The same of shapes (N', K' / 2) and (N', K' / 16 or 32), where N' is N padded to a multiple of
    16 and K' K padded to one of 64, with zeros. On the arrays' device. The order is told in
    ``reference/_fp4_tiles.py``.

    Raises
    ------
    InvalidArgument
        Shapes that do not belong together, or scales of another element type.
    """
    format = format_of(scale)
    n, k = w.shape[0], 2 * w.shape[1]
    if tuple(scale.shape) != (n, k // BLOCKS[format]) or k % BLOCKS[format]:
        raise InvalidArgument(
            f"weights of {n} x {k} in {format} have {n} x {k // BLOCKS[format]} scales, "
            f"not {tuple(scale.shape)}"
        )
    codes, scales = _as_bytes(w), _as_bytes(scale)
    packed = _fp4_tiles.pack_codes(codes), _fp4_tiles.pack_scales(scales, format)
    return _like(packed[0], w), _like(packed[1], scale)


def swizzle(scale: Any) -> Any:
    """Block scales of weights in rows as products with activations in 4 bits read them (W4A4).

    Once, when a model is loaded; `nvfp4_quantize` makes those of activations so by itself.

    Parameters
    ----------
    scale : (N, K / 16) ``float8_e4m3fn`` (NVFP4) or (N, K / 32) ``float8_e8m0fnu`` (MXFP4), linear

    Returns
    -------
    The same in tiles of 128 x 4 as cuBLASLt reads them, padded with zeros to multiples of those.

    Raises
    ------
    InvalidArgument
        Scales of another element type.
    """
    format_of(scale)
    return _like(_fp4.swizzle(_as_bytes(scale)), scale)


def _as_bytes(array: Any) -> Any:
    """A NumPy or CuPy array of the same bytes."""
    if type(array).__module__.partition(".")[0] != "torch":
        return array.view("uint8")
    import torch

    flat = array.contiguous().view(torch.uint8)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    return cupy.from_dlpack(flat)


def _like(bytes_: Any, array: Any) -> Any:
    """``bytes_`` as an array of the library and element type of ``array``."""
    if type(array).__module__.partition(".")[0] != "torch":
        return bytes_.view(array.dtype)
    torch = sys.modules["torch"]
    return torch.from_dlpack(bytes_).view(array.dtype)
