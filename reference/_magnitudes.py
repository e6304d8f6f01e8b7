"""Magnitudes of drawn inputs that make quantization hard: far apart, and some of them zero."""

from __future__ import annotations


def magnitudes(level, exponent: int):
    """Numbers between 2^-exponent and 2^exponent, in the order of ``level``, which is normal."""
    return 2.0 ** (exponent * level / (1 + abs(level)))


def block_magnitudes(level):
    """Magnitudes of blocks between 2^-8 and 2^8, but 0 for one block in nine.

    ``level`` is normal, of any shape; the result has that shape.
    """
    return magnitudes(level, 8) * (level > -1.2)
