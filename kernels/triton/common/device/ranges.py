"""Equal ranges: tiles of cached tokens, one after another, are cut into a range for each program.

Tiles that add to the same rows of the output are a group; its tiles follow one another. Program p's
range begins at tile p * num_tiles // num_programs, so that a range cuts at most two groups, the
first and the last. A program has two slots for partial results: slot 0 for the group that begins in
an earlier range, slot 1 for the group that begins in its own range. Such ranges are also in
FlashMLA's scheduler and in stream-K.
"""

import triton
import triton.language as tl


@triton.jit
def program_of(tile, num_tiles, num_programs):
    """The program whose range has a tile."""
    return ((tile + 1) * num_programs - 1) // num_tiles


@triton.jit
def partial_slot(program, begins_group):
    """Slot of a partial result; begins_group: whether the group begins in the program's range."""
    return 2 * program + tl.where(begins_group, 1, 0)
