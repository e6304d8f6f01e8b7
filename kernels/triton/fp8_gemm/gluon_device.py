"""`fp8_gemm` in Gluon, where warps have roles: one loads, warpgroups multiply and promote.

Two or three warpgroups own 64 rows of a tile each. While one scales a k-block's sums and adds them
up in float32, the products of another occupy the tensor cores: DeepGEMM's schedule. Persistent:
while results are stored, the loading warp fills the ring with the next tile's operands.

Arrays in device memory:

    a (M, K), b (N, K), d (M, N): descriptors of blocks of 64, 128 and 64 rows, and 128 columns
    a_scale (K/128, M), b_scale (N/128, K/128) float32

Shared memory:

    a_ring (CONSUMERS * NUM_STAGES, 64, 128), b_ring (NUM_STAGES, 128, 128)
    full, empty (NUM_STAGES, 1): barriers of the stages
    d_tiles (CONSUMERS, 64, 128): through which each consumer stores D
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

from kernelcat.kernels.triton.common.device.ring import advance, load, locate_tile, store_tile

PART_M = gl.constexpr(64)
"""Rows of a tile that one consumer multiplies."""
BLOCK = gl.constexpr(128)
"""BLOCK_N, BLOCK_K, and the edge of a block of scales."""


@gluon.jit
def produce(
    a, b, sizes, rings,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The warp that loads: a stage holds 64 rows of A for each consumer, and 128 rows of B."""
    M, N, K = sizes
    a_ring, b_ring, full, empty = rings
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    STAGE_BYTES: gl.constexpr = CONSUMERS * a.block_type.nbytes + b.block_type.nbytes
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)  # all stages are empty at first
    num_tiles = gl.cdiv(M, CONSUMERS * PART_M) * gl.cdiv(N, BLOCK)
    for tile in range(gl.program_id(0), num_tiles, NUM_PROGRAMS):
        tile_m, tile_n = locate_tile(tile, M, N, CONSUMERS * PART_M, BLOCK, GROUP_M)
        for k in range(0, K, BLOCK):
            stage_full = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(stage_full, STAGE_BYTES)
            for part in gl.static_range(CONSUMERS):
                row = (CONSUMERS * tile_m + part) * PART_M
                load(a, [row, k], stage_full, a_ring.index(CONSUMERS * stage + part))
            load(b, [tile_n * BLOCK, k], stage_full, b_ring.index(stage))
            stage, phase = advance(stage, phase, 1, NUM_STAGES)


@gluon.jit
def consume(
    a_scale, b_scale, d, sizes, rings, d_tiles,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 rows of every tile. Scales are loaded one k-block ahead."""
    M, N, K = sizes
    a_ring, b_ring, full, empty = rings
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    k_blocks = gl.cdiv(K, BLOCK)
    num_tiles = gl.cdiv(M, CONSUMERS * PART_M) * gl.cdiv(N, BLOCK)
    for tile in range(gl.program_id(0), num_tiles, NUM_PROGRAMS):
        tile_m, tile_n = locate_tile(tile, M, N, CONSUMERS * PART_M, BLOCK, GROUP_M)
        row = (CONSUMERS * tile_m + CONSUMER) * PART_M
        rows = row + gl.arange(0, PART_M, gl.SliceLayout(1, LAYOUT))
        tile_a_scale = a_scale + gl.where(rows < M, rows, 0)  # rows past the end are not stored
        tile_b_scale = b_scale + tile_n * k_blocks
        scale_a, scale_b = gl.load(tile_a_scale), gl.load(tile_b_scale)
        acc = gl.zeros((PART_M, BLOCK), gl.float32, LAYOUT)
        for k_block in range(k_blocks):
            next_k_block = min(k_block + 1, k_blocks - 1)
            next_a = gl.load(tile_a_scale + next_k_block * M)
            next_b = gl.load(tile_b_scale + next_k_block)
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
        store_tile(d, d_tiles.index(CONSUMER), acc, row, tile_n * BLOCK)
    tma.store_wait(0)


@gluon.jit
def specialized(
    a, a_scale, b, b_scale, d, M, N, K,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    NUM_STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory, initialize barriers, and give the warps their roles."""
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
