"""4-bit weights in tiles, decoded into the registers that tensor cores multiply.

reference/_fp4_tiles.py defines the order: a tile has 16 rows and 64 columns, and a lane of a warp
has four words of it. Each axis of the tensors below is a place in that order, so that the whole
decoding is one permutation of axes. Triton's compiler gives a warp the words of a tile in the order
of the tile, and then finds that the permuted tensor lies where an operand in registers has to: no
value moves between threads. The order is Marlin's idea (Frantar et al. 2024).
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4 import decode_mxfp4_scales, decode_nvfp4_scales


@triton.jit
def load_register_tiles(
    w,  # int32 (N / 16, K / 64, 8, 4, 4): r, lane, word; N and K padded
    w_scale,  # int32 (N / 16, K / 64, 8, 1 or 2): MXFP4 has one word for rows r and r + 8
    row,  # a multiple of 16
    k,  # a multiple of 64
    N, K, dtype: tl.constexpr, NVFP4: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Weights [row : row + ROWS, k : k + COLS] times their scales, zeros past the edges."""
    TILES: tl.constexpr = COLS // 64
    # bfloat16 holds the product of a code and a scale exactly.
    narrow: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
    rows = tl.arange(0, ROWS // 2)  # rows r of all tile rows
    tile_row, tile_col = row // 16 + rows // 8, k // 64 + tl.arange(0, TILES)
    tiles_across = tl.cdiv(K, 64)
    place = (tile_row.to(tl.int64) * tiles_across * 8 + rows % 8)[:, None] + tile_col[None, :] * 8
    inside = (tile_row < tl.cdiv(N, 16))[:, None] & (tile_col < tiles_across)[None, :]
    words = load_words(w, place, inside, 16)
    scale_words = load_words(w_scale, place, inside, 2 if NVFP4 else 1)

    values = decode_words(words, narrow)
    # tile row, r, tile, lane, word, upper columns, upper rows, element
    values = tl.reshape(values, (ROWS // 16, 8, TILES, 4, 4, 2, 2, 2))
    values = tl.permute(values, (0, 6, 1, 2, 4, 5, 3, 7))
    BLOCKS: tl.constexpr = 4 if NVFP4 else 2  # of a row of a tile
    codes = tl.reshape(unpack_bytes(scale_words), (ROWS // 16, 8, TILES, 2, BLOCKS))
    codes = tl.reshape(tl.permute(codes, (0, 3, 1, 2, 4)), (ROWS, TILES * BLOCKS))
    scales = (decode_nvfp4_scales(codes) if NVFP4 else decode_mxfp4_scales(codes)).to(narrow)
    values = tl.reshape(values, (ROWS, TILES * BLOCKS, 64 // BLOCKS)) * scales[:, :, None]
    return tl.reshape(values, (ROWS, COLS)).to(dtype)


@triton.jit
def load_words(pointer, place, inside, WORDS: tl.constexpr):
    """WORDS words from each place (rows, tiles) on: (rows, tiles, WORDS)."""
    words = place[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    return tl.load(pointer + words, mask=inside[:, :, None], other=0)


@triton.jit
def unpack_bytes(words):
    """The bytes of words (rows, tiles, words), lowest first: (rows, tiles, words, 2, 2) int32."""
    halves = tl.join(words, words >> 16)
    return tl.join(halves, halves >> 8) & 0xFF


@triton.jit
def decode_words(words, dtype: tl.constexpr):
    """Values of the codes of words, with three axes more: upper columns, upper rows, element.

    The two elements of a register are 16 bits apart in a word, so that both are moved at once to
    where halves of a register have sign, exponent and mantissa. That divides them by a power of
    two. For bfloat16, a product by two powers of two makes two copies of a code, of which one has
    its sign in place and the other one the rest.
    """
    words = tl.join(words, words >> 8)
    if dtype == tl.bfloat16:
        pairs = tl.join((words & 0x000F000F) * 0x1040, (words & 0x00F000F0) * 0x0104)
        pairs &= -0x7E3F7E40  # 0x81c081c0
        growth: tl.constexpr = 2.0**126
    else:
        high = tl.join(words << 12, words << 8)  # codes are the highest bits of the halves
        pairs = (high & -0x7FFF8000) | (high >> 3 & 0x0E000E00)  # 0x80008000
        growth: tl.constexpr = 2.0**14
    first = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    second = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(first, second) * tl.full((), growth, dtype)
