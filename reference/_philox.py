"""Philox-4x32-10: random bits that are a function of a key and a counter.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from kernelcat.reference._arrays import library_of

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the two words of the key grow by after each round."""
ROUNDS = 10
WORD_MASK = 0xFFFFFFFF


def philox(key: tuple, counter: tuple):
    """Four arrays of 32 random bits each, as uint64.

    ``key`` is two values below 2^32, numbers or uint64 arrays; ``counter`` is four uint64 arrays of
    one shape with values below 2^32. The results have the shape to which all of them broadcast.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            high >> 32 ^ c1 ^ k0,
            high & WORD_MASK,
            low >> 32 ^ c3 ^ k1,
            low & WORD_MASK,
        )
        k0, k1 = k0 + WEYL[0] & WORD_MASK, k1 + WEYL[1] & WORD_MASK
    return c0, c1, c2, c3


def nine_bits(seed, rows: int, cols: int):
    """Nine random bits for each element of a (rows, cols) matrix, as uint32; cols % 16 == 0.

    The key is ``seed``, int32 (2,). Sixteen neighbours of a row share a counter: the index of their
    first element in the row-major matrix, divided by 16, as a low word, a high word and two zeros.
    The four output words have 128 bits, so two elements share 16 bits, and two of these bits belong
    to both. Of the sixteen elements, j and j ^ 1 share one half of word j // 4: the low half if
    j // 2 is even, else the high half. An even j has the low nine bits of the half, an odd j the
    high nine bits.
    """
    xp = library_of(seed)
    k0, k1 = (int(word) & WORD_MASK for word in seed.tolist())
    group = xp.arange(rows * cols // 16, dtype="uint64")
    zeros = xp.zeros_like(group)
    words = philox((k0, k1), (group & WORD_MASK, group >> 32, zeros, zeros))
    parts = [word >> shift & 0x1FF for word in words for shift in (0, 7, 16, 23)]
    return xp.stack(parts, axis=-1).astype("uint32").reshape(rows, cols)
