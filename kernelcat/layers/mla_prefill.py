"""Chunks of prompts over a paged latent cache, with keys and values of every head.

In latent space (`flashmla`) a query and a key cost 576 + 512 multiplications a head, and no keys
have to be made. Here they cost 192 + 128, but a head's key and value of each token take 512 * 256
once. That is less for chunks of more than 170 query tokens. Keys and values of the context are made
for a limited number of tokens at a time, so that memory is bounded, and the partial results are
merged by their log-sum-exps (`attn_merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise, starmap

import torch
from torch.nn.functional import linear, pad

import kernelcat
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, ROW, SCALED, SCALES

Partial = tuple[torch.Tensor, torch.Tensor]
"""A result (tokens, heads, v) and its natural log-sum-exp (tokens, heads) float32."""


def prefill(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    sm_scale: float,
    context_step: int = 4096,
) -> Partial:
    """Attention of new tokens to the cached tokens before them and, causally, to one another.

    The rows of the new tokens must be in the cache already (`mla_kv_write`). They are read from
    there, so that this chunk sees the same rounded values as later tokens. Sequences are processed
    one after another.

    Parameters
    ----------
    q_nope : (tokens, heads, nope), one sequence after another
    q_pe : (tokens, heads, 64), rotated
    kv_b : (heads * (nope + v), 512), the weight of DeepSeek's ``kv_b_proj``, in q's type
    kv_cache : (pages, page_size, 576) in q's type, or uint8 (pages, page_size, 656), contiguous
    block_table : (batch, table_width) int32
    kv_lens, q_lens : tokens of each sequence, the new ones included, and its new tokens. They are
        numbers on the host, because shapes follow from them.
    sm_scale : factor of scores, from :func:`kernelcat.layers.mla.sm_scale`
    context_step : tokens of context whose keys and values are made at a time; those of the new
        tokens are made at once

    Returns
    -------
    out (tokens, heads, v) in q's type, and lse (tokens, heads) float32, natural.

    Raises
    ------
    ValueError
        Arrays or lengths do not fit together.
    kernelcat.errors.Unsupported
        There is context, and `attn_merge` has no implementation for such heads on this GPU.

    Source: DeepSeek-V2, section 2.1, without absorption; merging chunks of context as vLLM does.
    """
    _check(q_nope, q_pe, kv_b, kv_cache, block_table, kv_lens, q_lens, context_step)
    q = torch.cat((q_nope, q_pe), -1)
    heads, nope = q_nope.shape[1:]
    out = q.new_empty(len(q), heads, len(kv_b) // heads - nope)
    lse = q.new_empty(len(q), heads, dtype=torch.float32)
    for s, (start, end) in enumerate(pairwise(accumulate(q_lens, initial=0))):
        if start < end:
            sequence = q[start:end], nope, kv_b, kv_cache, block_table[s], kv_lens[s]
            out[start:end], lse[start:end] = _attend_all(*sequence, sm_scale, context_step)
    return out, lse


def _attend_all(
    q: torch.Tensor,
    nope: int,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    pages: torch.Tensor,
    kv_len: int,
    sm_scale: float,
    context_step: int,
) -> Partial:
    """Attention of one sequence's new tokens q (queries, heads, nope + 64) to all its tokens.

    ``pages`` is its row of the block table, (table_width,). Partial results of the context are
    merged one by one, so that only two are in memory.
    """
    context = kv_len - len(q)

    def partial(first: int, last: int) -> Partial:
        rows = cached(kv_cache, pages, first, last, q.dtype)
        k, v = keys_and_values(rows, kv_b, q.shape[1], nope)
        return attend(q, k, v, sm_scale, is_causal=first == context)

    bounds = [*range(0, context, context_step), context, kv_len]
    return reduce(merge, starmap(partial, pairwise(bounds)))


def _check(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    context_step: int,
) -> None:
    heads, nope = q_nope.shape[1:]
    if len(kv_b) % heads or len(kv_b) <= heads * nope:
        raise ValueError(f"{len(kv_b)} rows of kv_b are not {heads} heads of {nope} + v")
    if kv_cache.ndim != 3 or kv_cache.shape[2] not in (ROW, PACKED):
        raise ValueError(f"kv_cache must be (pages, page_size, {ROW} or {PACKED})")
    batch = len(block_table)
    if not batch == len(kv_lens) == len(q_lens):
        raise ValueError(
            f"block_table has {batch} sequences, kv_lens {len(kv_lens)} and q_lens {len(q_lens)}: "
            "the numbers must be equal"
        )
    tokens = sum(q_lens)
    if not len(q_nope) == len(q_pe) == tokens:
        raise ValueError(
            f"q_nope has {len(q_nope)} tokens and q_pe {len(q_pe)}; "
            f"both must have {tokens}, the sum of q_lens"
        )
    room = block_table.shape[1] * kv_cache.shape[1]
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if not 0 <= q_len <= kv_len <= room:
            raise ValueError(
                f"sequence {s}: q_len={q_len} and kv_len={kv_len} must be "
                f"0 <= q_len <= kv_len <= {room}, the room in block_table"
            )
    if context_step <= 0:
        raise ValueError(f"context_step={context_step} must be positive")


def cached(
    kv_cache: torch.Tensor, pages: torch.Tensor, first: int, last: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of tokens ``first`` to ``last - 1`` of one sequence, (tokens, 576) in ``dtype``.

    ``pages`` (table_width,) is the sequence's row of the block table.
    """
    size = kv_cache.shape[1]
    tokens = torch.arange(first, last, device=kv_cache.device)
    rows = kv_cache[pages[tokens // size].long(), tokens % size]
    return unpack(rows, dtype) if kv_cache.dtype == torch.uint8 else rows


def unpack(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of 656 bytes, (..., 656) uint8 and contiguous, as (..., 576) numbers in ``dtype``.

    ``reference/_mla_row.py`` is the reference for this format; this is its form in torch.
    """
    latent, scales, rope = rows.split((LATENT, SCALES, PACKED - LATENT - SCALES), -1)
    groups = latent.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, SCALED))
    values = (groups * scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
    return torch.cat((values.to(dtype), rope.view(torch.bfloat16).to(dtype)), -1)


def keys_and_values(
    rows: torch.Tensor, kv_b: torch.Tensor, heads: int, nope: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (tokens, heads, nope + 64) and values (tokens, heads, v) of cached rows (tokens, 576).

    ``kv_b`` is (heads * (nope + v), 512).
    """
    kv = linear(rows[:, :LATENT], kv_b).unflatten(1, (heads, -1))
    k_pe = rows[:, None, LATENT:].expand(-1, heads, ROPE)
    return torch.cat((kv[..., :nope], k_pe), -1), kv[..., nope:]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool
) -> Partial:
    """Attention of q (queries, heads, d) to keys (tokens, heads, d) and values (tokens, heads, v).

    With ``is_causal`` there must be as many tokens as queries.

    `paged_attn` cannot be used here: its queries are the last tokens of a sequence, while these
    come after all of a part of the context, and its values are as long as its keys. Torch's public
    attention returns no log-sum-exp, but the operator below it does (:func:`attend_flash`).
    """
    return (attend_flash if q.is_cuda else attend_plainly)(q, k, v, sm_scale, is_causal)


def attend_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool
) -> Partial:
    """:func:`attend` by torch's FlashAttention, for 16 bits on a GPU.

    FlashAttention's values are as long as its keys, so values are padded with zeros.
    """
    operands = [x.transpose(0, 1)[None] for x in (q, k, pad(v, (0, k.shape[2] - v.shape[2])))]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *operands, 0.0, is_causal, scale=sm_scale
    )
    return out[0].transpose(0, 1)[..., : v.shape[2]], lse[0].T


def attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool
) -> Partial:
    """:func:`attend` by its definition, in float32 and on any device: the reference."""
    z = torch.einsum("qhd,khd->qhk", q.float(), k.float()) * sm_scale
    if is_causal:
        is_hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
        z = z.masked_fill(is_hidden[:, None], float("-inf"))
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", p, v.float()).to(q.dtype), lse


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both partial results; each query has visible keys in both.

    `attn_merge` computes it on a GPU, its definition on a CPU.
    """
    outs, lses = (torch.stack(pair) for pair in zip(first, second, strict=True))
    if outs.is_cuda:
        out, lse = kernelcat.get("attn_merge")(outs, lses)
        return out, lse
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()[..., None]
    return (weights * outs.float()).sum(0).to(outs.dtype), lse
