"""RoPE and cache append in vectors of 16 bytes. A thread takes two vectors that hold whole pairs.

A thread starts to load its rows before it looks up where their token goes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import e4m3x4
from kernelcat.kernels.cute.common.token_slots import position_of, sequence_of, slot_of
from kernelcat.kernels.cute.kv_write.cache_scale import inverse_scale

VECTOR = 8
"""Elements in 16 bytes."""
THREAD_ELEMENTS = 2 * VECTOR
"""Elements of a row that a thread takes."""


class Vectorized:
    """The rows of a token are the heads of its keys, then of its values, then of q.

    A thread block takes rows of one token: ``unroll`` times as many as its threads hold at once.
    rotary_dim must be a multiple of 16.
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
        self.row_threads = head_dim // THREAD_ELEMENTS
        self.pass_rows = threads // self.row_threads
        self.cache_width = VECTOR // 4 if fp8 else VECTOR  # words, or elements, of a cached vector

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (tokens, heads, head_dim)
        k: cute.Pointer,  # (tokens, kv_heads, head_dim)
        v: cute.Pointer,  # (tokens, kv_heads, head_dim)
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        cos_sin: cute.Pointer,  # (positions, rotary_dim) float32
        k_scale: cute.Pointer,  # (1 or pages, kv_heads) float32
        v_scale: cute.Pointer,  # (1 or pages, kv_heads) float32
        q_out: cute.Pointer,  # (tokens, heads, head_dim)
        k_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim), four float8 to a word
        v_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim), four float8 to a word
        tokens: Int32,
        batch: Int32,
        heads: Int32,
        kv_heads: Int32,
        table_width: Int32,
        rotary_dim: Int32,
        stream: cuda.CUstream,
    ):
        q_layout = self.row_layout(heads, VECTOR)
        kv_layout = self.row_layout(kv_heads, VECTOR)
        cache_layout = self.row_layout(kv_heads, self.cache_width)
        scale_layout = cute.make_layout((kv_heads, 1), stride=(1, Int64(kv_heads)))
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        half = cute.assume(rotary_dim // 2, divby=VECTOR)
        angles = cute.make_layout(
            (VECTOR, rotary_dim // THREAD_ELEMENTS, 2, 1),
            stride=(1, VECTOR, half, cute.assume(Int64(rotary_dim), divby=THREAD_ELEMENTS)),
        )
        token_ctas = cute.ceil_div(2 * kv_heads + heads, self.pass_rows * self.unroll)
        self.kernel(
            cute.make_tensor(q, q_layout),
            cute.make_tensor(k, kv_layout),
            cute.make_tensor(v, kv_layout),
            cute.make_tensor(block_table, table),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(cos_sin, angles),
            cute.make_tensor(k_scale, scale_layout),
            cute.make_tensor(v_scale, scale_layout),
            cute.make_tensor(q_out, q_layout),
            cute.make_tensor(k_cache, cache_layout),
            cute.make_tensor(v_cache, cache_layout),
        ).launch(
            grid=(tokens, token_ctas, 1),
            block=(self.row_threads * self.pass_rows, 1, 1),
            stream=stream,
        )

    @cute.jit
    def row_layout(self, heads: Int32, width: cutlass.Constexpr):
        """(width, vectors, heads, tokens or slots): a vector is ``width`` words or elements."""
        row = self.head_dim // VECTOR * width
        stride = cute.assume(Int64(heads) * row, divby=row)
        shape = (width, self.head_dim // VECTOR, heads, 1)
        return cute.make_layout(shape, stride=(1, width, row, stride))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (VECTOR, vectors, heads, tokens)
        mK: cute.Tensor,  # (VECTOR, vectors, kv_heads, tokens)
        mV: cute.Tensor,  # (VECTOR, vectors, kv_heads, tokens)
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mA: cute.Tensor,  # (VECTOR, rotary_dim / 16, 2, positions): cosines, sines of 8 pairs
        mKS: cute.Tensor,  # (kv_heads, 1 or pages)
        mVS: cute.Tensor,  # (kv_heads, 1 or pages)
        mO: cute.Tensor,  # (VECTOR, vectors, heads, tokens)
        mKC: cute.Tensor,  # (cache_width, vectors, kv_heads, slots)
        mVC: cute.Tensor,  # (cache_width, vectors, kv_heads, slots)
    ):
        tidx, _, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        heads, kv_heads = mQ.shape[2], mK.shape[2]
        cta_row = block * (self.pass_rows * self.unroll)
        first_row, lane = cta_row + tidx // self.row_threads, tidx % self.row_threads
        rotates = lane < mA.shape[1]
        low, high = 2 * lane, 2 * lane + 1
        if cutlass.const_expr(not self.interleaved):  # noqa: SIM102  (the DSL's own branch)
            if rotates:
                low, high = lane, lane + mA.shape[1]

        rX = cute.make_rmem_tensor((VECTOR, 2, self.unroll), self.dtype)
        rX.fill(0)
        for u in cutlass.range_constexpr(self.unroll):
            row, vectors = first_row + u * self.pass_rows, rX[None, None, u]
            if row < kv_heads:
                self.load(mK[None, None, row, token], low, high, vectors)
            elif row < 2 * kv_heads:
                self.load(mV[None, None, row - kv_heads, token], low, high, vectors)
            elif row < 2 * kv_heads + heads:
                self.load(mQ[None, None, row - 2 * kv_heads, token], low, high, vectors)

        seq = sequence_of(token, mStarts, mTable.shape[1])
        position = position_of(token, seq, mLens, mStarts)
        page = Int32(0)
        if cta_row < 2 * kv_heads:
            page = mTable[position // self.page_size, seq]
        slot = slot_of(page, position, self.page_size)
        angles = cute.make_rmem_tensor((VECTOR, 2), Float32)
        if rotates:
            self.load(mA[None, lane, None, position], 0, 1, angles)

        values = cute.make_rmem_tensor((VECTOR, 2), Float32)
        for u in cutlass.range_constexpr(self.unroll):
            row, vectors = first_row + u * self.pass_rows, rX[None, None, u]
            values.store(vectors.load().to(Float32))
            if row < kv_heads:
                if rotates:
                    self.rotate(values, angles)
                self.scale(values, inverse_scale(mKS, page, row, self.scales))
                self.store(values, mKC[None, None, row, slot], low, high, self.fp8)
            elif row < 2 * kv_heads:
                self.scale(values, inverse_scale(mVS, page, row - kv_heads, self.scales))
                self.store(values, mVC[None, None, row - kv_heads, slot], low, high, self.fp8)
            elif row < 2 * kv_heads + heads:
                if rotates:
                    self.rotate(values, angles)
                self.store(values, mO[None, None, row - 2 * kv_heads, token], low, high, False)

    @cute.jit
    def load(
        self,
        gX: cute.Tensor,  # (VECTOR, vectors)
        low: Int32,
        high: Int32,
        vectors: cute.Tensor,  # (VECTOR, 2), written
    ):
        """Loads vectors ``low`` and ``high``."""
        cute.autovec_copy(gX[None, low], vectors[None, 0])
        cute.autovec_copy(gX[None, high], vectors[None, 1])

    @cute.jit
    def rotate(
        self,
        values: cute.Tensor,  # (VECTOR, 2)
        angles: cute.Tensor,  # (VECTOR, 2): cosines, sines
    ):
        """Rotates eight pairs."""
        for i in cutlass.range_constexpr(VECTOR):
            first, second = i, i + VECTOR
            if cutlass.const_expr(self.interleaved):
                first, second = 2 * i, 2 * i + 1
            x, y, cosine, sine = values[first], values[second], angles[i, 0], angles[i, 1]
            values[first] = x * cosine - y * sine
            values[second] = y * cosine + x * sine

    @cute.jit
    def scale(
        self,
        values: cute.Tensor,  # (VECTOR, 2)
        inverse: Float32,
    ):
        """Multiplies values by an inverse scale, where the cache has scales."""
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
        """Rounds two vectors and stores them at ``low`` and ``high``; four float8 fill a word."""
        if cutlass.const_expr(fp8):
            words = cute.make_rmem_tensor((VECTOR // 4, 2), Uint32)
            fours = cute.make_tensor(values.iterator, cute.make_layout((4, THREAD_ELEMENTS // 4)))
            for w in cutlass.range_constexpr(THREAD_ELEMENTS // 4):
                words[w] = e4m3x4(fours[None, w])
            rounded = words
        else:
            rounded = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
            rounded.store(values.load().to(self.dtype))
        cute.autovec_copy(rounded[None, 0], gX[None, low])
        cute.autovec_copy(rounded[None, 1], gX[None, high])
