"""4-bit weights in the order of tensor-core registers, packed once from quantized rows.

Rows are padded with zeros to a multiple of 16 and columns to a multiple of 64. A tile of 16 x 64
codes is 512 bytes, and the tiles of 16 rows follow one another. In a tile, lane l of a warp owns
bytes 16 l to 16 l + 15: four words of eight codes. Word s holds the lane's elements of columns 16 s
to 16 s + 15, which is the left operand of ``mma.m16n8k16`` and the operand in registers of
``wgmma``: rows r = l / 4 and r + 8, columns c = 2 (l % 4), c + 1, c + 8 and c + 9. Each of the four
registers has two elements; nibble i of the word (i < 4) is the first element of register i and
nibble i + 4 the second. Registers 0 to 3 begin with (r, c), (r + 8, c), (r, c + 8) and
(r + 8, c + 8). So one shift moves both codes of a register to where its halves have sign, exponent
and mantissa.

Scales are stored tile by tile too. For each r from 0 to 7, a tile has the scales of row r, then
those of row r + 8: four of a row (NVFP4) or two (MXFP4). Scales take 1 / 8 or 1 / 16 of the codes'
bytes.
"""

from __future__ import annotations

from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import BLOCKS, padded

TILE_ROWS, TILE_COLS = 16, 64
CODE_BYTES = TILE_COLS // 2
"""Bytes of codes in a row of a tile."""


def _padded_with_zeros(array, rows: int, cols: int):
    xp = library_of(array)
    wide = xp.zeros((rows, cols), dtype="uint8")
    wide[: array.shape[0], : array.shape[1]] = array
    return wide


def pack_codes(codes):
    """Codes (N, K / 2) in tiles: (N padded to 16, (K padded to 64) / 2), uint8."""
    xp = library_of(codes)
    n, k = padded(codes.shape[0], TILE_ROWS), padded(2 * codes.shape[1], TILE_COLS)
    pairs = _padded_with_zeros(codes, n, k // 2)
    single = xp.stack((pairs & 15, pairs >> 4), axis=-1)
    # rows: tile, upper 8 rows or not, r; columns: tile, word, upper 8 columns or not, lane, element
    parts = single.reshape(n // 16, 2, 8, k // TILE_COLS, 4, 2, 4, 2)
    # tile row, tile column, r, lane, word, element, upper 8 columns, upper 8 rows
    nibbles = parts.transpose(0, 3, 2, 6, 4, 7, 5, 1).reshape(n, k // 2, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4


def unpack_codes(packed, n: int, k: int):
    """The inverse of :func:`pack_codes`: codes (n, k / 2) without the padding."""
    xp = library_of(packed)
    rows, cols = packed.shape[0], 2 * packed.shape[1]
    nibbles = xp.stack((packed & 15, packed >> 4), axis=-1)
    parts = nibbles.reshape(rows // 16, cols // TILE_COLS, 8, 4, 4, 2, 2, 2)
    single = parts.transpose(0, 7, 2, 1, 4, 6, 3, 5).reshape(rows, cols // 2, 2)
    return (single[..., 0] | single[..., 1] << 4)[:n, : k // 2]


def pack_scales(scales, format: str):
    """Scales (N, K / block) in tiles: (N padded to 16, (K padded to 64) / block), uint8."""
    row_scales = TILE_COLS // BLOCKS[format]
    n, cols = padded(scales.shape[0], TILE_ROWS), padded(scales.shape[1], row_scales)
    wide = _padded_with_zeros(scales, n, cols)
    parts = wide.reshape(n // 16, 2, 8, cols // row_scales, row_scales)
    return parts.swapaxes(1, 3).reshape(n, cols)


def unpack_scales(packed, format: str, n: int, k: int):
    """The inverse of :func:`pack_scales`: scales (n, k / block) without the padding."""
    row_scales, (rows, cols) = TILE_COLS // BLOCKS[format], packed.shape
    parts = packed.reshape(rows // 16, cols // row_scales, 8, 2, row_scales)
    return parts.swapaxes(1, 3).reshape(rows, cols)[:n, : k // BLOCKS[format]]
