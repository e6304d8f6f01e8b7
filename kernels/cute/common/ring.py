"""A ring of stages in shared memory: TMA fills them with tiles of A and B, WGMMA reads them.

    barrier       who arrives (how many)                   who waits  for what
    full[stage]   producers (``num_producers``), TMA       consumers  a k-block has arrived
    empty[stage]  consumers' warps (``num_releases``)      producer   the stage may be overwritten
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int16, Int32
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.tma import partition

SHARED_BYTES = 227 * 1024
"""Shared memory that a thread block can have, on Hopper and on Blackwell."""


def stage_layouts(tile, dtype, num_stages):
    """Layouts of A's and B's stages for WGMMA of ``tile`` (M, N, K), contiguous along K."""
    k_major = LayoutEnum.ROW_MAJOR
    a_layout = sm90.make_smem_layout_a(k_major, tile, dtype, num_stages)
    return a_layout, sm90.make_smem_layout_b(k_major, tile, dtype, num_stages)


def memory(dtype, layout):
    """Shared memory of swizzled stages, as the type of a struct's member."""
    return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]


def make_ring(barriers, num_stages, dtype, layouts, num_releases, cluster=(1, 1), num_producers=1):
    """The pipeline of the stages of ``layouts``, with its barriers in ``barriers``.

    ``cluster`` is how many thread blocks share a tile of B and how many share a tile of A.
    """
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=num_stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_producers),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_releases),
        tx_count=sum(
            cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0))) for layout in layouts
        ),
        cta_layout_vmnk=cute.make_layout((1, *cluster, 1)),
    )


class Operand(NamedTuple):
    """A matrix as TMA loads it."""

    atom: cute.CopyAtom
    stages: cute.Tensor  # (slice of a tile, stages)
    tiles: cute.Tensor  # (slice of a tile, tiles along the rows, tiles along K)
    mask: Int16 | None  # of the thread blocks in a cluster that get the slice, a bit each


def operand(atom, shared, tensor, tile, num_multicast=1, rank=0, mask=None):
    """An operand in tiles of ``tile``; ``mask`` counts where ``num_multicast`` > 1."""
    stages, tiles = partition(
        atom, shared, cute.local_tile(tensor, tile, (None, None)), num_multicast, rank
    )
    return Operand(atom, stages, tiles, Int16(mask) if num_multicast > 1 else None)


def load(source: Operand, tile: Int32, k_idx: Int32, stage: Int32, barrier: cute.Pointer):
    """Start loading a tile into a stage; ``barrier`` counts the bytes."""
    cute.copy(
        source.atom,
        source.tiles[None, tile, k_idx],
        source.stages[None, stage],
        tma_bar_ptr=barrier,
        mcast_mask=source.mask,
    )
