"""The main loop of the two consumer warpgroups of `wgmma`.

Each warpgroup computes the weights of every other tile of tokens, and adds half of the columns of
the values of all tiles. The barriers are listed in `wgmma`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.online_softmax import exp2
from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.flashmla.softmax import ROWS, mask, online
from kernelcat.reference._mla_row import LATENT, ROW

WARPGROUPS = 2
"""Consumer warpgroups; each adds half of the columns of the values."""
STAGES = WARPGROUPS
"""One stage for the tiles of each warpgroup."""
BLOCK = 64
"""Rows of a thread block, and tokens of a tile."""
PIECE = 64
"""Columns of a tile that one TMA load copies."""
PIECES = ROW // PIECE
PARTS = WARPGROUPS + 1
"""Parts of a stage with an empty barrier each: the halves of the values, and the columns behind
them, which only keys have."""
COLUMNS = LATENT // WARPGROUPS
"""Columns of the values that a warpgroup adds."""
HALF = COLUMNS // PIECE
"""Pieces of a half of the values."""
WARPGROUP_BARRIER = 1
"""The named barrier of the first warpgroup; the second has the next one."""
MMA_THREADS = 128 * WARPGROUPS


class Shared(NamedTuple):
    """Shared memory, as a thread partitions it."""

    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K, PIECES)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGES * PIECES)
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGES): this warpgroup's half of the values
    tOrP: cute.Tensor  # (MMA, MMA_M, MMA_K, 1): weights
    r2s: cute.TiledCopy  # weights from registers to shared memory
    tRS_rP: cute.Tensor  # weights in registers, in the order of r2s
    tRS_sP: cute.Tensor  # weights in shared memory, partitioned by r2s
    vectors: cute.Tensor  # (8, 8, BLOCK, STAGES * PIECES): vectors of the tiles, swizzled
    row_max: cute.Tensor  # (ROWS,): row max that the weights in shared memory are relative to
    full: cute.Pointer  # (STAGES * PIECES,) barriers
    empty: cute.Pointer  # (STAGES * PARTS,) barriers
    weights_full: cute.Pointer  # (WARPGROUPS,) barriers


class Registers(NamedTuple):
    """Registers of a thread, which has ROWS rows."""

    acc: cute.Tensor  # ((2, 2, BLOCK / 8), 1, 1): scores
    out: cute.Tensor  # ((2, 2, COLUMNS / 8), 1, 1): sums of values
    row_max: cute.Tensor  # (ROWS,): weights and sums are relative to 2^row_max
    row_sum: cute.Tensor  # (ROWS,): sums of this thread's weights
    factor: cute.Tensor  # (ROWS,): out must be multiplied by it
    last_visible: cute.Tensor  # (ROWS,): position of the last token a row sees


def make_mmas(dtype):
    """Products of scores, of values with own weights, and of values with the other's weights.

    A warpgroup has its own weights in registers, the other warpgroup's in shared memory.
    """
    k_major = LayoutEnum.ROW_MAJOR.sm90_mma_major_mode()
    mn_major = LayoutEnum.COL_MAJOR.sm90_mma_major_mode()
    source = warpgroup.OperandSource

    def mma(b_major, columns, a_source):
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, k_major, b_major, Float32, (1, 1, 1), (BLOCK, columns), a_source
        )

    return (
        mma(k_major, BLOCK, source.SMEM),
        mma(mn_major, COLUMNS, source.RMEM),
        mma(mn_major, COLUMNS, source.SMEM),
    )


def as_values(sK):
    """Keys (BLOCK, PIECE, STAGES * PIECES) as transposed values (LATENT, BLOCK, STAGES)."""
    piece = BLOCK * PIECE
    layout = cute.make_layout(
        ((PIECE, LATENT // PIECE), BLOCK, STAGES), stride=((1, piece), PIECE, PIECES * piece)
    )
    return cute.make_tensor(sK.iterator, layout)


def as_vectors(memory, pieces):
    """(8, 8, BLOCK, pieces): vectors of 16 bytes; vector c of row r is at c ^ (r % 8)."""
    layout = cute.make_layout((8, 8, BLOCK, pieces), stride=(1, 8, PIECE, BLOCK * PIECE))
    return cute.make_tensor(memory, layout)


def make_shared(
    mmas, sQ, sK, sP, vectors, row_max, full, empty, weights_full, warpgroup_idx, tidx, dtype
):
    """Partitions shared memory for a thread of warpgroup ``warpgroup_idx``."""
    qk_mma, own_mma, other_mma = mmas
    thr_qk, thr_own, thr_other = (mma.get_slice(0) for mma in mmas)
    sV = cute.local_tile(as_values(sK), (COLUMNS, BLOCK, STAGES), (warpgroup_idx, 0, 0))
    row = tidx // 32 * 16 + tidx % 32 // 4
    return Shared(
        qk_mma.make_fragment_A(thr_qk.partition_A(sQ)),
        qk_mma.make_fragment_B(thr_qk.partition_B(sK)),
        own_mma.make_fragment_B(thr_own.partition_B(sV)),
        other_mma.make_fragment_A(thr_other.partition_A(sP)),
        *registers_to_shared(qk_mma, sP, tidx, dtype),
        vectors,
        cute.make_tensor(row_max + row, cute.make_layout(ROWS, stride=8)),
        full,
        empty,
        weights_full,
    )


def make_registers(mmas):
    """Registers of a thread, not initialized."""
    acc_shape = mmas[0].partition_shape_C((BLOCK, BLOCK))
    out_shape = mmas[1].partition_shape_C((BLOCK, COLUMNS))
    shapes = (acc_shape, out_shape, ROWS, ROWS, ROWS)
    floats = (cute.make_rmem_tensor(shape, Float32) for shape in shapes)
    return Registers(*floats, cute.make_rmem_tensor(ROWS, Int32))


class Seesaw:
    """Tile t of a thread block belongs to warpgroup t % WARPGROUPS, and is in stage t % WARPGROUPS.

    A base class of `Wgmma`; uses its ``dtype``, ``packed``, ``cluster`` and ``scores_first``.
    """

    @cute.jit
    def attend(
        self,
        mmas: tuple,
        shared: Shared,
        registers: Registers,
        warpgroup_idx: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
        min_visible: Int32,  # position of the last token that all rows see
        kv_len: Int32,
        scale: Float32,
    ):
        """Attends to all tiles of the thread block."""
        if (warpgroup_idx == 0) & (num_tiles > 0):
            token = split_idx * BLOCK
            self.step(
                mmas, shared, registers, warpgroup_idx, Int32(0), token, min_visible, kv_len, scale,
                False,
            )  # fmt: skip
        for index in cutlass.range(WARPGROUPS - warpgroup_idx, num_tiles, WARPGROUPS, unroll=1):
            token = (split_idx + index * num_splits) * BLOCK
            self.step(
                mmas, shared, registers, warpgroup_idx, index, token, min_visible, kv_len, scale,
                True,
            )  # fmt: skip
        if (num_tiles > 0) & ((num_tiles - 1) % WARPGROUPS != warpgroup_idx):
            self.add_other_values(mmas[2], shared, registers, warpgroup_idx, num_tiles - 1)
            warpgroup.wait_group(0)

    @cute.jit
    def step(
        self,
        mmas: tuple,
        shared: Shared,
        registers: Registers,
        warpgroup_idx: Int32,
        index: Int32,
        token: Int32,
        min_visible: Int32,
        kv_len: Int32,
        scale: Float32,
        has_previous: cutlass.Constexpr[bool],
    ):
        """Adds the values of the tile before, the other warpgroup's, and those of an own tile.

        ``has_previous`` is whether there is a tile before. With ``scores_first`` the products of
        its values overlap with the softmax; without, its stage is released sooner.
        """
        qk_mma, own_mma, other_mma = mmas
        if cutlass.const_expr(has_previous and not self.scores_first):
            self.add_other_values(other_mma, shared, registers, warpgroup_idx, index - 1)
            warpgroup.wait_group(0)
            self.release(shared, 1 - warpgroup_idx, warpgroup_idx)
        self.multiply_keys(qk_mma, shared, registers, warpgroup_idx, index // STAGES % 2)
        if cutlass.const_expr(has_previous and self.scores_first):
            self.add_other_values(other_mma, shared, registers, warpgroup_idx, index - 1)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.release(shared, warpgroup_idx, WARPGROUPS)

        if token + BLOCK > min_visible + 1:
            mask(registers.acc, registers.last_visible, token, BLOCK)
        online(registers.acc, registers.row_max, registers.row_sum, registers.factor, scale, BLOCK)
        weights = cute.make_rmem_tensor(own_mma.partition_shape_A((BLOCK, BLOCK)), self.dtype)
        weights.store(self.rounded_weights(registers.acc, weights))
        if cutlass.const_expr(not self.packed):  # noqa: SIM102  (the DSL's own branch)
            if token + BLOCK > kv_len:
                self.clear(shared, warpgroup_idx, kv_len - token)
        if cutlass.const_expr(has_previous and self.scores_first):
            warpgroup.wait_group(0)
            self.release(shared, 1 - warpgroup_idx, warpgroup_idx)
        if cutlass.const_expr(has_previous):
            # All warps of this warpgroup have read the other's weights, which are overwritten next.
            cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + warpgroup_idx, number_of_threads=128)
        for i in cutlass.range_constexpr(cute.size(weights)):
            shared.tRS_rP[i] = weights[i]
        cute.copy(shared.r2s, shared.tRS_rP, shared.tRS_sP[None, None, None, 0])
        if cute.arch.lane_idx() % 4 == 0:
            for half in cutlass.range_constexpr(ROWS):
                shared.row_max[half] = registers.row_max[half]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(shared.weights_full + warpgroup_idx)
        self.rescale(registers)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(weights, mode=[2])):
            value = shared.tOrV[None, None, k, warpgroup_idx]
            cute.gemm(own_mma, registers.out, weights[None, None, k], value, registers.out)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.release(shared, warpgroup_idx, warpgroup_idx)

    @cute.jit
    def multiply_keys(
        self,
        mma: cute.TiledMma,
        shared: Shared,
        registers: Registers,
        warpgroup_idx: Int32,
        phase: Int32,
    ):
        """Starts the products with the keys of an own tile, piece by piece as they arrive."""
        registers.acc.fill(0.0)
        warpgroup.fence()
        for i in cutlass.range_constexpr(PIECES):
            # In the order of the loads: see Wgmma.produce. Packed rows arrive all at once; an order
            # that is known at compile time then saves the registers that hold descriptors.
            piece = i
            if cutlass.const_expr(not self.packed):
                piece = PIECES - 1
                if cutlass.const_expr(i > 0):
                    piece = (i - 1 + warpgroup_idx * HALF) % (PIECES - 1)
            if cutlass.const_expr(i == 0 or not self.packed):
                cute.arch.mbarrier_wait(shared.full + self.barrier_of(warpgroup_idx, piece), phase)
            stage_piece = warpgroup_idx * PIECES + piece
            for k in cutlass.range_constexpr(cute.size(shared.tSrQ, mode=[2])):
                query = shared.tSrQ[None, None, k, piece]
                key = shared.tSrK[None, None, k, stage_piece]
                cute.gemm(mma, registers.acc, query, key, registers.acc)
        warpgroup.commit_group()

    @cute.jit
    def add_other_values(
        self,
        mma: cute.TiledMma,
        shared: Shared,
        registers: Registers,
        warpgroup_idx: Int32,
        index: Int32,
    ):
        """Starts to add the values of a tile of the other warpgroup."""
        stage = 1 - warpgroup_idx
        for i in cutlass.range_constexpr(1 if self.packed else HALF):
            barrier = shared.full + self.barrier_of(stage, warpgroup_idx * HALF + i)
            cute.arch.mbarrier_wait(barrier, index // STAGES % 2)
        cute.arch.mbarrier_wait(shared.weights_full + stage, index // STAGES % 2)
        cute.arch.sync_warp()
        for half in cutlass.range_constexpr(ROWS):
            other_max = shared.row_max[half]
            registers.factor[half] = exp2(registers.row_max[half] - other_max)
            registers.row_max[half] = other_max
            registers.row_sum[half] = registers.row_sum[half] * registers.factor[half]
        self.rescale(registers)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(shared.tOrP, mode=[2])):
            weights, value = shared.tOrP[None, None, k, 0], shared.tOrV[None, None, k, stage]
            cute.gemm(mma, registers.out, weights, value, registers.out)
        warpgroup.commit_group()

    def barrier_of(self, stage, piece):
        """Index of a piece's full barrier; all pieces of packed rows have one barrier."""
        return stage * PIECES + (0 if self.packed else piece)

    def rounded_weights(self, acc, weights):
        """Rounds a thread's weights, in the order of an operand in registers."""
        return cute.make_tensor(acc.iterator, weights.layout).load().to(self.dtype)

    @cute.jit
    def rescale(self, registers: Registers):
        """Multiplies sums of values by ``factor``, unless it is 1 for all rows of the warp."""
        changed = (registers.factor[0] != 1.0) | (registers.factor[1] != 1.0)
        if cute.arch.vote_any_sync(changed):
            for j in cutlass.range_constexpr(COLUMNS // 8):
                for half in cutlass.range_constexpr(ROWS):
                    for c in cutlass.range_constexpr(2):
                        place = ((c, half, j), 0, 0)
                        registers.out[place] = registers.out[place] * registers.factor[half]

    @cute.jit
    def clear(self, shared: Shared, stage: Int32, first_row: Int32):
        """Zeroes values beyond the end of the sequence: they may be NaN, and 0 * NaN is NaN."""
        tidx = cute.arch.thread_idx()[0] % 128
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0)
        vector = tidx % (LATENT // 8)
        for row in cutlass.range(
            first_row + tidx // (LATENT // 8), BLOCK, 128 // (LATENT // 8), unroll=1
        ):
            place = (None, vector % 8, row, stage * PIECES + vector // 8)
            cute.autovec_copy(zeros, shared.vectors[place])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + stage, number_of_threads=128)

    @cute.jit
    def release(self, shared: Shared, stage: Int32, part: Int32):
        """Arrives at the empty barrier of a part, in every thread block that loads that part."""
        barrier, lane = shared.empty + stage * PARTS + part, cute.arch.lane_idx()
        if cutlass.const_expr(self.cluster > 1):
            if lane < self.cluster:
                cute.arch.mbarrier_arrive(barrier, lane)
        else:
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier)
