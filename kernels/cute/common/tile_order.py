"""The order in which the tiles of a matrix are computed."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def grouped_tile(
    tile: Int32, num_tiles_m: Int32, num_tiles_n: Int32, group_m: cutlass.Constexpr[int]
):
    """Row and column of a tile, in tiles: ``group_m`` rows down, then the next column.

    Tiles that are computed at the same time then form a rectangle, whose operands are shared in L2.
    """
    group_tiles = group_m * num_tiles_n
    first_m = tile // group_tiles * group_m
    rows = cutlass.min(num_tiles_m - first_m, group_m)
    tile_in_group = tile % group_tiles
    return first_m + tile_in_group % rows, tile_in_group // rows
