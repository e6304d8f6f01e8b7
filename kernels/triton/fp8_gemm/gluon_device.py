"""`fp8_gemm` in Gluon, where warps have roles: one loads, warpgroups multiply and promote.

Two or three warpgroups own 64 rows of a tile each. While one scales a block's sums and adds them
up in float32, the products of another occupy the tensor cores: DeepGEMM's schedule. Persistent:
while results leave, the loading warp fills the ring with the next tile's operands. a, b and d are
descriptors of 64, 128 and 64 rows; a_scale is (K/128, M), b_scale (N/128, K/128).
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

from kernelcat.kernels.triton.gemm.gluon_device import advance, barrier, load, store, tile_of

PART_M = gl.constexpr(64)
BLOCK = gl.constexpr(128)


@gluon.jit
def produce(
    a, b, sizes, rings,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp. A stage holds 64 rows of A for each consumer, and 128 rows of B."""
    M, N, K = sizes
    a_ring, b_ring, full, empty = rings
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    BYTES: gl.constexpr = CONSUMERS * a.block_type.nbytes + b.block_type.nbytes
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)  # a ring begins empty
    tiles = gl.cdiv(M, CONSUMERS * PART_M) * gl.cdiv(N, BLOCK)
    for tile in range(gl.program_id(0), tiles, NUM_PROGRAMS):
        tile_m, tile_n = tile_of(tile, M, N, CONSUMERS * PART_M, BLOCK, GROUP_M)
        for k in range(0, K, BLOCK):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            for part in gl.static_range(CONSUMERS):
                row = (CONSUMERS * tile_m + part) * PART_M
                load(a, [row, k], ready, a_ring.index(CONSUMERS * stage + part))
            load(b, [tile_n * BLOCK, k], ready, b_ring.index(stage))
            stage, phase = advance(stage, phase, 1, NUM_STAGES)


@gluon.jit
def consume(
    a_scale, b_scale, d, sizes, rings, d_tiles,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 rows of every tile. Scales are read one block of K ahead."""
    M, N, K = sizes
    a_ring, b_ring, full, empty = rings
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    d_tile = d_tiles.index(CONSUMER)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    k_blocks = gl.cdiv(K, BLOCK)
    tiles = gl.cdiv(M, CONSUMERS * PART_M) * gl.cdiv(N, BLOCK)
    for tile in range(gl.program_id(0), tiles, NUM_PROGRAMS):
        tile_m, tile_n = tile_of(tile, M, N, CONSUMERS * PART_M, BLOCK, GROUP_M)
        row = (CONSUMERS * tile_m + CONSUMER) * PART_M
        rows = row + gl.arange(0, PART_M, gl.SliceLayout(1, LAYOUT))
        of_a = a_scale + gl.where(rows < M, rows, 0)  # rows past the end are not stored
        of_b = b_scale + tile_n * k_blocks
        scale_a, scale_b = gl.load(of_a), gl.load(of_b)
        acc = gl.zeros((PART_M, BLOCK), gl.float32, LAYOUT)
        for k_block in range(k_blocks):
            following = min(k_block + 1, k_blocks - 1)
            next_a, next_b = gl.load(of_a + following * M), gl.load(of_b + following)
            mbarrier.wait(full.index(stage), phase)
            a_tile = a_ring.index(CONSUMERS * stage + CONSUMER)
            b_tile = b_ring.index(stage).permute((1, 0))
            sums = gl.zeros((PART_M, BLOCK), gl.float32, LAYOUT)
            sums = warpgroup_mma(a_tile, b_tile, sums, use_acc=False, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(empty.index(stage))
            acc += sums * gl.expand_dims(scale_a * scale_b, 1)
            scale_a, scale_b = next_a, next_b
            stage, phase = advance(stage, phase, 1, NUM_STAGES)
        out = acc.to(d.dtype)
        tma.store_wait(0)
        barrier()
        d_tile.store(out)
        fence_async_shared()
        store(d, [row, tile_n * BLOCK], d_tile)
    tma.store_wait(0)


@gluon.jit
def specialized(
    a, a_scale, b, b_scale, d, M, N, K,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    NUM_STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """The rings, and who works on them."""
    a_ring = gl.allocate_shared_memory(a.dtype, [CONSUMERS * NUM_STAGES, PART_M, BLOCK], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [NUM_STAGES, BLOCK, BLOCK], b.layout)
    d_tiles = gl.allocate_shared_memory(d.dtype, [CONSUMERS, PART_M, BLOCK], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    sizes, rings = (M, N, K), (a_ring, b_ring, full, empty)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (a_scale, b_scale, d, sizes, rings, d_tiles,
                           CONSUMERS, GROUP_M, NUM_PROGRAMS, 0)),
                (consume, (a_scale, b_scale, d, sizes, rings, d_tiles,
                           CONSUMERS, GROUP_M, NUM_PROGRAMS, 1)),
                (produce, (a, b, sizes, rings, CONSUMERS, GROUP_M, NUM_PROGRAMS)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (a_scale, b_scale, d, sizes, rings, d_tiles,
                           CONSUMERS, GROUP_M, NUM_PROGRAMS, 0)),
                (consume, (a_scale, b_scale, d, sizes, rings, d_tiles,
                           CONSUMERS, GROUP_M, NUM_PROGRAMS, 1)),
                (consume, (a_scale, b_scale, d, sizes, rings, d_tiles,
                           CONSUMERS, GROUP_M, NUM_PROGRAMS, 2)),
                (produce, (a, b, sizes, rings, CONSUMERS, GROUP_M, NUM_PROGRAMS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
