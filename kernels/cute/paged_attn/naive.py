"""The plain paged attention: one warp for one query of one head, one key after another."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import to_float
from kernelcat.kernels.cute.common.online_softmax import LOWEST, exp2, finish, logit
from kernelcat.kernels.cute.paged_attn.nvfp4 import value_of

WARPS = 4
LANES = 32


class Naive:
    """Serves any shape. A lane holds every 32nd element of its warp's head."""

    def __init__(
        self,
        dtype: str,
        fp8: bool,
        head_dim: int,
        page_size: int,
        window: bool,
        softcap: bool,
        sinks: bool,
        scales: str,
        nvfp4: bool,
    ):
        self.dtype, self.fp8, self.nvfp4 = element_type(dtype), fp8, nvfp4
        self.head_dim, self.page_size = head_dim, page_size
        self.window, self.softcap, self.sinks, self.scales = window, softcap, sinks, scales
        self.lane_elements = head_dim // LANES

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (tokens, heads, head_dim)
        k_cache: cute.Pointer,  # (pages, page_size, kv_heads, head_dim or half), dtype or bytes
        v_cache: cute.Pointer,  # as k_cache
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        sinks: cute.Pointer,  # (heads,)
        k_scale: cute.Pointer,  # (1 or pages, kv_heads)
        v_scale: cute.Pointer,  # as k_scale
        out: cute.Pointer,  # as q
        lse: cute.Pointer,  # (tokens, heads)
        k_block_scale: cute.Pointer,  # (pages, page_size, kv_heads, head_dim / 16), bytes
        v_block_scale: cute.Pointer,  # as k_block_scale
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        kv_heads: Int32,
        table_width: Int32,
        window: Int32,
        sm_scale: Float32,
        softcap: Float32,
        stream: cuda.CUstream,
    ):
        dim = self.head_dim
        rows = cute.make_layout((dim, heads, tokens), stride=(1, dim, Int64(heads) * dim))
        row = dim // 2 if self.nvfp4 else dim
        cached = cute.make_layout((row, kv_heads, 1), stride=(1, row, Int64(kv_heads) * row))
        blocks = dim // 16
        block_scales = cute.make_layout(
            (blocks, kv_heads, 1), stride=(1, blocks, Int64(kv_heads) * blocks)
        )
        page_scales = cute.make_layout((kv_heads, 1), stride=(1, Int64(kv_heads)))
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        self.kernel(
            cute.make_tensor(q, rows),
            cute.make_tensor(k_cache, cached),
            cute.make_tensor(v_cache, cached),
            cute.make_tensor(block_table, table),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(sinks, cute.make_layout(heads)),
            cute.make_tensor(k_scale, page_scales),
            cute.make_tensor(v_scale, page_scales),
            cute.make_tensor(k_block_scale, block_scales),
            cute.make_tensor(v_block_scale, block_scales),
            cute.make_tensor(out, rows),
            cute.make_tensor(
                lse, cute.make_layout((heads, tokens), stride=(1, Int64(heads)))
            ),
            window,
            sm_scale,
            softcap,
        ).launch(
            grid=(tokens, cute.ceil_div(heads, WARPS), 1), block=(LANES, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (head_dim, heads, tokens)
        mK: cute.Tensor,  # (head_dim or half, kv_heads, slots)
        mV: cute.Tensor,  # as mK
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mSinks: cute.Tensor,  # (heads,)
        mKS: cute.Tensor,  # (kv_heads, pages)
        mVS: cute.Tensor,  # as mKS
        mKB: cute.Tensor,  # (head_dim / 16, kv_heads, slots)
        mVB: cute.Tensor,  # as mKB
        mO: cute.Tensor,  # as mQ
        mL: cute.Tensor,  # (heads, tokens)
        window: Int32,
        sm_scale: Float32,
        softcap: Float32,
    ):
        lane, warp, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        head, batch = block * WARPS + warp, mTable.shape[1]
        kv_head = head // (mQ.shape[1] // mK.shape[1])
        if head < mQ.shape[1]:
            # The index of the token's sequence is the number of sequences that end before it.
            num_ended = Int32(0)
            for s in cutlass.range(lane, batch, LANES, unroll=1):
                num_ended += Int32(mStarts[s + 1] <= token)
            seq = cute.arch.warp_reduction_sum(num_ended)
            position = mLens[seq] - (mStarts[seq + 1] - token)
            first = Int32(0)
            if cutlass.const_expr(self.window):
                first = cutlass.max(position - window + 1, 0)

            query = cute.make_rmem_tensor(self.lane_elements, Float32)
            value = cute.make_rmem_tensor(self.lane_elements, Float32)
            value.fill(0.0)
            for i in cutlass.range_constexpr(self.lane_elements):
                query[i] = Float32(mQ[i * LANES + lane, head, token])
            row_max, row_sum = Float32(LOWEST), Float32(0)
            for t in cutlass.range(first, position + 1, unroll=1):
                page = mTable[t // self.page_size, seq]
                slot = Int64(page) * self.page_size + t % self.page_size
                score = Float32(0)
                for i in cutlass.range_constexpr(self.lane_elements):
                    score += query[i] * self.cached(mK, mKB, i * LANES + lane, kv_head, slot)
                scale, v_factor = sm_scale, Float32(1)
                if cutlass.const_expr(self.scales != "none"):
                    row = Int32(0)
                    if cutlass.const_expr(self.scales == "page"):
                        row = page
                    scale, v_factor = sm_scale * mKS[kv_head, row], mVS[kv_head, row]
                score = cute.arch.warp_reduction_sum(score)
                z = logit(score, scale, softcap, self.softcap)
                old_max = row_max
                row_max = cute.arch.fmax(row_max, z)
                rescale, p = exp2(old_max - row_max), exp2(z - row_max)
                row_sum = row_sum * rescale + p
                for i in cutlass.range_constexpr(self.lane_elements):
                    v = self.cached(mV, mVB, i * LANES + lane, kv_head, slot)
                    value[i] = value[i] * rescale + p * v_factor * v

            sink = Float32(0)
            if cutlass.const_expr(self.sinks):
                sink = mSinks[head]
            factor, lse = finish(row_max, row_sum, sink, self.sinks)
            for i in cutlass.range_constexpr(self.lane_elements):
                mO[i * LANES + lane, head, token] = (value[i] * factor).to(self.dtype)
            if lane == 0:
                mL[head, token] = lse

    @cute.jit
    def cached(
        self,
        values: cute.Tensor,  # (head_dim or half, kv_heads, slots)
        block_scales: cute.Tensor,  # (head_dim / 16, kv_heads, slots)
        dim: Int32,
        kv_head: Int32,
        slot: Int64,
    ):
        """An element of the cache in float32."""
        if cutlass.const_expr(self.nvfp4):
            value = value_of(values[dim // 2, kv_head, slot], dim % 2)
            value *= to_float(block_scales[dim // 16, kv_head, slot])
        else:
            value = values[dim, kv_head, slot]
            if cutlass.const_expr(self.fp8):
                value = to_float(value)
        return Float32(value)
