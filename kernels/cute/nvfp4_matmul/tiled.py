"""Weights in 4 bits on tensor cores since Ampere: cp.async, decoding in registers, mma.sync.

Products are made transposed, D^T = W @ A^T: weights are the operand that is decoded in registers,
and few rows of A make a narrow tile. In which order a product runs over K is free as long as both
operands agree, so a lane takes 16 bytes, 32 neighbouring codes, of a row at once, and reads the
same columns of A (that a kernel may choose the order by what a lane loads is Marlin's idea, Frantar
et al., PPoPP 2025). Splits of K meet in memory, in a fixed order.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint16, Uint32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import widen
from kernelcat.kernels.cute.fp8_gemm.split import WARPGROUP, reduce_splits
from kernelcat.kernels.cute.gemm.epilogue import Epilogue
from kernelcat.kernels.cute.gemm.raster import grouped
from kernelcat.kernels.cute.nvfp4_matmul.codes import LEFT, apart, decoded_pair, factors
from kernelcat.kernels.cute.nvfp4_matmul.result import Result

BLOCK_K = 128
LANE_K = 32
"""Columns of a stage that a lane of a quad has."""
WORDS = 4
"""Of 16 bytes: what is copied, and what a lane reads at once."""
WARPS_N = 4
"""Warps side by side along the rows of W."""
GROUP_M = 8


class Tiled:
    """Tiles of ``block_n`` rows of W x ``block_m`` rows of A.

    K is a multiple of 32, N one of 8, of 16 for swiglu.
    ``split``: CTAs along the grid's second axis share K, and a tile has 128 threads.
    """

    def __init__(
        self,
        kind: str,
        out: str,
        nvfp4: bool,
        bias: bool,
        activation: str,
        block_m: int,
        block_n: int,
        stages: int,
        split: bool,
    ):
        self.epilogue = Epilogue(out, bias, activation, residual=False)
        self.fp8, self.nvfp4, self.split = kind == "float8_e4m3fn", nvfp4, split
        self.dtype = BFloat16 if self.fp8 else element_type(kind)
        self.half = self.dtype is Float16
        self.scale_type = Uint16 if nvfp4 else Uint8
        self.block_m, self.block_n, self.stages = block_m, block_n, stages
        self.warps_m = 2 if block_m > 64 else 1
        self.threads = 32 * WARPS_N * self.warps_m
        self.warp_n, self.warp_m = block_n // WARPS_N, block_m // self.warps_m
        self.a_pieces = BLOCK_K // (16 if self.fp8 else 8)
        self.result = Result(self.epilogue, self.fp8, block_m, block_n, self.threads)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k), as words
        w: cute.Pointer,  # (n, k / 2) bytes, as words
        w_scale: cute.Pointer,  # (n, k / 32): two bytes of NVFP4, one of MXFP4
        global_scale: cute.Pointer,  # (1,) float32, of NVFP4
        a_scale: cute.Pointer,  # (m,) float32, of float8
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        partial: cute.Pointer,  # (num_splits, tiles, block_m * block_n) float32
        counters: cute.Pointer,  # (tiles,), zero before and after
        m: Int32,
        n: Int32,
        k: Int32,
        num_splits: Int32,
        stream: cuda.CUstream,
    ):
        pieces = k // (16 if cutlass.const_expr(self.fp8) else 8)
        row_a = cute.assume(Int64(pieces) * WORDS, divby=WORDS)
        row_w = cute.assume(Int64(k // LANE_K) * WORDS, divby=WORDS)
        mA = cute.make_tensor(a, cute.make_layout((WORDS, pieces, m), stride=(1, WORDS, row_a)))
        mW = cute.make_tensor(
            w, cute.make_layout((WORDS, k // LANE_K, n), stride=(1, WORDS, row_w))
        )
        mS = cute.make_tensor(
            w_scale, cute.make_layout((k // LANE_K, n), stride=(1, Int64(k // LANE_K)))
        )
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mFactor = cute.make_tensor(a_scale, cute.make_layout(m))
        mBias, _, mD = self.epilogue.vectors(bias, d, d, m, n)
        tiles_m, tiles_n = cute.ceil_div(m, self.block_m), cute.ceil_div(n, self.block_n)
        vectors = self.block_m * self.block_n // (4 * self.threads)
        slots = (4, vectors, WARPGROUP, tiles_m * tiles_n, num_splits)
        mP = cute.make_tensor(partial, cute.make_ordered_layout(slots, order=(0, 2, 1, 3, 4)))
        mCount = cute.make_tensor(counters, cute.make_layout(tiles_m * tiles_n))
        tiled_mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)))

        @cute.struct
        class SharedStorage:
            is_last: cute.struct.MemRange[Int32, 4]
            w: cute.struct.Align[
                cute.struct.MemRange[Uint32, self.block_n * BLOCK_K // 8 * self.stages], 128
            ]
            a: cute.struct.Align[
                cute.struct.MemRange[
                    Uint32, self.block_m * self.a_pieces * WORDS * self.stages
                ],
                128,
            ]
            sums: cute.struct.Align[
                cute.struct.MemRange[Float32, self.block_m * self.result.pitch], 128
            ]

        self.shared_storage = SharedStorage
        self.kernel(
            mA, mW, mS, mG, mFactor, mBias, mD, mP, mCount, tiled_mma, tiles_m, tiles_n, k
        ).launch(
            grid=(tiles_m * tiles_n, num_splits, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (4, pieces, m) words
        mW: cute.Tensor,  # (4, k / 32, n) words
        mS: cute.Tensor,  # (k / 32, n)
        mG: cute.Tensor,
        mFactor: cute.Tensor,  # (m,)
        mBias: cute.Tensor,  # (8, n / 8)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        mP: cute.Tensor,  # (4, vectors, 128, tiles, num_splits)
        mCount: cute.Tensor,
        tiled_mma: cute.TiledMma,
        tiles_m: Int32,
        tiles_n: Int32,
        k: Int32,
    ):
        tidx = cute.arch.thread_idx()[0]
        tile, split_idx, _ = cute.arch.block_idx()
        m_idx, n_idx = grouped(tile, tiles_m, tiles_n, GROUP_M)
        row, col = m_idx * self.block_m, n_idx * self.block_n
        storage = SmemAllocator().allocate(self.shared_storage)
        lane_pieces = BLOCK_K // LANE_K
        sW = storage.w.get_tensor(
            cute.make_layout((WORDS, lane_pieces, self.block_n, self.stages))
        )
        sA = storage.a.get_tensor(
            cute.make_layout((WORDS, self.a_pieces, self.block_m, self.stages))
        )
        sZ = storage.sums.get_tensor(
            cute.make_layout((self.block_n, self.block_m), stride=(1, self.result.pitch))
        )
        k_tiles = cute.ceil_div(k, BLOCK_K)
        num_splits = cute.arch.grid_dim()[1]
        k_begin = split_idx * k_tiles // num_splits
        k_end = (split_idx + 1) * k_tiles // num_splits

        for stage in cutlass.range_constexpr(self.stages - 1):
            if k_begin + stage < k_end:
                self.load(mA, mW, sA, sW, row, col, k_begin + stage, stage, tidx)
            cute.arch.cp_async_commit_group()

        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        own_n, own_m = warp_idx % WARPS_N * self.warp_n, warp_idx // WARPS_N * self.warp_m
        acc = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((self.warp_n, self.warp_m)), Float32
        )
        acc.fill(0.0)
        rS = cute.make_rmem_tensor((2, self.warp_n // 16), self.scale_type)
        nextS = cute.make_rmem_tensor((2, self.warp_n // 16), self.scale_type)
        self.load_scales(mS, rS, col + own_n, k_begin)
        for k_idx in cutlass.range(k_begin, k_end, unroll=1):
            # This tile has landed, and everyone is done with the stage that is filled next.
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.barrier()
            ahead, stage = k_idx + self.stages - 1, (k_idx - k_begin) % self.stages
            if ahead < k_end:
                target = (ahead - k_begin) % self.stages
                self.load(mA, mW, sA, sW, row, col, ahead, target, tidx)
            cute.arch.cp_async_commit_group()
            self.load_scales(mS, nextS, col + own_n, k_idx + 1)
            self.multiply(
                tiled_mma, acc, rS, sW[None, None, None, stage], sA[None, None, None, stage],
                own_n, own_m,
            )  # fmt: skip
            rS.store(nextS.load())

        complete = cutlass.Boolean(True)
        if cutlass.const_expr(self.split):
            complete = reduce_splits(
                acc, mP[None, None, tidx % WARPGROUP, tile, None], mCount.iterator + tile,
                storage.is_last.data_ptr(), split_idx, 1,
            )  # fmt: skip
        if complete:
            self.result.place(acc, sZ, own_n, own_m)
            cute.arch.barrier()
            factor = Float32(1)
            if cutlass.const_expr(self.nvfp4):
                factor = mG[0] * Float32(LEFT)
            self.result.store(sZ, mFactor, mBias, mD, factor, row, col, tidx)

    @cute.jit
    def load(
        self,
        mA: cute.Tensor,
        mW: cute.Tensor,
        sA: cute.Tensor,
        sW: cute.Tensor,
        row: Int32,
        col: Int32,
        k_idx: Int32,
        stage: Int32,
        tidx: Int32,
    ):
        """Start copying a stage; pieces outside become zeros."""
        self.copy_pieces(mW, sW, col, k_idx, stage, tidx, False)
        self.copy_pieces(mA, sA, row, k_idx, stage, tidx, True)

    @cute.jit
    def copy_pieces(
        self,
        source: cute.Tensor,  # (4, pieces, rows)
        target: cute.Tensor,  # (4, pieces of a stage, rows of a tile, stages)
        row: Int32,
        k_idx: Int32,
        stage: Int32,
        tidx: Int32,
        is_a: cutlass.Constexpr,
    ):
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
            Uint32,
            num_bits_per_copy=128,
        )
        zeros = cute.make_rmem_tensor(WORDS, Uint32)
        zeros.fill(0)
        pieces, rows = target.shape[1], target.shape[2]
        for i in cutlass.range_constexpr(-(-pieces * rows // self.threads)):
            index = tidx + i * self.threads
            r, piece = index // pieces, index % pieces
            if cutlass.const_expr(pieces * rows % self.threads == 0) or r < rows:
                place = self.a_place(r, piece) if cutlass.const_expr(is_a) else piece
                into = target[None, place, r, stage]
                at = k_idx * pieces + piece
                if at < source.shape[1] and row + r < source.shape[2]:
                    cute.copy(atom, source[None, at, row + r], into)
                else:
                    cute.autovec_copy(zeros, into)

    @cute.jit
    def a_place(self, r: Int32, piece: Int32):
        """Where a piece of a row of A lies in shared memory: lanes of a quad side by side."""
        if cutlass.const_expr(self.fp8):
            place = piece ^ (r % 2)
        else:
            place = (piece % 4 * 4 + piece // 4) ^ (r % 2 * 4)
        return place

    @cute.jit
    def load_scales(self, mS: cute.Tensor, rS: cute.Tensor, col: Int32, k_idx: Int32):
        """This lane's scales of rows r and r + 8 of every 16; zeros outside."""
        lane = cute.arch.lane_idx()
        at = k_idx * (BLOCK_K // LANE_K) + lane % 4
        for i in cutlass.range_constexpr(self.warp_n // 16):
            for half in cutlass.range_constexpr(2):
                r = col + i * 16 + half * 8 + lane // 4
                rS[half, i] = self.scale_type(0)
                if at < mS.shape[0] and r < mS.shape[1]:
                    rS[half, i] = mS[at, r]

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # ((2, 2), warp_n / 16, warp_m / 8)
        rS: cute.Tensor,  # (2, warp_n / 16)
        sW: cute.Tensor,  # (4, 4, block_n) words
        sA: cute.Tensor,  # (4, pieces, block_m) words
        own_n: Int32,
        own_m: Int32,
    ):
        """Add the products of a stage."""
        lane = cute.arch.lane_idx()
        quad, r = lane % 4, lane // 4
        tiles_n, tiles_m = self.warp_n // 16, self.warp_m // 8
        codes = cute.make_rmem_tensor((WORDS, 2, tiles_n), Uint32)
        scale = cute.make_rmem_tensor((2, 2, tiles_n), Uint32)
        for i in cutlass.range_constexpr(tiles_n):
            for half in cutlass.range_constexpr(2):
                own = own_n + i * 16 + half * 8 + r
                cute.autovec_copy(sW[None, quad, own], codes[None, half, i])
                found = factors(rS[half, i], self.nvfp4, self.half)
                scale[0, half, i] = found[0]
                scale[1, half, i] = found[1]
        rW = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((self.warp_n, 32)))
        rA = tiled_mma.make_fragment_B(tiled_mma.partition_shape_B((8, 32)))
        w_words, a_words = cute.recast_tensor(rW, Uint32), cute.recast_tensor(rA, Uint32)
        pairs = cute.make_rmem_tensor(WORDS, Uint32)
        for word in cutlass.range_constexpr(WORDS):
            for i in cutlass.range_constexpr(tiles_n):
                for half in cutlass.range_constexpr(2):
                    for p in cutlass.range_constexpr(4):
                        w_words[(0, half, p % 2), i, p // 2] = decoded_pair(
                            codes[word, half, i], scale[word // 2, half, i], p,
                            self.nvfp4, self.half,
                        )  # fmt: skip
            for j in cutlass.range_constexpr(tiles_m):
                self.read_pairs(sA, own_m + j * 8 + r, quad, word, pairs)
                for p in cutlass.range_constexpr(4):
                    a_words[(0, p % 2), 0, p // 2] = pairs[p]
                column = acc[None, None, j]
                column = cute.make_tensor(column.iterator, cute.append_ones(column.layout, 3))
                for step in cutlass.range_constexpr(2):
                    cute.gemm(
                        tiled_mma, column, rW[None, None, step], rA[None, None, step], column
                    )

    @cute.jit
    def read_pairs(
        self, sA: cute.Tensor, r: Int32, quad: Int32, word: cutlass.Constexpr, pairs: cute.Tensor
    ):
        """Columns 32 quad + 8 word and on of row r of A, as ``apart`` orders them."""
        wide = cute.make_rmem_tensor(WORDS, Uint32)
        if cutlass.const_expr(self.fp8):
            piece = sA[None, self.a_place(r, 2 * quad + word // 2), r]
            narrow = cute.make_rmem_tensor(2, Uint32)
            cute.autovec_copy(cute.local_tile(piece, (2,), (word % 2,)), narrow)
            for i in cutlass.range_constexpr(2):
                wide[2 * i], wide[2 * i + 1] = widen(narrow[i], BFloat16)
        else:
            cute.autovec_copy(sA[None, self.a_place(r, 4 * quad + word), r], wide)
        apart(wide, pairs)
