"""Rows of 656 bytes: one token of a latent cache in float8, in the format of DeepSeek's FlashMLA.

    bytes      content
    0 - 511    512 latent values, float8_e4m3fn
    512 - 527  4 scales, float32, each for 128 latent values: value = e4m3 * scale
    528 - 655  64 elements of the key that RoPE has rotated, bfloat16, not quantized

A scale is a power of two: 2^ceil(log2(max(amax / 448, 1e-4))) for the largest magnitude ``amax`` of
its 128 values.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.reference._arrays import library_of

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
"""Elements of a query, of a key and of an unquantized row; the first ``LATENT`` are the value."""
SCALED = 128
"""Latent values that share a scale."""
SCALES = 4 * LATENT // SCALED
"""Bytes of a row's scales."""
PACKED = LATENT + SCALES + 2 * ROPE
"""Bytes of a quantized row."""
MIN_SCALE = 1e-4
"""Scales are rounded up from this value or a larger one, so the smallest is 2^-13."""


def scales(latent):
    """Scales (..., 4) of float32 latent values (..., 512)."""
    xp = library_of(latent)
    groups = latent.reshape(*latent.shape[:-1], LATENT // SCALED, SCALED)
    exact_scale = abs(groups).max(-1) / xp.float32(dtypes.E4M3_MAX)
    mantissa, exponent = xp.frexp(xp.maximum(exact_scale, xp.float32(MIN_SCALE)))
    return xp.ldexp(xp.ones_like(mantissa), exponent - (mantissa == 0.5))


def pack(rows):
    """Rows (..., 656) of uint8, quantized from float32 rows (..., 576)."""
    xp = library_of(rows)
    latent, rope = rows[..., :LATENT], rows[..., LATENT:]
    scale = scales(latent)
    quantized = dtypes.encode(latent / scale.repeat(SCALED, axis=-1), "float8_e4m3fn")
    rotated = xp.ascontiguousarray(dtypes.encode(rope, "bfloat16"))
    parts = (quantized, xp.ascontiguousarray(scale).view("uint8"), rotated.view("uint8"))
    return xp.concatenate(parts, axis=-1)


def unpack(packed):
    """Float32 rows (..., 576) of quantized rows (..., 656) of uint8."""
    xp = library_of(packed)
    scale = xp.ascontiguousarray(packed[..., LATENT : LATENT + SCALES]).view("float32")
    latent = dtypes.decode(packed[..., :LATENT], "float8_e4m3fn") * scale.repeat(SCALED, axis=-1)
    rotated = xp.ascontiguousarray(packed[..., LATENT + SCALES :]).view("uint16")
    return xp.concatenate((latent, dtypes.decode(rotated, "bfloat16")), axis=-1)
