"""Where rows of the cache and of the result lie, and which CTAs of a sequence have tokens."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
"""Elements of a key; the first ``LATENT`` are the value."""
SCALED = 128
"""Float8 latents that share a scale."""
PACKED = LATENT + 4 * (LATENT // SCALED) + 2 * ROPE
"""Bytes of a row with float8 latents: those, their scales, and the rotated part in bfloat16."""


def out_layout(vector, rows):
    """(vector, LATENT / vector, rows) of results."""
    return cute.make_layout(
        (vector, LATENT // vector, rows),
        stride=(1, vector, cute.assume(Int64(LATENT), divby=LATENT)),
    )


@cute.jit
def used_splits(kv_len: Int32, block_n: cutlass.Constexpr, num_splits: Int32):
    """CTAs that have a tile of tokens; one where there is none, that says so."""
    return cutlass.max(cutlass.min(cute.ceil_div(kv_len, block_n), num_splits), 1)


def partial_layout(vector, block_m, num_splits, tiles):
    """(vector, vectors, block_m, num_splits, tiles) of partial sums, as `Merge` lays them out."""
    pitch = LATENT + 4
    split = pitch * block_m
    return cute.make_layout(
        (vector, pitch // vector, block_m, num_splits, tiles),
        stride=(1, vector, pitch, split, cute.assume(Int64(num_splits) * split, divby=4)),
    )
