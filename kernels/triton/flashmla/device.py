"""Triton kernels of `flashmla`; arrays are the entry's, pointers to the cache those of tile.py."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.flashmla.tile import (
    LATENT,
    LOWEST,
    ROPE,
    ROW,
    attend,
    ended,
    finish,
    load_rows,
    load_tokens,
    slots_of,
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
        at = (start + token).to(tl.int64) * heads + tl.program_id(1)
        row = tl.load(q + at * ROW + dims).to(tl.float32)
        row_pe = tl.load(q + at * ROW + LATENT + pe_dims).to(tl.float32)
        table = block_table + seq.to(tl.int64) * width
        seen_tokens = kv_len - q_len + token + 1
        most, total, acc = -1.0e30, 0.0, tl.zeros((LATENT,), tl.float32)
        for first in range(0, seen_tokens, BLOCK_N):
            seen = first + tl.arange(0, BLOCK_N) < seen_tokens
            slot, rows = slots_of(first, table, seen_tokens, PAGE_SIZE, BLOCK_N)
            c, pe = load_tokens(latent, factor, rotated, slot, rows, seen, PACKED, tl.float32)
            z = (tl.sum(c * row[None, :], 1) + tl.sum(pe * row_pe[None, :], 1)) * scale
            z = tl.where(seen, z, LOWEST)
            highest = tl.maximum(most, tl.max(z, 0))
            p, shrink = tl.exp2(z - highest), tl.exp2(most - highest)
            total = total * shrink + tl.sum(p, 0)
            acc = acc * shrink + tl.sum(p[:, None] * c, 0)
            most = highest
        total, log_sum = ended(most, total)
        tl.store(out + at * LATENT + dims, (acc / total).to(out.dtype.element_ty))
        tl.store(lse + at, log_sum)


@triton.jit
def tiled(
    q, latent, factor, rotated, block_table, kv_lens, cu_q, out, lse,
    width, scale,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """A tile of a sequence's rows over all that they see; tiles of a sequence side by side."""
    seq, tile_row = tl.program_id(1), tl.program_id(0) * BLOCK_M
    start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
    q_len = tl.load(cu_q + seq + 1) - start
    if tile_row < q_len * HEADS:
        first_row, rows = start.to(tl.int64) * HEADS + tile_row, q_len * HEADS - tile_row
        before = kv_len - q_len  # tokens that come before all queries
        row, row_pe = load_rows(q, first_row, rows, BLOCK_M)
        acc, most, total = attend(
            row, row_pe, 0, tl.minimum(kv_len, before + (tile_row + BLOCK_M - 1) // HEADS + 1),
            before + (tile_row + tl.arange(0, BLOCK_M)) // HEADS, kv_len,
            latent, factor, rotated, block_table + seq.to(tl.int64) * width, scale,
            PAGE_SIZE, BLOCK_N, PACKED, STAGES, APART,
        )  # fmt: skip
        finish(acc, most, total, first_row, rows, out, lse)
