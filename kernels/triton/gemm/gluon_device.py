"""`gemm` in Gluon, where warps have roles: one loads, two warpgroups multiply and store.

Persistent: while results are stored, the loading warp fills the ring with the next tile's operands.
The two warpgroups share each tile, or take turns with whole tiles (PINGPONG), so that one
multiplies while the other stores. Tiles that do not fill a wave may be split along K, as stream-K
does (TAIL_SPLITS). Roles and schedules are CUTLASS's, their form is that of Gluon's tutorials.

Arrays in device memory (common/device/epilogue.py has the epilogue):

    a, b: descriptors of (M, K) and (N, K); bias (N,)
    residual, d: descriptors of (M, N), or (M, N // 2) for the activation swiglu
    partials (split tiles * consumers, TAIL_SPLITS, PART_M * BLOCK_N) float32
    arrivals (split tiles * consumers,) int32, zero before and after

Shared memory, where PARTS is how many consumers share a tile, and PART_M the rows of each:

    a_ring (PARTS * NUM_STAGES, PART_M, BLOCK_K), b_ring (NUM_STAGES, BLOCK_N, BLOCK_K)
    full, empty (NUM_STAGES, 1): barriers of the stages
    d_tiles (buffers, PART_M, columns of a subtile of D): one or two buffers for each consumer
    loaded (CONSUMERS, 1): barriers, a consumer's residual has arrived in its d_tiles
    turns (CONSUMERS, 1): barriers, a consumer may multiply (PINGPONG)
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

from kernelcat.kernels.triton.common.device.epilogue import activate as triton_activate
from kernelcat.kernels.triton.common.device.epilogue import d_cols as triton_d_cols
from kernelcat.kernels.triton.common.device.ring import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    advance,
    barrier,
    load,
    locate_tile,
    store,
)

activate = gluon.jit(triton_activate.fn)
d_cols = gluon.jit(triton_d_cols.fn)


@gluon.jit
def count_whole_tiles(num_tiles, NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr):
    """Tiles that are one work item each; the rest, less than a wave, is split along K."""
    return num_tiles if TAIL_SPLITS == 1 else num_tiles // NUM_PROGRAMS * NUM_PROGRAMS


@gluon.jit
def locate_item(item, whole_tiles, K, BLOCK_K: gl.constexpr, TAIL_SPLITS: gl.constexpr):
    """Tile, split, and range of K of a work item, which is a whole tile or a split of a tile.

    The splits of a tile follow one another.
    """
    if TAIL_SPLITS == 1:
        return item, 0, 0, K
    tail_item = gl.maximum(item - whole_tiles, 0)
    tile, split = gl.minimum(item, whole_tiles + tail_item // TAIL_SPLITS), tail_item % TAIL_SPLITS
    k_blocks = gl.cdiv(K, BLOCK_K)
    first, last = k_blocks * split // TAIL_SPLITS, k_blocks * (split + 1) // TAIL_SPLITS
    is_whole = item < whole_tiles
    k_begin = gl.where(is_whole, 0, first * BLOCK_K)
    k_end = gl.where(is_whole, K, gl.minimum(last * BLOCK_K, K))
    return tile, split, k_begin, k_end


@gluon.jit
def produce(
    a, b, M, N, K, a_ring, b_ring, full, empty,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr,
):  # fmt: skip
    """The warp that loads: a stage holds the parts of A's tile that consumers multiply, and B's."""
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    PARTS: gl.constexpr = a_ring.shape[0] // NUM_STAGES
    PART_M: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    STAGE_BYTES: gl.constexpr = PARTS * a.block_type.nbytes + b.block_type.nbytes
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)  # all stages are empty at first
    num_tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    whole_tiles = count_whole_tiles(num_tiles, NUM_PROGRAMS, TAIL_SPLITS)
    num_items = whole_tiles + (num_tiles - whole_tiles) * TAIL_SPLITS
    for item in range(gl.program_id(0), num_items, NUM_PROGRAMS):
        tile, _, k_begin, k_end = locate_item(item, whole_tiles, K, BLOCK_K, TAIL_SPLITS)
        tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(k_begin, k_end, BLOCK_K):
            stage_full = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(stage_full, STAGE_BYTES)
            for part in gl.static_range(PARTS):
                row = tile_m * BLOCK_M + part * PART_M
                load(a, [row, k], stage_full, a_ring.index(PARTS * stage + part))
            load(b, [tile_n * BLOCK_N, k], stage_full, b_ring.index(stage))
            stage, phase = advance(stage, phase, 1, NUM_STAGES)


@gluon.jit
def multiply(
    k_begin, k_end, a_ring, b_ring, full, empty, next_turn, stage, phase,
    PART: gl.constexpr, PINGPONG: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply a part of A (PART_M, K) by a tile of B (BLOCK_N, K); the sums, and the next stage.

    A stage is released after the product of the next stage has started. Where PINGPONG, the other
    consumer may multiply once the last product has started.
    """
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    BLOCK_K: gl.constexpr = b_ring.shape[2]
    PARTS: gl.constexpr = a_ring.shape[0] // NUM_STAGES
    PART_M: gl.constexpr = a_ring.shape[1]
    acc = gl.zeros((PART_M, BLOCK_N), gl.float32, LAYOUT)
    # A value of its own: after `previous = stage` Triton 3.6 would see no change of `previous`
    # in the loop, and not carry it.
    previous = stage + 0
    for k in range(k_begin, k_end, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        a_tile = a_ring.index(PARTS * stage + PART)
        b_tile = b_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(a_tile, b_tile, acc, use_acc=k > k_begin, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(previous), pred=k > k_begin)
        previous = stage
        stage, phase = advance(stage, phase, 1, NUM_STAGES)
    if PINGPONG:
        mbarrier.arrive(next_turn)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(previous))
    return acc, stage, phase


