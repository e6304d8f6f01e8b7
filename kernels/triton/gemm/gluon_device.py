"""`gemm` in Gluon, where warps have roles: one loads, two warpgroups multiply and store.

Persistent: while results leave, the loading warp fills the ring with the next tile's operands.
The two warpgroups share each tile, or take turns with whole tiles (PINGPONG), so that one
multiplies while the other stores. Tiles that do not fill a wave may be split along K, as stream-K
does (TAIL_SPLITS). Roles and schedules are CUTLASS's, their form is that of Gluon's tutorials.
a, b, residual and d are descriptors, shapes are in epilogue.py.
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

from kernelcat.kernels.triton.gemm.device import tile_of as triton_tile_of
from kernelcat.kernels.triton.gemm.epilogue import activate as triton_activate
from kernelcat.kernels.triton.gemm.epilogue import d_cols as triton_d_cols

RENAMED = hasattr(tma, "async_load")  # since Triton 3.7
load = tma.async_load if RENAMED else tma.async_copy_global_to_shared
store = tma.async_store if RENAMED else tma.async_copy_shared_to_global
barrier = gl.barrier if RENAMED else gl.thread_barrier

tile_of = gluon.jit(triton_tile_of.fn)
activate = gluon.jit(triton_activate.fn)
d_cols = gluon.jit(triton_d_cols.fn)

CONSUMERS = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def advance(stage, phase, steps, NUM_STAGES: gl.constexpr):
    """The place in the ring ``steps`` later; the phase turns with every round."""
    after = stage + steps
    return after % NUM_STAGES, phase ^ (after // NUM_STAGES & 1)


@gluon.jit
def whole_tiles(tiles, NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr):
    """How many tiles are one unit of work each; the rest, less than a wave, is split along K."""
    return tiles if TAIL_SPLITS == 1 else tiles // NUM_PROGRAMS * NUM_PROGRAMS


@gluon.jit
def unit_at(index, whole, K, BLOCK_K: gl.constexpr, TAIL_SPLITS: gl.constexpr):
    """Tile, split, and range of k of a unit of work; splits of a tile are neighbours."""
    if TAIL_SPLITS == 1:
        return index, 0, 0, K
    beyond = gl.maximum(index - whole, 0)
    tile, split = gl.minimum(index, whole + beyond // TAIL_SPLITS), beyond % TAIL_SPLITS
    steps = gl.cdiv(K, BLOCK_K)
    first, last = steps * split // TAIL_SPLITS, steps * (split + 1) // TAIL_SPLITS
    is_whole = index < whole
    k_begin = gl.where(is_whole, 0, first * BLOCK_K)
    k_end = gl.where(is_whole, K, gl.minimum(last * BLOCK_K, K))
    return tile, split, k_begin, k_end


@gluon.jit
def produce(
    a, b, M, N, K, a_ring, b_ring, full, empty,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr,
):  # fmt: skip
    """One warp. A stage holds the parts of A's tile that consumers multiply, and B's tile."""
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    PARTS: gl.constexpr = a_ring.shape[0] // NUM_STAGES
    PART_M: gl.constexpr = a_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    BYTES: gl.constexpr = PARTS * a.block_type.nbytes + b.block_type.nbytes
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)  # a ring begins empty
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    whole = whole_tiles(tiles, NUM_PROGRAMS, TAIL_SPLITS)
    for index in range(gl.program_id(0), whole + (tiles - whole) * TAIL_SPLITS, NUM_PROGRAMS):
        tile, _, k_begin, k_end = unit_at(index, whole, K, BLOCK_K, TAIL_SPLITS)
        tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(k_begin, k_end, BLOCK_K):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            for part in gl.static_range(PARTS):
                row = tile_m * BLOCK_M + part * PART_M
                load(a, [row, k], ready, a_ring.index(PARTS * stage + part))
            load(b, [tile_n * BLOCK_N, k], ready, b_ring.index(stage))
            stage, phase = advance(stage, phase, 1, NUM_STAGES)


@gluon.jit
def multiply(
    k_begin, k_end, a_ring, b_ring, full, empty, next_turn, stage, phase,
    PART: gl.constexpr, PINGPONG: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The product of a part of A's tile (PART_M, k) and B's (BLOCK_N, k); the next stage and phase.

    A stage is given back when the next one's product has been started, the turn with the last.
    """
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    BLOCK_K: gl.constexpr = b_ring.shape[2]
    PARTS: gl.constexpr = a_ring.shape[0] // NUM_STAGES
    PART_M: gl.constexpr = a_ring.shape[1]
    acc = gl.zeros((PART_M, BLOCK_N), gl.float32, LAYOUT)
    previous = stage + 0  # another object: Triton 3.6 carries a name that changes in the loop
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
    """device.sum_splits for a warpgroup: a slot's partial sums, and whether this is the last."""
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
    within = gl.expand_dims(rows, 1) * COLS + gl.expand_dims(cols, 0)
    base = partials + slot.to(gl.int64) * (TAIL_SPLITS * ROWS * COLS) + within
    gl.store(base + split * (ROWS * COLS), acc)
    barrier()  # every thread's partials before the one thread that counts
    last = gl.atomic_add(arrivals + slot, 1, sem="acq_rel") == TAIL_SPLITS - 1
    if last:
        acc = gl.zeros_like(acc)
        for index in range(TAIL_SPLITS):
            acc += gl.load(base + index * (ROWS * COLS), cache_modifier=".cg")
        gl.store(arrivals + slot, 0)
    return acc, last


