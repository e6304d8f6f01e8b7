"""Tiles of a matrix, copied by TMA between global and shared memory."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def load_atom(tensor, layout, tile, num_multicast=1):
    """TMA into a stage of ``layout``, each of ``num_multicast`` CTAs loading its slice for all."""
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
    """TMA out of a stage of ``layout``."""
    store, stage = cpasync.CopyBulkTensorTileS2GOp(), cute.slice_(layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(store, tensor, stage, tile)


def partition(atom, shared, tiles, num_multicast=1, rank=0):
    """Stages and tiles as TMA sees them: slice ``rank`` of each where they are multicast."""
    modes = cute.rank(shared) - 1  # of one tile
    return cpasync.tma_partition(
        atom,
        rank if num_multicast > 1 else 0,
        cute.make_layout(num_multicast),
        cute.group_modes(shared, 0, modes),
        cute.group_modes(tiles, 0, modes),
    )
