"""Triton kernels of `flashmla`; the arrays are those of the entry (reference/flashmla.py).

`split` has a file of its own. `latent`, `factor` and `rotated` are the pointers to the cache
(common/device/mla_row.py); scale is sm_scale * log2(e), width the pages of a row of the table.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.mla_row import LATENT, ROPE, ROW
from kernelcat.kernels.triton.common.device.softmax import MIN_SCORE, finish_softmax
from kernelcat.kernels.triton.flashmla.tile import (
    attend,
    find_slots,
    finish,
    load_rows,
    load_tokens,
)


@triton.jit
def naive(
    q, latent, factor, rotated, block_table, kv_lens, cu_q, out, lse,
    max_q, width, heads, scale, PAGE_SIZE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One query token and head a program, 16 tokens at a time, without tensor cores."""
    BLOCK_N: tl.constexpr = 16
    seq, token = tl.program_id(0) // max_q, tl.program_id(0) % max_q
    start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
    q_len = tl.load(cu_q + seq + 1) - start
    if token < q_len:
        dims, pe_dims = tl.arange(0, LATENT), tl.arange(0, ROPE)
        row_idx = (start + token).to(tl.int64) * heads + tl.program_id(1)
        row = tl.load(q + row_idx * ROW + dims).to(tl.float32)
        row_pe = tl.load(q + row_idx * ROW + LATENT + pe_dims).to(tl.float32)
        table = block_table + seq.to(tl.int64) * width
        num_visible = kv_len - q_len + token + 1
        row_max, row_sum, acc = -1.0e30, 0.0, tl.zeros((LATENT,), tl.float32)
        for first in range(0, num_visible, BLOCK_N):
            visible = first + tl.arange(0, BLOCK_N) < num_visible
            slot, rows = find_slots(first, table, num_visible, PAGE_SIZE, BLOCK_N)
            c, pe = load_tokens(latent, factor, rotated, slot, rows, visible, PACKED, tl.float32)
            z = (tl.sum(c * row[None, :], 1) + tl.sum(pe * row_pe[None, :], 1)) * scale
            z = tl.where(visible, z, MIN_SCORE)
            new_max = tl.maximum(row_max, tl.max(z, 0))
            p, rescale = tl.exp2(z - new_max), tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(p, 0)
            acc = acc * rescale + tl.sum(p[:, None] * c, 0)
            row_max = new_max
        row_sum, row_lse = finish_softmax(row_max, row_sum)
        tl.store(out + row_idx * LATENT + dims, (acc / row_sum).to(out.dtype.element_ty))
        tl.store(lse + row_idx, row_lse)


@triton.jit
def tiled(
    q, latent, factor, rotated, block_table, kv_lens, cu_q, out, lse,
    width, scale,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BRANCHED: tl.constexpr,
):  # fmt: skip
    """A tile of a sequence's rows a program, over all of its visible keys.

    The tiles of one sequence are neighbours in the grid.
    """
    seq, seq_row = tl.program_id(1), tl.program_id(0) * BLOCK_M
    start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
    q_len = tl.load(cu_q + seq + 1) - start
    if seq_row < q_len * HEADS:
        first_row, rows = start.to(tl.int64) * HEADS + seq_row, q_len * HEADS - seq_row
        before = kv_len - q_len  # cached tokens before the first query token
        row, row_pe = load_rows(q, first_row, rows, BLOCK_M)
        acc, row_max, row_sum = attend(
            row, row_pe, 0, tl.minimum(kv_len, before + (seq_row + BLOCK_M - 1) // HEADS + 1),
            before + (seq_row + tl.arange(0, BLOCK_M)) // HEADS, kv_len,
            latent, factor, rotated, block_table + seq.to(tl.int64) * width, scale,
            PAGE_SIZE, BLOCK_N, PACKED, STAGES, BRANCHED,
        )  # fmt: skip
        finish(acc, row_max, row_sum, first_row, rows, out, lse)