@gluon.jit
def finish_part(
    z, bias, d, d_tile, loaded, phase, row, col, N,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Start the store of what comes of z, at (row, col) of the product.

    d_tile holds the residual once ``loaded``, and then what is stored.
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
def finish(
    acc, bias, d, d_tiles, loaded, phase, row, col, N,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    SUBTILES: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """The whole of acc, by halves where SUBTILES is 2."""
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1] // SUBTILES
    BUFFERS: gl.constexpr = d_tiles.shape[0] // CONSUMERS
    FIRST: gl.constexpr = BUFFERS * CONSUMER
    if SUBTILES == 2:
        acc, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, COLS)), (0, 2, 1)))
    finish_part(
        acc, bias, d, d_tiles.index(FIRST), loaded, phase, row, col, N,
        HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip
    if SUBTILES == 2:
        finish_part(
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
    """One warpgroup: its part of every tile, or every other tile.

    Stages are waited for in turns: a barrier only tells odd rounds of the ring from even ones.
    SUBTILES 2 stores by halves, through a buffer of half the size; a residual, which waits in the
    buffer for the product, needs one for each half.
    """
    NUM_STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    PINGPONG: gl.constexpr = a_ring.shape[0] == NUM_STAGES
    PART: gl.constexpr = 0 if PINGPONG else CONSUMER
    PART_M: gl.constexpr = a_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    D_BUFFERS: gl.constexpr = d_tiles.shape[0] // CONSUMERS
    loaded = loaded.index(CONSUMER)
    stage, phase, d_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    turn, next_turn = turns.index(CONSUMER), turns.index(1 - CONSUMER)
    turn_phase = gl.to_tensor(1 - CONSUMER)  # consumer 0 begins
    first, step = gl.program_id(0), NUM_PROGRAMS
    if PINGPONG:
        first, step = first + CONSUMER * NUM_PROGRAMS, CONSUMERS * NUM_PROGRAMS
        stage, phase = advance(stage, phase, CONSUMER * gl.cdiv(K, BLOCK_K), NUM_STAGES)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    whole = whole_tiles(tiles, NUM_PROGRAMS, TAIL_SPLITS)
    for index in range(first, whole + (tiles - whole) * TAIL_SPLITS, step):
        tile, split, k_begin, k_end = unit_at(index, whole, K, BLOCK_K, TAIL_SPLITS)
        tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M + PART * PART_M, tile_n * BLOCK_N
        if HAS_RESIDUAL:
            tma.store_wait(0)
            barrier()
            mbarrier.expect(loaded, D_BUFFERS * d.block_type.nbytes)
            for i in gl.static_range(D_BUFFERS):
                d_col = d_cols(col + i * (BLOCK_N // SUBTILES), ACTIVATION)
                load(residual, [row, d_col], loaded, d_tiles.index(D_BUFFERS * CONSUMER + i))
        if PINGPONG:
            mbarrier.wait(turn, turn_phase)
            turn_phase ^= 1
        acc, stage, phase = multiply(
            k_begin, k_end, a_ring, b_ring, full, empty, next_turn, stage, phase,
            PART, PINGPONG, LAYOUT,
        )  # fmt: skip
        if PINGPONG:  # over the other's tile
            stage, phase = advance(stage, phase, gl.cdiv(K, BLOCK_K), NUM_STAGES)
        last = gl.to_tensor(True)
        if TAIL_SPLITS > 1:  # noqa: SIM102 - one is known to the compiler, the other is not
            if index >= whole:
                slot = (tile - whole) * CONSUMERS + CONSUMER
                acc, last = sum_splits(acc, partials, arrivals, slot, split, TAIL_SPLITS)
        if last:
            finish(
                acc, bias, d, d_tiles, loaded, d_phase, row, col, N, HAS_BIAS, ACTIVATION,
                HAS_RESIDUAL, SUBTILES, CONSUMER,
            )  # fmt: skip
        d_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def specialized(
    a, b, bias, residual, d, partials, arrivals, M, N, K,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr, TAIL_SPLITS: gl.constexpr,
    NUM_STAGES: gl.constexpr, SUBTILES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """The rings, and who works on them."""
    PARTS: gl.constexpr = 1 if PINGPONG else CONSUMERS
    PART_M: gl.constexpr = BLOCK_M // PARTS
    a_ring = gl.allocate_shared_memory(a.dtype, [PARTS * NUM_STAGES, PART_M, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], b.layout)
    D_TILES: gl.constexpr = CONSUMERS * SUBTILES if HAS_RESIDUAL else CONSUMERS
    d_tiles = gl.allocate_shared_memory(d.dtype, [D_TILES, PART_M, d.block_shape[1]], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    # Barriers that nobody waits for must not be: their memory would be given to others.
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
