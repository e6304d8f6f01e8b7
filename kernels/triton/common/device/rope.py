"""Pairs of elements that RoPE rotates together.

They are elements 2 i and 2 i + 1 of a row where INTERLEAVED, else elements i and i + ROTARY / 2.
PAIRS is a power of two that is at least ROTARY / 2.
"""

import triton
import triton.language as tl


@triton.jit
def load_pairs(
    rows,  # (BLOCK,) pointers to the first elements of rows
    inside,  # (BLOCK,) whether a row is loaded
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """First and second elements of pairs, (BLOCK, PAIRS) each; zero where nothing is loaded."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIRS)
        mask = inside[:, None] & (dims < ROTARY)[None, :]
        both = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], PAIRS, 2)))
    else:
        dims = tl.arange(0, PAIRS)
        mask = inside[:, None] & (dims < ROTARY // 2)[None, :]
        first = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)
        second = tl.load(rows[:, None] + (dims + ROTARY // 2)[None, :], mask=mask, other=0.0)
    return first, second


@triton.jit
def store_pairs(
    rows,  # (BLOCK,) pointers to the first elements of rows
    first, second,  # (BLOCK, PAIRS)
    inside,  # (BLOCK,) whether a row is stored
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store first and second elements of pairs, rounded to the type that ``rows`` point to."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIRS)
        mask = inside[:, None] & (dims < ROTARY)[None, :]
        both = tl.reshape(tl.join(first, second), (rows.shape[0], 2 * PAIRS))
        tl.store(rows[:, None] + dims[None, :], both, mask=mask)
    else:
        dims = tl.arange(0, PAIRS)
        mask = inside[:, None] & (dims < ROTARY // 2)[None, :]
        tl.store(rows[:, None] + dims[None, :], first, mask=mask)
        tl.store(rows[:, None] + (dims + ROTARY // 2)[None, :], second, mask=mask)


@triton.jit
def find_partners(dims, rotary_dim, INTERLEAVED: tl.constexpr):
    """The other element of the pair of each of ``dims``, the pair, and whether a dim comes first.

    For elements that RoPE rotates; results for others have no meaning.
    """
    half = rotary_dim // 2
    if INTERLEAVED:
        is_first, partner, pair = dims % 2 == 0, dims ^ 1, dims // 2
    else:
        is_first = dims < half
        partner, pair = tl.where(is_first, dims + half, dims - half), dims % tl.maximum(half, 1)
    return partner, pair, is_first


@triton.jit
def load_angles(cos_sin, position, pair, is_first, is_rotated, rotary_dim):
    """Cosines and sines of elements at a position: z cos + partner sin is the rotated element."""
    angles = cos_sin + position.to(tl.int64) * rotary_dim + pair
    cos = tl.load(angles, mask=is_rotated, other=1.0)
    sin = tl.load(angles + rotary_dim // 2, mask=is_rotated, other=0.0)
    return cos, tl.where(is_first, -sin, sin)


@triton.jit
def rotate(first, second, cos, sin):
    """First and second elements of pairs after a rotation; all arguments float32 of one shape."""
    return first * cos - second * sin, second * cos + first * sin
