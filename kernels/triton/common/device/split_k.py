"""Split-K: the partial sums of the programs that compute a tile from parts of K, added up."""

import triton
import triton.language as tl


@triton.jit
def sum_splits(acc, partials, arrivals, tile, split, SPLIT_K: tl.constexpr):
    """Sum of a tile's partial sums, and whether this program has it: the last one to arrive does.

    The sum is deterministic, since partial sums are added in the order of their splits.

    acc : (rows, cols) float32, the partial sum of this program
    partials : (tiles, SPLIT_K, rows * cols) float32
    arrivals : (tiles,) int32, zero before and after
    """
    if SPLIT_K == 1:
        return acc, True
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    element = (
        tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    )
    tile_partials = partials + tile.to(tl.int64) * (SPLIT_K * SIZE) + element
    tl.store(tile_partials + split * SIZE, acc)
    tl.debug_barrier()  # all threads store their partial sums before one thread counts
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        acc = tl.zeros_like(acc)
        for index in tl.range(SPLIT_K, loop_unroll_factor=2):
            acc += tl.load(tile_partials + index * SIZE, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return acc, is_last


@triton.jit
def sum_splits_at_once(
    acc, partials, arrivals, tile, split, SPLIT_K: tl.constexpr, PARTS: tl.constexpr
):
    """As `sum_splits`, with the loads of all partial sums in flight together: for small tiles.

    PARTS is the next power of two of SPLIT_K.
    """
    if SPLIT_K == 1:
        return acc, True
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    element = (
        tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    )
    tile_partials = partials + tile.to(tl.int64) * (SPLIT_K * SIZE) + element
    tl.store(tile_partials + split * SIZE, acc)
    tl.debug_barrier()  # all threads store their partial sums before one thread counts
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        parts = tl.arange(0, PARTS)[:, None, None]
        places = tile_partials[None, :, :] + parts * SIZE
        acc = tl.sum(tl.load(places, mask=parts < SPLIT_K, other=0.0, cache_modifier=".cg"), 0)
        tl.store(arrivals + tile, 0)
    return acc, is_last
