"""RoPE and cache append in vectors of 16 bytes: two a thread, which hold whole pairs.

Rows are asked for before it is known where their token goes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import e4m3x4
from kernelcat.kernels.cute.kv_write.place import inverse_of, position_of, sequence_of, slot_of

VECTOR = 8
HELD = 2 * VECTOR
"""Elements of a row that a thread has."""


class Vectorized:
    """rotary_dim is a multiple of 16. A CTA has ``unroll`` times as many rows as it moves at once.

    The rows of a token are its keys, values and queries, head by head.
    """

    def __init__(
        self,
        dtype: str,
        fp8: bool,
        head_dim: int,
        page_size: int,
        interleaved: bool,
        scales: str,
        threads: int,
        unroll: int,
    ):
        self.dtype, self.fp8 = element_type(dtype), fp8
        self.head_dim, self.page_size = head_dim, page_size
        self.interleaved, self.scales, self.unroll = interleaved, scales, unroll
        self.lanes = head_dim // HELD
        self.rows_a_pass = threads // self.lanes
        self.stored = VECTOR // 4 if fp8 else VECTOR  # words or elements of a vector

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (tokens, heads, head_dim)
        k: cute.Pointer,  # (tokens, kv_heads, head_dim)
        v: cute.Pointer,  # as k
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        cos_sin: cute.Pointer,  # (positions, rotary_dim) float32
        k_scale: cute.Pointer,  # (1 or pages, kv_heads) float32
        v_scale: cute.Pointer,  # as k_scale
        q_out: cute.Pointer,  # as q
        k_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim), four float8 to a word
        v_cache: cute.Pointer,  # as k_cache
        tokens: Int32,
        batch: Int32,
        heads: Int32,
        kv_heads: Int32,
        table_width: Int32,
        rotary_dim: Int32,
        stream: cuda.CUstream,
    ):
        rows = self.rows_of(heads, VECTOR)
        kv_rows, cached = self.rows_of(kv_heads, VECTOR), self.rows_of(kv_heads, self.stored)
        by_page = cute.make_layout((kv_heads, 1), stride=(1, Int64(kv_heads)))
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        half = cute.assume(rotary_dim // 2, divby=VECTOR)
        angles = cute.make_layout(
            (VECTOR, rotary_dim // HELD, 2, 1),
            stride=(1, VECTOR, half, cute.assume(Int64(rotary_dim), divby=HELD)),
        )
        blocks = cute.ceil_div(2 * kv_heads + heads, self.rows_a_pass * self.unroll)
        self.kernel(
            cute.make_tensor(q, rows),
            cute.make_tensor(k, kv_rows),
            cute.make_tensor(v, kv_rows),
            cute.make_tensor(block_table, table),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(cos_sin, angles),
            cute.make_tensor(k_scale, by_page),
            cute.make_tensor(v_scale, by_page),
            cute.make_tensor(q_out, rows),
            cute.make_tensor(k_cache, cached),
            cute.make_tensor(v_cache, cached),
        ).launch(
            grid=(tokens, blocks, 1), block=(self.lanes * self.rows_a_pass, 1, 1), stream=stream
        )

    @cute.jit
    def rows_of(self, heads: Int32, width: cutlass.Constexpr):
        """(width, vectors, heads, tokens or slots): vectors of ``width`` words or elements."""
        row = self.head_dim // VECTOR * width
        stride = cute.assume(Int64(heads) * row, divby=row)
        shape = (width, self.head_dim // VECTOR, heads, 1)
        return cute.make_layout(shape, stride=(1, width, row, stride))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (VECTOR, vectors, heads, tokens)
        mK: cute.Tensor,  # (VECTOR, vectors, kv_heads, tokens)
        mV: cute.Tensor,
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mA: cute.Tensor,  # (VECTOR, rotary_dim / 16, 2, positions): cosines, sines of 8 pairs
        mKS: cute.Tensor,  # (kv_heads, pages)
        mVS: cute.Tensor,
        mO: cute.Tensor,  # as mQ
        mKC: cute.Tensor,  # (stored, vectors, kv_heads, slots)
        mVC: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        heads, kv_heads = mQ.shape[2], mK.shape[2]
        first_row = block * (self.rows_a_pass * self.unroll)
        row, lane = first_row + tidx // self.lanes, tidx % self.lanes
        turns = lane < mA.shape[1]
        low, high = 2 * lane, 2 * lane + 1
        if cutlass.const_expr(not self.interleaved):  # noqa: SIM102  (the DSL's own branch)
            if turns:
                low, high = lane, lane + mA.shape[1]

        held = cute.make_rmem_tensor((VECTOR, 2, self.unroll), self.dtype)
        held.fill(0)
        for u in cutlass.range_constexpr(self.unroll):
            its, vectors = row + u * self.rows_a_pass, held[None, None, u]
            if its < kv_heads:
                self.load(mK[None, None, its, token], low, high, vectors)
            elif its < 2 * kv_heads:
                self.load(mV[None, None, its - kv_heads, token], low, high, vectors)
            elif its < 2 * kv_heads + heads:
                self.load(mQ[None, None, its - 2 * kv_heads, token], low, high, vectors)

        seq = sequence_of(token, mStarts, mTable.shape[1])
        position = position_of(token, seq, mLens, mStarts)
        page = Int32(0)
        if first_row < 2 * kv_heads:
            page = mTable[position // self.page_size, seq]
        slot = slot_of(page, position, self.page_size)
        angles = cute.make_rmem_tensor((VECTOR, 2), Float32)
        if turns:
            self.load(mA[None, lane, None, position], 0, 1, angles)

        values = cute.make_rmem_tensor((VECTOR, 2), Float32)
        for u in cutlass.range_constexpr(self.unroll):
            its, vectors = row + u * self.rows_a_pass, held[None, None, u]
            values.store(vectors.load().to(Float32))
            if its < kv_heads:
                if turns:
                    self.turn(values, angles)
                self.scale(values, inverse_of(mKS, page, its, self.scales))
                self.store(values, mKC[None, None, its, slot], low, high, self.fp8)
            elif its < 2 * kv_heads:
                self.scale(values, inverse_of(mVS, page, its - kv_heads, self.scales))
                self.store(values, mVC[None, None, its - kv_heads, slot], low, high, self.fp8)
            elif its < 2 * kv_heads + heads:
                if turns:
                    self.turn(values, angles)
                self.store(values, mO[None, None, its - 2 * kv_heads, token], low, high, False)

    @cute.jit
    def load(self, gX: cute.Tensor, low: Int32, high: Int32, held: cute.Tensor):
        """Vectors ``low`` and ``high`` of gX (VECTOR, vectors)."""
        cute.autovec_copy(gX[None, low], held[None, 0])
        cute.autovec_copy(gX[None, high], held[None, 1])

    @cute.jit
    def turn(self, values: cute.Tensor, angles: cute.Tensor):
        """Eight pairs of (VECTOR, 2) values by (VECTOR, 2) cosines and sines."""
        for i in cutlass.range_constexpr(VECTOR):
            first, second = i, i + VECTOR
            if cutlass.const_expr(self.interleaved):
                first, second = 2 * i, 2 * i + 1
            x, y, cosine, sine = values[first], values[second], angles[i, 0], angles[i, 1]
            values[first] = x * cosine - y * sine
            values[second] = y * cosine + x * sine

    @cute.jit
    def scale(self, values: cute.Tensor, inverse: Float32):
        if cutlass.const_expr(self.scales != "none"):
            values.store(values.load() * inverse)

    @cute.jit
    def store(
        self,
        values: cute.Tensor,  # (VECTOR, 2)
        gX: cute.Tensor,  # (width, vectors)
        low: Int32,
        high: Int32,
        fp8: cutlass.Constexpr,
    ):
        """Round both vectors; four float8 become a word."""
        if cutlass.const_expr(fp8):
            words = cute.make_rmem_tensor((VECTOR // 4, 2), Uint32)
            by_word = cute.make_tensor(values.iterator, cute.make_layout((4, HELD // 4)))
            for w in cutlass.range_constexpr(HELD // 4):
                words[w] = e4m3x4(by_word[None, w])
            rounded = words
        else:
            rounded = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
            rounded.store(values.load().to(self.dtype))
        cute.autovec_copy(rounded[None, 0], gX[None, low])
        cute.autovec_copy(rounded[None, 1], gX[None, high])
