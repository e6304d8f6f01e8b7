"""The ring of stages in shared memory between a warp that loads and warpgroups that multiply.

Gluon. Every stage has a full barrier (its operands have arrived) and an empty barrier (it may be
overwritten). Two Triton versions call some operations by different names.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernelcat.kernels.triton.common.device.tile_order import locate_tile as triton_locate_tile

IS_TRITON_3_7 = hasattr(tma, "async_load")
"""Whether Triton is 3.7 or newer, which has renamed operations."""
load = tma.async_load if IS_TRITON_3_7 else tma.async_copy_global_to_shared
store = tma.async_store if IS_TRITON_3_7 else tma.async_copy_shared_to_global
barrier = gl.barrier if IS_TRITON_3_7 else gl.thread_barrier

locate_tile = gluon.jit(triton_locate_tile.fn)

CONSUMERS = gl.constexpr(2)
"""Warpgroups that multiply, of `gemm` and `multicast_gemm`."""
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
"""Registers of a thread where there are two consumers."""


@gluon.jit
def advance(stage, phase, steps, NUM_STAGES: gl.constexpr):
    """Stage and phase ``steps`` stages later; the phase flips with every round of the ring."""
    after = stage + steps
    return after % NUM_STAGES, phase ^ (after // NUM_STAGES & 1)


@gluon.jit
def store_tile(d, d_tile, tile, row, col):
    """Start the TMA store of a warpgroup's tile (rows, cols) at (row, col) of D.

    d : descriptor of D
    d_tile : (rows, cols), the shared memory through which this warpgroup stores all of its tiles
    """
    out = tile.to(d.dtype)
    tma.store_wait(0)
    barrier()
    d_tile.store(out)
    fence_async_shared()
    store(d, [row, col], d_tile)
