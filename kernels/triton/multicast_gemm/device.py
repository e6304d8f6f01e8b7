"""`gemm`'s specialized warps in clusters of two blocks, which multiply the same tile of B.

A cluster's tile is two blocks' tiles, one below the other. Without MULTICAST both blocks load B;
with it the first loads B for both. a, b and d are descriptors over row-major A (M, K), B (N, K)
and D (M, N).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernelcat.kernels.triton.gemm.gluon_device import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    RENAMED,
    advance,
    barrier,
    load,
    store,
    tile_of,
)

BLOCKS = gl.constexpr(2)  # of a cluster
# A barrier for each block; Triton 3.9 counts them all, 3.6 only knows those of its own block.
BARRIER = gl.constexpr(mbarrier.MBarrierLayout([[1]] if RENAMED else [[0]]))
BARRIERS = gl.constexpr(2 if RENAMED else 1)
CLUSTER_BARRIER = gl.constexpr(mbarrier.MBarrierLayout([[0]]))  # in the first block


@gluon.jit
def produce(
    a, b, M, N, K, a_ring, b_ring, full, empty, given_back,
    CLUSTER_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_CLUSTERS: gl.constexpr, MULTICAST: gl.constexpr,
):  # fmt: skip
    """One warp of each block. B is multicast to stages that both blocks have given back."""
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    PARTS_M: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    BYTES: gl.constexpr = CONSUMERS * a.block_type.nbytes // BLOCKS + b.block_type.nbytes
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)  # a ring begins empty
    tiles = gl.cdiv(M, CLUSTER_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, NUM_CLUSTERS):
        tile_m, tile_n = tile_of(tile, M, N, CLUSTER_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            for part in gl.static_range(CONSUMERS):
                row = tile_m * CLUSTER_M + part * PARTS_M
                load(a, [row, k], ready, a_ring.index(CONSUMERS * stage + part))
            if MULTICAST:
                mbarrier.wait(given_back.index(stage), phase)  # the first block alone waits
                load(b, [tile_n * BLOCK_N, k], ready, b_ring.index(stage), multicast=True)
            else:
                load(b, [tile_n * BLOCK_N, k], ready, b_ring.index(stage))
            stage, phase = advance(stage, phase, 1, NUM_STAGES)


@gluon.jit
def give_back(empty, given_back, stage, pred, MULTICAST: gl.constexpr):
    mbarrier.arrive(empty.index(stage), pred=pred)
    if MULTICAST:
        mbarrier.arrive(given_back.index(stage), pred=pred)


@gluon.jit
def consume(
    d, M, N, K, a_ring, b_ring, full, empty, given_back, d_tiles,
    CLUSTER_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_CLUSTERS: gl.constexpr, SUBTILES: gl.constexpr, MULTICAST: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """A warpgroup of each block: its part of every tile."""
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    PARTS_M: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16], [[1, 0]])
    d_tile = d_tiles.index(CONSUMER)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tiles = gl.cdiv(M, CLUSTER_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, NUM_CLUSTERS):
        tile_m, tile_n = tile_of(tile, M, N, CLUSTER_M, BLOCK_N, GROUP_M)
        row, col = tile_m * CLUSTER_M + CONSUMER * PARTS_M, tile_n * BLOCK_N
        acc = gl.zeros((PARTS_M, BLOCK_N), gl.float32, LAYOUT)
        previous = stage + 0  # another object: Triton 3.6 carries a name that changes in the loop
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            a_tile = a_ring.index(CONSUMERS * stage + CONSUMER)
            b_tile = b_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(a_tile, b_tile, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            give_back(empty, given_back, previous, k > 0, MULTICAST)
            previous = stage
            stage, phase = advance(stage, phase, 1, NUM_STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        give_back(empty, given_back, previous, True, MULTICAST)
        if SUBTILES == 2:
            halves = gl.permute(gl.reshape(acc, (PARTS_M, 2, BLOCK_N // 2)), (0, 2, 1))
            acc, right = gl.split(halves)
        leave(d, d_tile, acc, row, col)
        if SUBTILES == 2:
            leave(d, d_tile, right, row, col + BLOCK_N // 2)
    tma.store_wait(0)


@gluon.jit
def leave(d, d_tile, acc, row, col):
    """Start the store of acc at (row, col) of D."""
    out = acc.to(d.dtype)
    tma.store_wait(0)
    barrier()
    d_tile.store(out)
    fence_async_shared()
    store(d, [row, col], d_tile)


@gluon.jit
def clustered(
    a, b, d, M, N, K,
    CLUSTER_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_CLUSTERS: gl.constexpr, NUM_STAGES: gl.constexpr,
    SUBTILES: gl.constexpr, MULTICAST: gl.constexpr,
):  # fmt: skip
    """The rings, and who works on them. CLUSTER_M is the rows of both blocks' tiles."""
    PARTS_M: gl.constexpr = CLUSTER_M // CONSUMERS
    D_COLS: gl.constexpr = BLOCK_N // SUBTILES
    A_TILES: gl.constexpr = CONSUMERS * NUM_STAGES
    a_ring = gl.allocate_shared_memory(a.dtype, [A_TILES, PARTS_M, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], b.layout)
    d_tiles = gl.allocate_shared_memory(d.dtype, [CONSUMERS, PARTS_M, D_COLS], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, BARRIERS], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, BARRIERS], BARRIER)
    given_back = empty
    if MULTICAST:
        given_back = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], CLUSTER_BARRIER)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
        if MULTICAST:
            mbarrier.init(given_back.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (
                d, M, N, K, a_ring, b_ring, full, empty, given_back, d_tiles,
                CLUSTER_M, BLOCK_N, GROUP_M, NUM_CLUSTERS, SUBTILES, MULTICAST, 0,
            )),
            (consume, (
                d, M, N, K, a_ring, b_ring, full, empty, given_back, d_tiles,
                CLUSTER_M, BLOCK_N, GROUP_M, NUM_CLUSTERS, SUBTILES, MULTICAST, 1,
            )),
            (produce, (
                a, b, M, N, K, a_ring, b_ring, full, empty, given_back,
                CLUSTER_M, BLOCK_N, GROUP_M, NUM_CLUSTERS, MULTICAST,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
