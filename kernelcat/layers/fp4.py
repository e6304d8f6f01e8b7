"""4-bit weights: from what checkpoints and quantizers store to what `nvfp4_matmul` reads fastest.

Formats, scales and orders of bytes are defined in ``reference/_fp4.py`` and
``reference/_fp4_tiles.py``, and these functions call those definitions: there is no second form.
Arrays are torch's, CuPy's or NumPy's; results are of the same library and on the same device.
"""

from __future__ import annotations

from typing import Any

import kernelcat.reference._fp4 as reference
from kernelcat.errors import InvalidArgument
from kernelcat.reference._arrays import bytes_of, from_bytes
from kernelcat.reference._fp4_tiles import pack_codes, pack_scales

BLOCKS: dict[str, int] = reference.BLOCKS
"""Format -> elements of a row that share a scale."""


def global_scale_of(amax: float) -> float:
    """NVFP4's global scale of a tensor, the factor of its values when they are read.

    Parameters
    ----------
    amax : largest magnitude in the tensor

    Returns
    -------
    amax / (6 * 448), but at least 2^-64 and at most 2^64. 6 and 448 are the largest E2M1 and E4M3.
    """
    return float(reference.global_scale_of(amax))


def format_of(scale: Any) -> str:
    """``"nvfp4"`` or ``"mxfp4"``, by the element type of the block scales ``scale``.

    Raises
    ------
    InvalidArgument
        The element type is neither ``float8_e4m3fn`` nor ``float8_e8m0fnu``.
    """
    name = str(scale.dtype).removeprefix("torch.")
    format = reference.SCALE.value_of(name)
    if format is None:
        raise InvalidArgument(f"scales are {name}; use {reference.SCALE}")
    return str(format)


def prepack(w: Any, scale: Any) -> tuple[Any, Any]:
    """Weights in the order of tensor-core registers (``packing="tiles"`` of `nvfp4_matmul`).

    Call it once for each weight, when a model is loaded.

    Parameters
    ----------
    w : (N, K / 2) E2M1 codes, two in a byte; torch's ``float4_e2m1fn_x2``
    scale : (N, K / 16) ``float8_e4m3fn`` (NVFP4) or (N, K / 32) ``float8_e8m0fnu`` (MXFP4), linear

    Returns
    -------
    Codes (N', K' / 2) and scales (N', K' / 16 or K' / 32) of the same element types, where N' is N
    padded to a multiple of 16 and K' is K padded to a multiple of 64, with zeros.
    ``reference/_fp4_tiles.py`` defines their order.

    Raises
    ------
    InvalidArgument
        The shapes do not fit together, or the scales have another element type.
    """
    format = format_of(scale)
    n, k = w.shape[0], 2 * w.shape[1]
    if tuple(scale.shape) != (n, k // BLOCKS[format]) or k % BLOCKS[format]:
        raise InvalidArgument(
            f"weights of {n} x {k} in {format} have {n} x {k // BLOCKS[format]} scales, "
            f"not {tuple(scale.shape)}"
        )
    codes, scales = pack_codes(bytes_of(w)), pack_scales(bytes_of(scale), format)
    return from_bytes(codes, w), from_bytes(scales, scale)


def swizzle(scale: Any) -> Any:
    """Block scales of weights in rows, in the order that `nvfp4_matmul` reads beside A in 4 bits.

    Call it once for each weight, when a model is loaded. `nvfp4_quantize` can store the scales of
    activations in this order itself.

    Parameters
    ----------
    scale : (N, K / 16) ``float8_e4m3fn`` (NVFP4) or (N, K / 32) ``float8_e8m0fnu`` (MXFP4), linear

    Returns
    -------
    The scales in tiles of 128 x 4, as cuBLASLt reads them, of the same element type and padded with
    zeros to multiples of 128 rows and 4 columns.

    Raises
    ------
    InvalidArgument
        The scales have another element type.
    """
    format_of(scale)
    return from_bytes(reference.swizzle(bytes_of(scale)), scale)
