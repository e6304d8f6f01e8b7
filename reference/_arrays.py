"""The array library of an oracle's inputs: oracles work on NumPy and CuPy arrays alike."""

from __future__ import annotations

import sys


def library_of(array):
    """The module that ``array`` belongs to, ``numpy`` or ``cupy``."""
    return sys.modules[type(array).__module__.partition(".")[0]]
