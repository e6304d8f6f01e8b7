"""Weights in the order of tensor cores' registers, made once of rows as quantizers store them.

Rows are padded to multiples of 16 and columns to multiples of 64, by zeros. A tile of 16 x 64
weights is 512 bytes, tiles of a row of them one after another. Of a tile, lane l of a warp owns 16
bytes, four words of eight codes: word s is what it holds of the 16 x 16 left operand of ``mma`` and
``wgmma`` for columns 16 s and on: rows r = l / 4 and r + 8, columns c = 2 (l % 4), c + 1, c + 8 and
c + 9. Nibble i of a word (i < 4) is the first and nibble i + 4 the second element of register i,
(r, c), (r + 8, c), (r, c + 8), (r + 8, c + 8): a shift puts a pair where a register's halves have
sign, exponent and mantissa.

Scales of a tile follow one another too: for r from 0 to 7 those of row r, then those of row r + 8,
four each (NVFP4) or two (MXFP4). They are 1 / 8 or 1 / 16 as many bytes as the codes.
"""

from __future__ import annotations

from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import BLOCKS

TILE_ROWS, TILE_COLS = 16, 64
CODE_BYTES = TILE_COLS // 2


def padded(extent: int, step: int) -> int:
    return -(-extent // step) * step


def _enlarged(array, rows: int, cols: int):
    xp = library_of(array)
    found = xp.zeros((rows, cols), dtype="uint8")
    found[: array.shape[0], : array.shape[1]] = array
    return found


def pack_codes(codes):
    """(N, K / 2) bytes of pairs -> (N padded to 16, K padded to 64, halved), tile by tile."""
    xp = library_of(codes)
    n, k = padded(codes.shape[0], TILE_ROWS), padded(2 * codes.shape[1], TILE_COLS)
    pairs = _enlarged(codes, n, k // 2)
    single = xp.stack((pairs & 15, pairs >> 4), axis=-1)
    # rows: tile, upper half, r; columns: tile, step, upper half, lane's column, element
    parts = single.reshape(n // 16, 2, 8, k // TILE_COLS, 4, 2, 4, 2)
    # tile row, tile column, r, lane's column, step, element, upper columns, upper rows
    nibbles = parts.transpose(0, 3, 2, 6, 4, 7, 5, 1).reshape(n, k // 2, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4


def unpack_codes(packed, n: int, k: int):
    """The inverse of :func:`pack_codes`."""
    xp = library_of(packed)
    rows, cols = packed.shape[0], 2 * packed.shape[1]
    nibbles = xp.stack((packed & 15, packed >> 4), axis=-1)
    parts = nibbles.reshape(rows // 16, cols // TILE_COLS, 8, 4, 4, 2, 2, 2)
    single = parts.transpose(0, 7, 2, 1, 4, 6, 3, 5).reshape(rows, cols // 2, 2)
    return (single[..., 0] | single[..., 1] << 4)[:n, : k // 2]


def pack_scales(scales, format: str):
    """(N, K / block) bytes -> (N padded to 16, K padded to 64 / block), tile by tile."""
    each = TILE_COLS // BLOCKS[format]
    n, cols = padded(scales.shape[0], TILE_ROWS), padded(scales.shape[1], each)
    parts = _enlarged(scales, n, cols).reshape(n // 16, 2, 8, cols // each, each)
    return parts.transpose(0, 3, 2, 1, 4).reshape(n, cols)


def unpack_scales(packed, format: str, n: int, k: int):
    """The inverse of :func:`pack_scales`."""
    each, (rows, cols) = TILE_COLS // BLOCKS[format], packed.shape
    parts = packed.reshape(rows // 16, cols // each, 8, 2, each)
    return parts.transpose(0, 3, 2, 1, 4).reshape(rows, cols)[:n, : k // BLOCKS[format]]