@gluon.jit
def sum_splits(acc, partials, arrivals, slot, split, TAIL_SPLITS: gl.constexpr):
    """What common/device/split_k.py does for a program, for one warpgroup.

    acc : (rows, cols) float32, the partial sum of this warpgroup
    slot : number of the tile and consumer among those of all split tiles
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
    element = gl.expand_dims(rows, 1) * COLS + gl.expand_dims(cols, 0)
    slot_partials = partials + slot.to(gl.int64) * (TAIL_SPLITS * ROWS * COLS) + element
    gl.store(slot_partials + split * (ROWS * COLS), acc)
    barrier()  # all threads store their partial sums before one thread counts
    is_last = gl.atomic_add(arrivals + slot, 1, sem="acq_rel") == TAIL_SPLITS - 1
    if is_last:
        acc = gl.zeros_like(acc)
        for index in range(TAIL_SPLITS):
            acc += gl.load(slot_partials + index * (ROWS * COLS), cache_modifier=".cg")
        gl.store(arrivals + slot, 0)
    return acc, is_last


@gluon.jit
def finish_subtile(
    z, bias, d, d_tile, loaded, phase, row, col, N,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue to z (rows, cols), which is at (row, col) of the product; start the store.

    d_tile (rows, columns of D) holds the residual after ``loaded`` has completed ``phase``, and
    then what is stored.
    """
    if HAS_BIAS:
        cols = col + gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout))
        z += gl.expand_dims(gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32), 0)
    out = activate(z, ACTIVATION)
    if HAS_RESIDUAL:
        mbarrier.wait(loaded, phase)
        out += d_tile.load(out.type.layout).to(gl.float32)
    else:
        tma.store_wait(0)
    out = out.to(d.dtype)
    barrier()
    d_tile.store(out)
    fence_async_shared()
    store(d, [row, d_cols(col, ACTIVATION)], d_tile)


