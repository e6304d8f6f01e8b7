"""Launches over several ranks."""

from __future__ import annotations

from kernelcat.reference.all_reduce import MAX_RANKS

WINDOW_KINDS = ("int32", *("int64",) * MAX_RANKS)
"""Kinds of the last parameters of a kernel: the launching rank, and all ranks' windows."""
