"""float8_e4m3fn with a float32 scale for each block of 1 x 128 or 128 x 128 elements.

A value is ``e4m3 * scale``. DeepSeek-V3's technical report has such blocks: 1 x 128 for
activations, 128 x 128 for weights. Quantization is defined by float32 operations, each rounded to
nearest:

    amax = max(|x| in the block, 1e-10)
    scale = amax / 448
    q = e4m3(x * (448 / amax))      to nearest, ties to even, saturating at +-448
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.reference._arrays import library_of

FP8 = "float8_e4m3fn"
BLOCK = 128
"""Columns of a block, and rows of a 128 x 128 block."""
MIN_AMAX = 1e-10
"""Keeps 448 / amax finite for a block of zeros."""


def expand(blocks, rows: int, shape: tuple[int, int]):
    """A matrix of ``shape`` (M, K) that repeats each element of ``blocks`` over ``rows`` x 128.

    ``blocks`` is (ceil(M / rows), ceil(K / 128)).
    """
    m, k = shape
    return blocks.repeat(rows, axis=0)[:m].repeat(BLOCK, axis=1)[:, :k]


def quantize(x, rows: int):
    """``(q, scale)`` of float32 ``x`` (M, K) in blocks of ``rows`` x 128.

    ``q`` is (M, K) uint8, storage of float8_e4m3fn; ``scale`` is float32
    (ceil(M / rows), ceil(K / 128)).
    """
    m, k = x.shape
    blocks = library_of(x).pad(abs(x), ((0, -m % rows), (0, -k % BLOCK)))
    blocks = blocks.reshape(-(-m // rows), rows, -(-k // BLOCK), BLOCK)
    amax = blocks.max(axis=(1, 3)).clip(MIN_AMAX, None)
    inverse = expand(dtypes.E4M3_MAX / amax, rows, (m, k))
    return dtypes.encode(x * inverse, FP8), amax / dtypes.E4M3_MAX
