"""A token of a latent cache in float8: 656 bytes, as DeepSeek's FlashMLA has them.

512 values of float8_e4m3fn, four float32 scales for 128 of them each, then 64 bfloat16 elements of
the key's rotated part, which are not quantized. A scale is a power of two.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.reference._arrays import library_of

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
"""Elements of a query, a key and a row of the cache; the first ``LATENT`` are the value."""
SCALED = 128
"""Latent values that share a scale."""
SCALES = 4 * LATENT // SCALED
"""Bytes of the scales."""
PACKED = LATENT + SCALES + 2 * ROPE
LEAST = 1e-4
"""Of what a scale is rounded up from."""


def scales(latent):
    """(..., 512) -> (..., 4): 2^ceil(log2(max(amax / 448, 1e-4)))."""
    xp = library_of(latent)
    groups = latent.reshape(*latent.shape[:-1], LATENT // SCALED, SCALED)
    most = abs(groups).max(-1) / xp.float32(dtypes.E4M3_MAX)
    mantissa, exponent = xp.frexp(xp.maximum(most, xp.float32(LEAST)))
    return xp.ldexp(xp.ones_like(mantissa), exponent - (mantissa == 0.5))


def pack(rows):
    """(..., 576) float32 -> (..., 656) bytes."""
    xp = library_of(rows)
    latent, rope = rows[..., :LATENT], rows[..., LATENT:]
    scale = scales(latent)
    quantized = dtypes.encode(latent / scale.repeat(SCALED, axis=-1), "float8_e4m3fn")
    turned = xp.ascontiguousarray(dtypes.encode(rope, "bfloat16"))
    parts = (quantized, xp.ascontiguousarray(scale).view("uint8"), turned.view("uint8"))
    return xp.concatenate(parts, axis=-1)


def unpack(packed):
    """(..., 656) bytes -> (..., 576) float32."""
    xp = library_of(packed)
    scale = xp.ascontiguousarray(packed[..., LATENT : LATENT + SCALES]).view("float32")
    latent = dtypes.decode(packed[..., :LATENT], "float8_e4m3fn") * scale.repeat(SCALED, axis=-1)
    turned = xp.ascontiguousarray(packed[..., LATENT + SCALES :]).view("uint16")
    return xp.concatenate((latent, dtypes.decode(turned, "bfloat16")), axis=-1)
