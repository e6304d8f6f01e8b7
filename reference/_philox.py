"""Philox-4x32-10: random bits that follow from a key and a counter alone.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from kernelcat.reference._arrays import library_of

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple):
    """Four arrays of 32 random bits (as uint64) for each counter of four arrays below 2^32."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & LOW, low >> 32 ^ c3 ^ k1, low & LOW
        k0, k1 = k0 + WEYL[0] & LOW, k1 + WEYL[1] & LOW
    return c0, c1, c2, c3


def nine_bits(seed, rows: int, cols: int):
    """(rows, cols) of nine random bits, as uint32; ``cols`` is a multiple of 16.

    The key is ``seed``, int32 of (2,). Sixteen elements of a row share a counter, which is their
    place in the matrix, divided by 16: its low and its high word, then zeros. Elements j of them
    share 16 bits with their neighbour j ^ 1: the low (j // 2 even) or the high half of word j // 4,
    of which j has the low (j even) or the high nine bits.
    """
    xp = library_of(seed)
    k0, k1 = (int(word) & LOW for word in seed.tolist())
    place = xp.arange(rows * cols // 16, dtype="uint64")
    zeros = xp.zeros_like(place)
    words = philox((k0, k1), (place & LOW, place >> 32, zeros, zeros))
    parts = [word >> shift & 0x1FF for word in words for shift in (0, 7, 16, 23)]
    return xp.stack(parts, axis=-1).astype("uint32").reshape(rows, cols)
