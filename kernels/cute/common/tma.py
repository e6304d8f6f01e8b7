"""Copying tiles of a matrix by TMA between global and shared memory."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def load_atom(tensor, layout, tile, num_multicast=1):
    """TMA loads of ``tile`` of ``tensor`` into a stage of ``layout``.

    Each of ``num_multicast`` thread blocks of a cluster loads a slice of the tile for all of them.
    """
    load = cpasync.CopyBulkTensorTileG2SOp()
    multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(
        multicast if num_multicast > 1 else load,
        tensor,
        cute.slice_(layout, (None, None, 0)),
        tile,
        num_multicast=num_multicast,
    )


def store_atom(tensor, layout, tile):
    """TMA stores of a stage of ``layout`` into ``tile`` of ``tensor``."""
    store, stage = cpasync.CopyBulkTensorTileS2GOp(), cute.slice_(layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(store, tensor, stage, tile)


def partition(atom, shared, tiles, num_multicast=1, rank=0):
    """Stages and tiles as TMA copies them: all of a tile, or slice ``rank`` where it is multicast.

    The last mode of ``shared`` counts stages; the modes of ``tiles`` behind those of a tile count
    tiles.
    """
    tile_modes = cute.rank(shared) - 1
    return cpasync.tma_partition(
        atom,
        rank if num_multicast > 1 else 0,
        cute.make_layout(num_multicast),
        cute.group_modes(shared, 0, tile_modes),
        cute.group_modes(tiles, 0, tile_modes),
    )
