"""Lists of the first tokens, which thread blocks leave for the last one."""

from __future__ import annotations

from kernelcat.reference.lm_head import MAX_TOP_K

TOKEN_BYTES = 8
"""A token in a list: its logit and its id."""


def lists_bytes(num_lists: int) -> int:
    """Bytes of lists of the first ``MAX_TOP_K`` tokens."""
    return TOKEN_BYTES * MAX_TOP_K * num_lists
