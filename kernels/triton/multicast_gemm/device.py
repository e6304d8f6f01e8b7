"""`gemm`'s specialized warps in clusters of two thread blocks, which multiply the same tile of B.

The tile of a cluster consists of the tiles of its thread blocks, one below the other. Without
MULTICAST both thread blocks load B; with MULTICAST the first one loads B for both. a, b and d are
descriptors of A (M, K), B (N, K) and D (M, N).

Shared memory, whose shapes cover both thread blocks: PART_M rows of a cluster's tile are those of
one consumer, half of them in each thread block.

    a_ring (CONSUMERS * NUM_STAGES, PART_M, BLOCK_K), b_ring (NUM_STAGES, BLOCK_N, BLOCK_K)
    full, empty (NUM_STAGES, BARRIERS): barriers of the stages
    cluster_empty (NUM_STAGES, 1): barriers of stages that both thread blocks have released
    d_tiles (CONSUMERS, PART_M, BLOCK_N / SUBTILES): through which each consumer stores D
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

from kernelcat.kernels.triton.common.device.ring import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    IS_TRITON_3_7,
    PRODUCER_REGISTERS,
    advance,
    load,
    locate_tile,
    store_tile,
)

CLUSTER = gl.constexpr(2)
"""Thread blocks of a cluster."""
# A barrier in each thread block. Triton 3.9 counts all of them, 3.6 only the thread block's own.
BARRIER = gl.constexpr(mbarrier.MBarrierLayout([[1]] if IS_TRITON_3_7 else [[0]]))
BARRIERS = gl.constexpr(2 if IS_TRITON_3_7 else 1)
# A barrier of the whole cluster, which is in its first thread block.
CLUSTER_BARRIER = gl.constexpr(mbarrier.MBarrierLayout([[0]]))


@gluon.jit
def produce(
    a, b, M, N, K, a_ring, b_ring, full, empty, cluster_empty,
    CLUSTER_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_CLUSTERS: gl.constexpr, MULTICAST: gl.constexpr,
):  # fmt: skip
    """The warp that loads, of each thread block.

    B is multicast to stages that both thread blocks have released.
    """
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    PART_M: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    STAGE_BYTES: gl.constexpr = CONSUMERS * a.block_type.nbytes // CLUSTER + b.block_type.nbytes
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)  # all stages are empty at first
    num_tiles = gl.cdiv(M, CLUSTER_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), num_tiles, NUM_CLUSTERS):
        tile_m, tile_n = locate_tile(tile, M, N, CLUSTER_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            stage_full = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(stage_full, STAGE_BYTES)
            for part in gl.static_range(CONSUMERS):
                row = tile_m * CLUSTER_M + part * PART_M
                load(a, [row, k], stage_full, a_ring.index(CONSUMERS * stage + part))
            if MULTICAST:
                mbarrier.wait(cluster_empty.index(stage), phase)  # only in the first thread block
                load(b, [tile_n * BLOCK_N, k], stage_full, b_ring.index(stage), multicast=True)
            else:
                load(b, [tile_n * BLOCK_N, k], stage_full, b_ring.index(stage))
            stage, phase = advance(stage, phase, 1, NUM_STAGES)


@gluon.jit
def release(empty, cluster_empty, stage, pred, MULTICAST: gl.constexpr):
    """Arrive at the empty barriers of a stage where ``pred``."""
    mbarrier.arrive(empty.index(stage), pred=pred)
    if MULTICAST:
        mbarrier.arrive(cluster_empty.index(stage), pred=pred)


@gluon.jit
def consume(
    d, M, N, K, a_ring, b_ring, full, empty, cluster_empty, d_tiles,
    CLUSTER_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_CLUSTERS: gl.constexpr, SUBTILES: gl.constexpr, MULTICAST: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """One warpgroup of each thread block: its part of every tile."""
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    PART_M: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16], [[1, 0]])
    d_tile = d_tiles.index(CONSUMER)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    num_tiles = gl.cdiv(M, CLUSTER_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), num_tiles, NUM_CLUSTERS):
        tile_m, tile_n = locate_tile(tile, M, N, CLUSTER_M, BLOCK_N, GROUP_M)
        row, col = tile_m * CLUSTER_M + CONSUMER * PART_M, tile_n * BLOCK_N
        acc = gl.zeros((PART_M, BLOCK_N), gl.float32, LAYOUT)
        # A value of its own: after `previous = stage` Triton 3.6 would see no change of `previous`
        # in the loop, and not carry it.
        previous = stage + 0
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            a_tile = a_ring.index(CONSUMERS * stage + CONSUMER)
            b_tile = b_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(a_tile, b_tile, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            release(empty, cluster_empty, previous, k > 0, MULTICAST)
            previous = stage
            stage, phase = advance(stage, phase, 1, NUM_STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(empty, cluster_empty, previous, True, MULTICAST)
        if SUBTILES == 2:
            halves = gl.permute(gl.reshape(acc, (PART_M, 2, BLOCK_N // 2)), (0, 2, 1))
            acc, right = gl.split(halves)
        store_tile(d, d_tile, acc, row, col)
        if SUBTILES == 2:
            store_tile(d, d_tile, right, row, col + BLOCK_N // 2)
    tma.store_wait(0)


@gluon.jit
def clustered(
    a, b, d, M, N, K,
    CLUSTER_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_CLUSTERS: gl.constexpr, NUM_STAGES: gl.constexpr,
    SUBTILES: gl.constexpr, MULTICAST: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory, initialize barriers, and give the warps their roles.

    CLUSTER_M is the number of rows of a cluster's tile.
    """
    PART_M: gl.constexpr = CLUSTER_M // CONSUMERS
    D_COLS: gl.constexpr = BLOCK_N // SUBTILES
    A_TILES: gl.constexpr = CONSUMERS * NUM_STAGES
    a_ring = gl.allocate_shared_memory(a.dtype, [A_TILES, PART_M, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], b.layout)
    d_tiles = gl.allocate_shared_memory(d.dtype, [CONSUMERS, PART_M, D_COLS], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, BARRIERS], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, BARRIERS], BARRIER)
    cluster_empty = empty
    if MULTICAST:
        cluster_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], CLUSTER_BARRIER)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
        if MULTICAST:
            mbarrier.init(cluster_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (
                d, M, N, K, a_ring, b_ring, full, empty, cluster_empty, d_tiles,
                CLUSTER_M, BLOCK_N, GROUP_M, NUM_CLUSTERS, SUBTILES, MULTICAST, 0,
            )),
            (consume, (
                d, M, N, K, a_ring, b_ring, full, empty, cluster_empty, d_tiles,
                CLUSTER_M, BLOCK_N, GROUP_M, NUM_CLUSTERS, SUBTILES, MULTICAST, 1,
            )),
            (produce, (
                a, b, M, N, K, a_ring, b_ring, full, empty, cluster_empty,
                CLUSTER_M, BLOCK_N, GROUP_M, NUM_CLUSTERS, MULTICAST,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
