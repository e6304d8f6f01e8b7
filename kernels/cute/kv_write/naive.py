"""RoPE and cache append without tricks: one warp, one head of a token, element by element."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.kv_write.place import (
    e4m3,
    inverse_of,
    position_of,
    sequence_of,
    slot_of,
)

WARPS = 4
LANES = 32


class Naive:
    """Any shape. A lane has every 32nd element of its warp's head, and loads their partners too.

    The rows of a token are its keys, values and queries, head by head.
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
        v: cute.Pointer,  # as k
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        cos_sin: cute.Pointer,  # (positions, rotary_dim) float32
        k_scale: cute.Pointer,  # (1 or pages, kv_heads) float32
        v_scale: cute.Pointer,  # as k_scale
        q_out: cute.Pointer,  # as q
        k_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim), float8 as bytes
        v_cache: cute.Pointer,  # as k_cache
        tokens: Int32,
        batch: Int32,
        heads: Int32,
        kv_heads: Int32,
        table_width: Int32,
        rotary_dim: Int32,
        stream: cuda.CUstream,
    ):
        dim = self.head_dim
        rows = cute.make_layout((dim, heads, tokens), stride=(1, dim, Int64(heads) * dim))
        kv_rows = cute.make_layout((dim, kv_heads, tokens), stride=(1, dim, Int64(kv_heads) * dim))
        by_page = cute.make_layout((kv_heads, 1), stride=(1, Int64(kv_heads)))
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        angles = cute.make_layout((rotary_dim, 1), stride=(1, Int64(rotary_dim)))
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
            cute.make_tensor(k_cache, kv_rows),
            cute.make_tensor(v_cache, kv_rows),
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
        mV: cute.Tensor,
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mA: cute.Tensor,  # (rotary_dim, positions)
        mKS: cute.Tensor,  # (kv_heads, pages)
        mVS: cute.Tensor,
        mO: cute.Tensor,  # as mQ
        mKC: cute.Tensor,  # (head_dim, kv_heads, slots)
        mVC: cute.Tensor,
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
                    at = dim + cute.arch.lane_idx()
                    gO[at] = self.turned(gQ, gA, at).to(self.dtype)
            else:
                page = mTable[position // self.page_size, seq]
                slot = slot_of(page, position, self.page_size)
                if row < kv_heads:
                    inverse = inverse_of(mKS, page, row, self.scales)
                    gK, gC = mK[None, row, token], mKC[None, row, slot]
                    for dim in cutlass.range_constexpr(0, self.head_dim, LANES):
                        at = dim + cute.arch.lane_idx()
                        gC[at] = self.rounded(self.turned(gK, gA, at) * inverse)
                else:
                    head = row - kv_heads
                    inverse = inverse_of(mVS, page, head, self.scales)
                    gV, gC = mV[None, head, token], mVC[None, head, slot]
                    for dim in cutlass.range_constexpr(0, self.head_dim, LANES):
                        at = dim + cute.arch.lane_idx()
                        gC[at] = self.rounded(Float32(gV[at]) * inverse)

    @cute.jit
    def turned(self, gX: cute.Tensor, gA: cute.Tensor, at: Int32):
        """Element ``at`` of a head (head_dim,), by the angles (rotary_dim,) of its token."""
        value, rotary_dim = Float32(gX[at]), cute.size(gA)
        half = rotary_dim // 2
        if at < rotary_dim:
            pair, partner, is_first = at // 2, at ^ 1, at % 2 == 0
            if cutlass.const_expr(not self.interleaved):
                is_first = at < half
                pair, partner = at, at + half
                if not is_first:
                    pair, partner = at - half, at - half
            sine = gA[half + pair]
            if is_first:
                sine = -sine
            value = value * gA[pair] + Float32(gX[partner]) * sine
        return value

    @cute.jit
    def rounded(self, value: Float32):
        """As the cache has it."""
        if cutlass.const_expr(self.fp8):
            return e4m3(value)
        return value.to(self.dtype)
