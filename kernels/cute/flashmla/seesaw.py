"""What the warpgroups of `wgmma` do with tiles: weights of every other one, values of them all."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.online_softmax import exp2
from kernelcat.kernels.cute.flashmla.place import LATENT, ROW
from kernelcat.kernels.cute.flashmla.softmax import ROWS, hide, online
from kernelcat.kernels.cute.gemm.stmatrix import registers_to_shared

GROUPS = 2
"""Warpgroups, each with a half of the columns of values; as many tiles are in shared memory."""
STAGES = GROUPS
BLOCK = 64
"""Rows of a CTA, and tokens of a tile."""
PIECE = 64
"""Columns that TMA brings at once."""
PIECES = ROW // PIECE
PARTS = GROUPS + 1
"""Of a tile, freed one by one: the halves that are values, and the columns that are key alone."""
COLUMNS = LATENT // GROUPS
HALF = COLUMNS // PIECE
"""Pieces of a half."""
GROUP_BARRIER = 1
"""The first of a named barrier for each warpgroup."""
MMA_THREADS = 128 * GROUPS


class Shared(NamedTuple):
    """What is shared memory, as a thread sees it."""

    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K, PIECES)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGES * PIECES)
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGES): the half of this warpgroup
    tOrP: cute.Tensor  # (MMA, MMA_M, MMA_K, 1)
    r2s: cute.TiledCopy
    tRS_rP: cute.Tensor
    tRS_sP: cute.Tensor
    vectors: cute.Tensor  # (8, 8, BLOCK, STAGES * PIECES) of tiles, as they lie in memory
    most: cute.Tensor  # (ROWS,): maxima that the latest weights are relative to
    full: cute.Pointer  # (STAGES * PIECES,)
    empty: cute.Pointer  # (STAGES * PARTS,)
    told: cute.Pointer  # (GROUPS,): the weights of a warpgroup's tile are there


class Sums(NamedTuple):
    """Registers of a thread."""

    acc: cute.Tensor  # scores
    out: cute.Tensor  # sums of values
    most: cute.Tensor  # (ROWS,), log2 of what sums are relative to
    total: cute.Tensor  # (ROWS,), of this thread's weights
    factor: cute.Tensor  # (ROWS,), that sums are to be multiplied by
    limits: cute.Tensor  # (ROWS,), the last token a row sees


def make_mmas(dtype):
    """Scores; values by a warpgroup's own weights, in registers; by the other's, in shared."""
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
    """Keys (BLOCK, PIECE, STAGES * PIECES) transposed: (LATENT, BLOCK, STAGES)."""
    piece = BLOCK * PIECE
    layout = cute.make_layout(
        ((PIECE, LATENT // PIECE), BLOCK, STAGES), stride=((1, piece), PIECE, PIECES * piece)
    )
    return cute.make_tensor(sK.iterator, layout)


def as_vectors(memory, pieces):
    """(8, 8, BLOCK, pieces): vectors of 16 bytes, of which row r has chunk c at c ^ (r % 8)."""
    layout = cute.make_layout((8, 8, BLOCK, pieces), stride=(1, 8, PIECE, BLOCK * PIECE))
    return cute.make_tensor(memory, layout)


def make_shared(mmas, sQ, sK, sP, vectors, most, full, empty, told, group, tidx, dtype):
    qk_mma, own_mma, other_mma = mmas
    thr_qk, thr_own, thr_other = (mma.get_slice(0) for mma in mmas)
    sV = cute.local_tile(as_values(sK), (COLUMNS, BLOCK, STAGES), (group, 0, 0))
    row = tidx // 32 * 16 + tidx % 32 // 4
    return Shared(
        qk_mma.make_fragment_A(thr_qk.partition_A(sQ)),
        qk_mma.make_fragment_B(thr_qk.partition_B(sK)),
        own_mma.make_fragment_B(thr_own.partition_B(sV)),
        other_mma.make_fragment_A(thr_other.partition_A(sP)),
        *registers_to_shared(qk_mma, sP, tidx, dtype),
        vectors,
        cute.make_tensor(most + row, cute.make_layout(ROWS, stride=8)),
        full,
        empty,
        told,
    )


def make_sums(mmas):
    acc_shape = mmas[0].partition_shape_C((BLOCK, BLOCK))
    out_shape = mmas[1].partition_shape_C((BLOCK, COLUMNS))
    shapes = (acc_shape, out_shape, ROWS, ROWS, ROWS)
    floats = (cute.make_rmem_tensor(shape, Float32) for shape in shapes)
    return Sums(*floats, cute.make_rmem_tensor(ROWS, Int32))


class Seesaw:
    """Tile t of a CTA is that of warpgroup t % GROUPS, and lies in that stage.

    ``self`` has ``dtype``, ``packed``, ``cluster`` and ``scores_first``.
    """

    @cute.jit
    def attend(
        self,
        mmas: tuple,
        shared: Shared,
        sums: Sums,
        group: Int32,
        split_idx: Int32,
        num_splits: Int32,
        num_tiles: Int32,
        all_see: Int32,  # rows see all tokens up to this one
        kv_len: Int32,
        scale: Float32,
    ):
        """All tiles of the CTA."""
        if (group == 0) & (num_tiles > 0):
            token = split_idx * BLOCK
            self.step(mmas, shared, sums, group, Int32(0), token, all_see, kv_len, scale, False)
        for index in cutlass.range(GROUPS - group, num_tiles, GROUPS, unroll=1):
            token = (split_idx + index * num_splits) * BLOCK
            self.step(mmas, shared, sums, group, index, token, all_see, kv_len, scale, True)
        if (num_tiles > 0) & ((num_tiles - 1) % GROUPS != group):
            self.add_other(mmas[2], shared, sums, group, num_tiles - 1)
            warpgroup.wait_group(0)

    @cute.jit
    def step(
        self,
        mmas: tuple,
        shared: Shared,
        sums: Sums,
        group: Int32,
        index: Int32,
        token: Int32,
        all_see: Int32,
        kv_len: Int32,
        scale: Float32,
        comes_next: cutlass.Constexpr[bool],
    ):
        """Values of the tile before, which is the other's, beside the scores of an own one.

        Scores first hides the softmax behind the values; values first frees their half sooner.
        """
        qk_mma, own_mma, other_mma = mmas
        if cutlass.const_expr(comes_next and not self.scores_first):
            self.add_other(other_mma, shared, sums, group, index - 1)
            warpgroup.wait_group(0)
            self.release(shared, 1 - group, group)
        self.scores(qk_mma, shared, sums, group, index // STAGES % 2)
        if cutlass.const_expr(comes_next and self.scores_first):
            self.add_other(other_mma, shared, sums, group, index - 1)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.release(shared, group, GROUPS)

        if token + BLOCK > all_see + 1:
            hide(sums.acc, sums.limits, token, BLOCK)
        online(sums.acc, sums.most, sums.total, sums.factor, scale, BLOCK)
        weights = cute.make_rmem_tensor(own_mma.partition_shape_A((BLOCK, BLOCK)), self.dtype)
        weights.store(self.as_weights(sums.acc, weights))
        if cutlass.const_expr(not self.packed):  # noqa: SIM102  (the DSL's own branch)
            if token + BLOCK > kv_len:
                self.clear(shared, group, kv_len - token)
        if cutlass.const_expr(comes_next and self.scores_first):
            warpgroup.wait_group(0)
            self.release(shared, 1 - group, group)
        if cutlass.const_expr(comes_next):
            # Nobody reads the other's weights any more.
            cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=128)
        for i in cutlass.range_constexpr(cute.size(weights)):
            shared.tRS_rP[i] = weights[i]
        cute.copy(shared.r2s, shared.tRS_rP, shared.tRS_sP[None, None, None, 0])
        if cute.arch.lane_idx() % 4 == 0:
            for half in cutlass.range_constexpr(ROWS):
                shared.most[half] = sums.most[half]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(shared.told + group)
        self.rescale(sums)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(weights, mode=[2])):
            value = shared.tOrV[None, None, k, group]
            cute.gemm(own_mma, sums.out, weights[None, None, k], value, sums.out)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.release(shared, group, group)

    @cute.jit
    def scores(
        self, mma: cute.TiledMma, shared: Shared, sums: Sums, group: Int32, parity: Int32
    ):
        """Start the products with the keys of an own tile, as its pieces land."""
        sums.acc.fill(0.0)
        warpgroup.fence()
        for i in cutlass.range_constexpr(PIECES):
            # As they are loaded: see Wgmma.produce.
            piece = PIECES - 1
            if cutlass.const_expr(i > 0):
                piece = (i - 1 + group * HALF) % (PIECES - 1)
            if cutlass.const_expr(i == 0 or not self.packed):
                cute.arch.mbarrier_wait(shared.full + self.barrier_of(group, piece), parity)
            at = group * PIECES + piece
            for k in cutlass.range_constexpr(cute.size(shared.tSrQ, mode=[2])):
                query, key = shared.tSrQ[None, None, k, piece], shared.tSrK[None, None, k, at]
                cute.gemm(mma, sums.acc, query, key, sums.acc)
        warpgroup.commit_group()

    @cute.jit
    def add_other(
        self, mma: cute.TiledMma, shared: Shared, sums: Sums, group: Int32, index: Int32
    ):
        """Start adding the values of a tile of the other warpgroup."""
        stage = 1 - group
        for i in cutlass.range_constexpr(1 if self.packed else HALF):
            barrier = shared.full + self.barrier_of(stage, group * HALF + i)
            cute.arch.mbarrier_wait(barrier, index // STAGES % 2)
        cute.arch.mbarrier_wait(shared.told + stage, index // STAGES % 2)
        cute.arch.sync_warp()
        for half in cutlass.range_constexpr(ROWS):
            theirs = shared.most[half]
            sums.factor[half] = exp2(sums.most[half] - theirs)
            sums.most[half] = theirs
            sums.total[half] = sums.total[half] * sums.factor[half]
        self.rescale(sums)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(shared.tOrP, mode=[2])):
            weights, value = shared.tOrP[None, None, k, 0], shared.tOrV[None, None, k, stage]
            cute.gemm(mma, sums.out, weights, value, sums.out)
        warpgroup.commit_group()

    def barrier_of(self, stage, piece):
        """Packed rows come all at once."""
        return stage * PIECES + (0 if self.packed else piece)

    def as_weights(self, acc, weights):
        """Scores of a thread in the order of an operand in registers, rounded."""
        return cute.make_tensor(acc.iterator, weights.layout).load().to(self.dtype)

    @cute.jit
    def rescale(self, sums: Sums):
        """Sums of values, where a maximum of the warp's rows has changed."""
        changed = (sums.factor[0] != 1.0) | (sums.factor[1] != 1.0)
        if cute.arch.vote_any_sync(changed):
            for j in cutlass.range_constexpr(COLUMNS // 8):
                for half in cutlass.range_constexpr(ROWS):
                    for c in cutlass.range_constexpr(2):
                        at = ((c, half, j), 0, 0)
                        sums.out[at] = sums.out[at] * sums.factor[half]

    @cute.jit
    def clear(self, shared: Shared, stage: Int32, first_row: Int32):
        """Values beyond the end become zeros: they may be NaN, which no weight of 0 hides."""
        tidx = cute.arch.thread_idx()[0] % 128
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0)
        vector = tidx % (LATENT // 8)
        for row in cutlass.range(
            first_row + tidx // (LATENT // 8), BLOCK, 128 // (LATENT // 8), unroll=1
        ):
            at = (None, vector % 8, row, stage * PIECES + vector // 8)
            cute.autovec_copy(zeros, shared.vectors[at])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=GROUP_BARRIER + stage, number_of_threads=128)

    @cute.jit
    def release(self, shared: Shared, stage: Int32, part: Int32):
        """This warp has read a part of a stage; every CTA that loads it is told."""
        barrier, lane = shared.empty + stage * PARTS + part, cute.arch.lane_idx()
        if cutlass.const_expr(self.cluster > 1):
            if lane < self.cluster:
                cute.arch.mbarrier_arrive(barrier, lane)
        else:
            if lane == 0:
                cute.arch.mbarrier_arrive(barrier)
