"""The order in which programs take the tiles of D (M, N)."""

import triton
import triton.language as tl


@triton.jit
def locate_tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a tile, counted in tiles.

    Tiles are numbered down the columns of groups of GROUP_M rows of tiles, so that tiles that are
    computed at the same time share operands in L2.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    group_tiles = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    in_group = tile % group_tiles
    return first_m + in_group % group_m, in_group // group_m
