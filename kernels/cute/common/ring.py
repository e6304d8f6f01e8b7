"""A ring of stages in shared memory: TMA fills them with tiles of A and B, WGMMA empties them."""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int16, Int32
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.tma import partition


def stage_layouts(tile, dtype, stages):
    """A's and B's stages for WGMMA of ``tile``; K is contiguous."""
    k_major = LayoutEnum.ROW_MAJOR
    a_layout = sm90.make_smem_layout_a(k_major, tile, dtype, stages)
    return a_layout, sm90.make_smem_layout_b(k_major, tile, dtype, stages)


def memory(dtype, layout):
    """Shared memory of swizzled stages, as the type of a struct's member."""
    return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]


def make_ring(barriers, stages, dtype, layouts, releases, cluster=(1, 1), producers=1):
    """The pipeline of the stages of ``layouts``.

    ``producers`` and ``releases`` are how many arrivals make a stage full (beside the bytes that
    TMA writes) and empty; ``cluster`` is how many CTAs share a tile of B and one of A.
    """
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producers),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
        tx_count=sum(
            cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0))) for layout in layouts
        ),
        cta_layout_vmnk=cute.make_layout((1, *cluster, 1)),
    )


class Operand(NamedTuple):
    """One of the matrices that are loaded, as its TMA sees it."""

    atom: cute.CopyAtom
    stages: cute.Tensor  # (slice of a tile, stages)
    tiles: cute.Tensor  # (slice of a tile, tiles along the rows, along K)
    mask: Int16 | None  # the CTAs that get the slice, a bit each


def operand(atom, shared, tensor, tile, num_multicast=1, rank=0, mask=None):
    """``mask`` holds where ``num_multicast`` CTAs share a tile."""
    stages, tiles = partition(
        atom, shared, cute.local_tile(tensor, tile, (None, None)), num_multicast, rank
    )
    return Operand(atom, stages, tiles, Int16(mask) if num_multicast > 1 else None)


def load(source: Operand, tile: Int32, k_idx: Int32, stage: Int32, barrier: cute.Pointer):
    """Start loading a tile into a stage; ``barrier`` counts its bytes."""
    cute.copy(
        source.atom,
        source.tiles[None, tile, k_idx],
        source.stages[None, stage],
        tma_bar_ptr=barrier,
        mcast_mask=source.mask,
    )
