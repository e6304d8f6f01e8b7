"""RoPE and cache append without tricks: one warp per head of a token, one element at a time."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import e4m3
from kernelcat.kernels.cute.common.token_slots import position_of, sequence_of, slot_of
from kernelcat.kernels.cute.kv_write.cache_scale import inverse_scale

WARPS = 4
LANES = 32


class Naive:
    """Any shape. The rows of a token are the heads of its keys, then of its values, then of q.

    A warp takes one row. A lane takes every 32nd element, and also loads the other element of each
    pair that RoPE rotates.
    """

    def __init__(
        self, dtype: str, fp8: bool, head_dim: int, page_size: int, interleaved: bool, scales: str
    ):
        self.dtype, self.fp8 = element_type(dtype), fp8
        self.head_dim, self.page_size = head_dim, page_size
        self.interleaved, self.scales = interleaved, scales

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
        k_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim), float8 as bytes
        v_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim), float8 as bytes
        tokens: Int32,
        batch: Int32,
        heads: Int32,
        kv_heads: Int32,
        table_width: Int32,
        rotary_dim: Int32,
        stream: cuda.CUstream,
    ):
        dim = self.head_dim
        q_layout = cute.make_layout((dim, heads, tokens), stride=(1, dim, Int64(heads) * dim))
        kv_layout = cute.make_layout(
            (dim, kv_heads, tokens), stride=(1, dim, Int64(kv_heads) * dim)
        )
        scale_layout = cute.make_layout((kv_heads, 1), stride=(1, Int64(kv_heads)))
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        angles = cute.make_layout((rotary_dim, 1), stride=(1, Int64(rotary_dim)))
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
            cute.make_tensor(k_cache, kv_layout),
            cute.make_tensor(v_cache, kv_layout),
        ).launch(
            grid=(tokens, cute.ceil_div(2 * kv_heads + heads, WARPS), 1),
            block=(LANES, WARPS, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (head_dim, heads, tokens)
        mK: cute.Tensor,  # (head_dim, kv_heads, tokens)
        mV: cute.Tensor,  # (head_dim, kv_heads, tokens)
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mA: cute.Tensor,  # (rotary_dim, positions): cosines, then sines
        mKS: cute.Tensor,  # (kv_heads, 1 or pages)
        mVS: cute.Tensor,  # (kv_heads, 1 or pages)
        mO: cute.Tensor,  # (head_dim, heads, tokens)
        mKC: cute.Tensor,  # (head_dim, kv_heads, slots)
        mVC: cute.Tensor,  # (head_dim, kv_heads, slots)
    ):
        _, warp, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        row, heads, kv_heads = block * WARPS + warp, mQ.shape[1], mK.shape[1]
        if row < 2 * kv_heads + heads:
            seq = sequence_of(token, mStarts, mTable.shape[1])
            position = position_of(token, seq, mLens, mStarts)
            gA = mA[None, position]
            if row >= 2 * kv_heads:
                head = row - 2 * kv_heads
                gQ, gO = mQ[None, head, token], mO[None, head, token]
                for dim in cutlass.range_constexpr(0, self.head_dim, LANES):
                    col = dim + cute.arch.lane_idx()
                    gO[col] = self.rotated(gQ, gA, col).to(self.dtype)
            else:
                page = mTable[position // self.page_size, seq]
                slot = slot_of(page, position, self.page_size)
                if row < kv_heads:
                    inverse = inverse_scale(mKS, page, row, self.scales)
                    gK, gC = mK[None, row, token], mKC[None, row, slot]
                    for dim in cutlass.range_constexpr(0, self.head_dim, LANES):
                        col = dim + cute.arch.lane_idx()
                        gC[col] = self.rounded(self.rotated(gK, gA, col) * inverse)
                else:
                    head = row - kv_heads
                    inverse = inverse_scale(mVS, page, head, self.scales)
                    gV, gC = mV[None, head, token], mVC[None, head, slot]
                    for dim in cutlass.range_constexpr(0, self.head_dim, LANES):
                        col = dim + cute.arch.lane_idx()
                        gC[col] = self.rounded(Float32(gV[col]) * inverse)

    @cute.jit
    def rotated(
        self,
        gX: cute.Tensor,  # (head_dim,) of a head
        gA: cute.Tensor,  # (rotary_dim,): cosines, then sines of the token's angles
        col: Int32,
    ):
        """Element ``col`` after RoPE."""
        value, rotary_dim = Float32(gX[col]), cute.size(gA)
        half = rotary_dim // 2
        if col < rotary_dim:
            pair, partner, is_first = col // 2, col ^ 1, col % 2 == 0
            if cutlass.const_expr(not self.interleaved):
                is_first = col < half
                pair, partner = col, col + half
                if not is_first:
                    pair, partner = col - half, col - half
            sine = gA[half + pair]
            if is_first:
                sine = -sine
            value = value * gA[pair] + Float32(gX[partner]) * sine
        return value

    @cute.jit
    def rounded(self, value: Float32):
        """Rounds to the cache's element type."""
        if cutlass.const_expr(self.fp8):
            return e4m3(value)
        return value.to(self.dtype)
