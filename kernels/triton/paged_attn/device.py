"""Triton kernels of `paged_attn`; the arrays are those of the entry (reference/paged_attn.py).

`split` has a file of its own. scale is sm_scale * log2(e), width the pages of a row of the table.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.softmax import MIN_SCORE, finish_softmax
from kernelcat.kernels.triton.paged_attn.nvfp4 import GROWTH
from kernelcat.kernels.triton.paged_attn.tile import (
    add_sink,
    attend,
    cap,
    find_slots,
    finish,
    load_rows,
    load_tile,
)


@triton.jit
def naive(
    q, k_cache, v_cache, block_table, kv_lens, cu_q, sinks, k_scale, v_scale,
    k_block_scale, v_block_scale, out, lse,
    max_q, width, window, scale, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """One query token and head a program, 16 tokens at a time, without tensor cores."""
    BLOCK_N: tl.constexpr = 16
    seq, token = tl.program_id(0) // max_q, tl.program_id(0) % max_q
    head = tl.program_id(1)
    HEADS: tl.constexpr = GROUP * KV_HEADS
    kv_head, start, kv_len = head // GROUP, tl.load(cu_q + seq), tl.load(kv_lens + seq)
    q_len = tl.load(cu_q + seq + 1) - start
    if token < q_len:
        dims = tl.arange(0, HEAD_DIM)
        offset = ((start + token).to(tl.int64) * HEADS + head) * HEAD_DIM
        row = tl.load(q + offset + dims).to(tl.float32)
        last = kv_len - q_len + token
        if NVFP4:
            scale *= GROWTH
        row_max, row_sum, acc = -1.0e30, 0.0, tl.zeros((HEAD_DIM,), tl.float32)
        begin = tl.maximum(last + 1 - window, 0) if WINDOW else 0
        for first in range(begin, last + 1, BLOCK_N):
            tokens = first + tl.arange(0, BLOCK_N)
            visible = tokens <= last
            table = block_table + seq.to(tl.int64) * width
            slot, page = find_slots(tokens, visible, table, PAGE_SIZE)
            k = load_tile(
                k_cache, k_block_scale, slot, visible, kv_head,
                KV_HEADS, HEAD_DIM, NVFP4, True, False, tl.float32,
            )  # fmt: skip
            v = load_tile(
                v_cache, v_block_scale, slot, visible, kv_head,
                KV_HEADS, HEAD_DIM, NVFP4, True, False, tl.float32,
            )  # fmt: skip
            if HAS_SCALES:
                scale_row = page * KV_HEADS + kv_head if PAGE_SCALES else page * 0 + kv_head
                k *= tl.load(k_scale + scale_row, mask=visible, other=0.0)[:, None]
                v *= tl.load(v_scale + scale_row, mask=visible, other=0.0)[:, None]
            z = cap(tl.sum(k * row[None, :], 1) * scale, softcap, SOFTCAP)
            z = tl.where(visible, z, MIN_SCORE)
            new_max = tl.maximum(row_max, tl.max(z, 0))
            p, rescale = tl.exp2(z - new_max), tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(p, 0)
            acc = acc * rescale + tl.sum(p[:, None] * v, 0)
            row_max = new_max
        if NVFP4:
            acc *= GROWTH
        if HAS_SINKS:
            row_max, row_sum, rescale = add_sink(row_max, row_sum, tl.load(sinks + head))
            acc *= rescale
        row_sum, row_lse = finish_softmax(row_max, row_sum)
        tl.store(out + offset + dims, (acc / row_sum).to(out.dtype.element_ty))
        tl.store(lse + (start + token).to(tl.int64) * HEADS + head, row_lse)


@triton.jit
def tiled(
    q, k_cache, v_cache, block_table, kv_lens, cu_q, sinks, k_scale, v_scale,
    k_block_scale, v_block_scale, out, lse,
    width, window, scale, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of a sequence's rows a program, over all of its visible keys.

    Tiles of the last tokens start first: they have the most visible keys.
    """
    seq, head = tl.program_id(2), tl.program_id(1)
    HEADS: tl.constexpr = GROUP * KV_HEADS
    start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
    q_len = tl.load(cu_q + seq + 1) - start
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_row < q_len * GROUP:
        row = first_row + tl.arange(0, BLOCK_M)
        rows = load_rows(q, row, q_len, start, head, HEADS, GROUP, HEAD_DIM)
        last = kv_len - q_len + row // GROUP
        end = tl.minimum(kv_len, kv_len - q_len + (first_row + BLOCK_M - 1) // GROUP + 1)
        begin = 0
        if WINDOW:
            begin = tl.maximum(kv_len - q_len + first_row // GROUP + 1 - window, 0)
            begin = begin // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = attend(
            rows, begin, end, kv_len - q_len + first_row // GROUP + 1, last, head, kv_len,
            k_cache, v_cache, block_table + seq.to(tl.int64) * width, k_scale, v_scale,
            k_block_scale, v_block_scale, window, scale, softcap, KV_HEADS, HEAD_DIM, PAGE_SIZE,
            BLOCK_N, WINDOW, SOFTCAP, HAS_SCALES, PAGE_SCALES, NVFP4, STAGES, TMA,
        )  # fmt: skip
        finish(
            acc, row_max, row_sum, row, q_len, start, head, sinks, out, lse,
            HEADS, GROUP, HEAD_DIM, HAS_SINKS,
        )  # fmt: skip
