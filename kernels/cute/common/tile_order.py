"""The order in which tiles of a matrix are worked on."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def grouped(tile: Int32, tiles_m: Int32, tiles_n: Int32, group_m: cutlass.Constexpr[int]):
    """Row and column of a tile: ``group_m`` rows down before the next column.

    CTAs that run together then share what they read from L2.
    """
    width = group_m * tiles_n
    first_m = tile // width * group_m
    group = cutlass.min(tiles_m - first_m, group_m)
    inside = tile % width
    return first_m + inside % group, inside // group