@gluon.jit
def finish_tile(
    acc, bias, d, d_tiles, loaded, phase, row, col, N,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    SUBTILES: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue to acc (PART_M, BLOCK_N), by halves where SUBTILES is 2, and store."""
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1] // SUBTILES
    BUFFERS: gl.constexpr = d_tiles.shape[0] // CONSUMERS
    FIRST: gl.constexpr = BUFFERS * CONSUMER
    if SUBTILES == 2:
        acc, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, COLS)), (0, 2, 1)))
    finish_subtile(
        acc, bias, d, d_tiles.index(FIRST), loaded, phase, row, col, N,
        HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip
    if SUBTILES == 2:
        finish_subtile(
            right, bias, d, d_tiles.index(FIRST + BUFFERS - 1), loaded, phase, row, col + COLS, N,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
        )  # fmt: skip


@gluon.jit
def consume(
    bias, residual, d, partials, arrivals, M, N, K,
    a_ring, b_ring, full, empty, turns, d_tiles, loaded,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr, SUBTILES: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its part of every tile, or every other tile where PINGPONG.

    Where PINGPONG, a consumer waits for its turn before it waits for a stage, because the phase of
    a barrier only distinguishes odd rounds of the ring from even ones. With two SUBTILES both
    halves of a tile are stored through a buffer of half the size. A residual stays in the buffers
    while the product is computed, and so needs a buffer for each half.
    """
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    PINGPONG: gl.constexpr = a_ring.shape[0] == NUM_STAGES
    PART: gl.constexpr = 0 if PINGPONG else CONSUMER
    PART_M: gl.constexpr = a_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    BUFFERS: gl.constexpr = d_tiles.shape[0] // CONSUMERS
    loaded = loaded.index(CONSUMER)
    stage, phase, loaded_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    turn, next_turn = turns.index(CONSUMER), turns.index(1 - CONSUMER)
    turn_phase = gl.to_tensor(1 - CONSUMER)  # consumer 0 begins
    first_item, step = gl.program_id(0), NUM_PROGRAMS
    if PINGPONG:
        first_item, step = first_item + CONSUMER * NUM_PROGRAMS, CONSUMERS * NUM_PROGRAMS
        stage, phase = advance(stage, phase, CONSUMER * gl.cdiv(K, BLOCK_K), NUM_STAGES)
    num_tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    whole_tiles = count_whole_tiles(num_tiles, NUM_PROGRAMS, TAIL_SPLITS)
    num_items = whole_tiles + (num_tiles - whole_tiles) * TAIL_SPLITS
    for item in range(first_item, num_items, step):
        tile, split, k_begin, k_end = locate_item(item, whole_tiles, K, BLOCK_K, TAIL_SPLITS)
        tile_m, tile_n = locate_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M + PART * PART_M, tile_n * BLOCK_N
        if HAS_RESIDUAL:
            tma.store_wait(0)
            barrier()
            mbarrier.expect(loaded, BUFFERS * d.block_type.nbytes)
            for i in gl.static_range(BUFFERS):
                d_col = d_cols(col + i * (BLOCK_N // SUBTILES), ACTIVATION)
                load(residual, [row, d_col], loaded, d_tiles.index(BUFFERS * CONSUMER + i))
        if PINGPONG:
            mbarrier.wait(turn, turn_phase)
            turn_phase ^= 1
        acc, stage, phase = multiply(
            k_begin, k_end, a_ring, b_ring, full, empty, next_turn, stage, phase,
            PART, PINGPONG, LAYOUT,
        )  # fmt: skip
        if PINGPONG:  # the next k-blocks are the other consumer's
            stage, phase = advance(stage, phase, gl.cdiv(K, BLOCK_K), NUM_STAGES)
        is_last = gl.to_tensor(True)
        if TAIL_SPLITS > 1:  # noqa: SIM102 - only this condition is known when it is compiled
            if item >= whole_tiles:
                slot = (tile - whole_tiles) * CONSUMERS + CONSUMER
                acc, is_last = sum_splits(acc, partials, arrivals, slot, split, TAIL_SPLITS)
        if is_last:
            finish_tile(
                acc, bias, d, d_tiles, loaded, loaded_phase, row, col, N, HAS_BIAS, ACTIVATION,
                HAS_RESIDUAL, SUBTILES, CONSUMER,
            )  # fmt: skip
        loaded_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def specialized(
    a, b, bias, residual, d, partials, arrivals, M, N, K,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr,
    NUM_STAGES: gl.constexpr, SUBTILES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory, initialize barriers, and give the warps their roles."""
    PARTS: gl.constexpr = 1 if PINGPONG else CONSUMERS
    PART_M: gl.constexpr = BLOCK_M // PARTS
    a_ring = gl.allocate_shared_memory(a.dtype, [PARTS * NUM_STAGES, PART_M, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], b.layout)
    D_TILES: gl.constexpr = CONSUMERS * SUBTILES if HAS_RESIDUAL else CONSUMERS
    d_tiles = gl.allocate_shared_memory(d.dtype, [D_TILES, PART_M, d.block_shape[1]], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    # Barriers that no warp waits for must not exist: Triton would reuse their memory.
    loaded, turns = full, full
    if HAS_RESIDUAL:
        loaded = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    if PINGPONG:
        turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    for i in gl.static_range(CONSUMERS):
        if HAS_RESIDUAL:
            mbarrier.init(loaded.index(i), count=1)
        if PINGPONG:
            mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (
                bias, residual, d, partials, arrivals, M, N, K, a_ring, b_ring, full, empty,
                turns, d_tiles, loaded, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, BLOCK_M, BLOCK_N,
                GROUP_M, NUM_PROGRAMS, TAIL_SPLITS, SUBTILES, 0,
            )),
            (consume, (
                bias, residual, d, partials, arrivals, M, N, K, a_ring, b_ring, full, empty,
                turns, d_tiles, loaded, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, BLOCK_M, BLOCK_N,
                GROUP_M, NUM_PROGRAMS, TAIL_SPLITS, SUBTILES, 1,
            )),
            (produce, (
                a, b, M, N, K, a_ring, b_ring, full, empty, BLOCK_M, BLOCK_N, GROUP_M,
                NUM_PROGRAMS, TAIL_SPLITS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
