"""A token's row in the cache of multi-head latent attention (MLA).

The three pointers to the cache hold the same address. For rows of 576 elements `latent` and
`rotated` have the type of the cache, and `factor` is not used. For packed rows of 656 bytes
(reference/_mla_row.py) `latent` has the type of the quantized latents, `factor` the type of their
scales, and `rotated` the type of the rotated part. Strides and offsets count elements of the
pointer that they belong to.
"""

import triton.language as tl

from kernelcat.reference import _mla_row

LATENT = tl.constexpr(_mla_row.LATENT)
"""Latent elements, which are the value."""
ROPE = tl.constexpr(_mla_row.ROPE)
"""Elements of the key that RoPE rotates."""
ROW = tl.constexpr(_mla_row.ROW)
"""Elements of a query, of a key, and of a row that is not packed."""
PACKED_ROW = tl.constexpr(_mla_row.PACKED)
"""Bytes of a packed row."""
SCALE_GROUP = tl.constexpr(_mla_row.SCALED)
"""Latent elements of a packed row that share a scale."""
NUM_GROUPS = tl.constexpr(_mla_row.LATENT // _mla_row.SCALED)
"""Scales of a packed row."""
FACTOR_STRIDE = tl.constexpr(_mla_row.PACKED // 4)
"""Distance of packed rows in the scales' type."""
FACTOR_OFFSET = tl.constexpr(_mla_row.LATENT // 4)
"""Where the scales of a packed row begin."""
PACKED_ROTATED_STRIDE = tl.constexpr(_mla_row.PACKED // 2)
"""Distance of packed rows in the rotated elements' type."""
PACKED_ROTATED_OFFSET = tl.constexpr((_mla_row.LATENT + _mla_row.SCALES) // 2)
"""Where the rotated elements of a packed row begin."""
