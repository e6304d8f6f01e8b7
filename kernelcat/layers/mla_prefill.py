"""Chunks of prompts over a paged latent cache, with keys and values of every head.

In latent space (`flashmla`) a score and its value take 576 + 512 products, but no key has to be
made. Here they take 192 + 128, and 512 * 256 to make a head's key and value of a token: less for
chunks of more than some 170 tokens. Context is expanded piece by piece, so that memory is bounded,
and pieces become one by their log-sum-exps (`attn_merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise, starmap

import torch
from torch.nn.functional import linear, pad

import kernelcat
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, ROW, SCALED, SCALES

Part = tuple[torch.Tensor, torch.Tensor]
"""A result, (tokens, heads, v), and the log of its softmax's denominator, (tokens, heads)."""


def prefill(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    sm_scale: float,
    piece: int = 4096,
) -> Part:
    """Attention of new tokens to themselves and to what is cached before them.

    Rows of the new tokens are in the cache already (`mla_kv_write`), and are read from there as
    later ones will read them. Sequences are taken one after the other.

    Parameters
    ----------
    q_nope : (tokens, heads, nope), sequence after sequence
    q_pe : (tokens, heads, 64), rotated
    kv_b : (heads * (nope + v), 512), the weight of DeepSeek's ``kv_b_proj``, in q's type
    kv_cache : (pages, page_size, 576) in q's type, or uint8 (pages, page_size, 656), contiguous
    block_table : (batch, table_width) int32
    kv_lens, q_lens : of each sequence: cached tokens, the new ones included, and new tokens. They
        are the host's, since shapes follow from them.
    sm_scale : factor of scores, from :func:`kernelcat.layers.mla.sm_scale`
    piece : tokens of context that are expanded at a time; a chunk is expanded whole

    Returns
    -------
    out (tokens, heads, v) in q's type, and lse (tokens, heads) float32, in natural logarithms.

    Raises
    ------
    ValueError
        Arrays or lengths do not fit together.
    kernelcat.errors.Unsupported
        There is context, and `attn_merge` does not serve such heads on this GPU.

    Source: DeepSeek-V2, section 2.1, as it is written; chunks over context as in vLLM.
    """
    _check(q_nope, q_pe, kv_b, kv_cache, block_table, kv_lens, q_lens, piece)
    q = torch.cat((q_nope, q_pe), -1)
    heads, nope = q_nope.shape[1:]
    out = q.new_empty(len(q), heads, len(kv_b) // heads - nope)
    lse = q.new_empty(len(q), heads, dtype=torch.float32)
    for s, (start, end) in enumerate(pairwise(accumulate(q_lens, initial=0))):
        if start < end:
            own = q[start:end], nope, kv_b, kv_cache, block_table[s], kv_lens[s]
            out[start:end], lse[start:end] = _attend_all(*own, sm_scale, piece)
    return out, lse


def _attend_all(
    q: torch.Tensor,
    nope: int,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    pages: torch.Tensor,
    kv_len: int,
    sm_scale: float,
    piece: int,
) -> Part:
    """Of one sequence: pieces of context, then the chunk, merged one by one."""
    context = kv_len - len(q)

    def part(first: int, last: int) -> Part:
        rows = cached(kv_cache, pages, first, last, q.dtype)
        k, v = expanded(rows, kv_b, q.shape[1], nope)
        return attend(q, k, v, sm_scale, is_causal=first == context)

    cuts = [*range(0, context, piece), context, kv_len]
    return reduce(merged, starmap(part, pairwise(cuts)))


def _check(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    piece: int,
) -> None:
    heads, nope = q_nope.shape[1:]
    if len(kv_b) % heads or len(kv_b) <= heads * nope:
        raise ValueError(f"{len(kv_b)} rows of kv_b are not {heads} heads of {nope} + v")
    if kv_cache.ndim != 3 or kv_cache.shape[2] not in (ROW, PACKED):
        raise ValueError(f"kv_cache must be (pages, page_size, {ROW} or {PACKED})")
    if not len(block_table) == len(kv_lens) == len(q_lens):
        raise ValueError("block_table, kv_lens and q_lens must be of the same sequences")
    if not len(q_nope) == len(q_pe) == sum(q_lens):
        raise ValueError(f"q_nope and q_pe must have {sum(q_lens)} tokens, as q_lens has")
    room = block_table.shape[1] * kv_cache.shape[1]
    if not all(0 <= q <= kv <= room for q, kv in zip(q_lens, kv_lens, strict=True)):
        raise ValueError(f"lengths must be 0 <= q_len <= kv_len <= {room}")
    if piece <= 0:
        raise ValueError("piece must be positive")


def cached(
    kv_cache: torch.Tensor, pages: torch.Tensor, first: int, last: int, dtype: torch.dtype
) -> torch.Tensor:
    """Tokens ``first .. last - 1`` of the sequence with such pages: (tokens, 576), in ``dtype``."""
    size = kv_cache.shape[1]
    tokens = torch.arange(first, last, device=kv_cache.device)
    rows = kv_cache[pages[tokens // size].long(), tokens % size]
    return unpack(rows, dtype) if kv_cache.dtype == torch.uint8 else rows


def unpack(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(..., 656) uint8, contiguous, as (..., 576) numbers: float8 times scales, and bfloat16."""
    latent, scales, rope = rows.split((LATENT, SCALES, PACKED - LATENT - SCALES), -1)
    groups = latent.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, SCALED))
    numbers = (groups * scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
    return torch.cat((numbers.to(dtype), rope.view(torch.bfloat16).to(dtype)), -1)


def expanded(
    rows: torch.Tensor, kv_b: torch.Tensor, heads: int, nope: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (tokens, heads, nope + 64) and values (tokens, heads, v) of (tokens, 576)."""
    kv = linear(rows[:, :LATENT], kv_b).unflatten(1, (heads, -1))
    k_pe = rows[:, None, LATENT:].expand(-1, heads, ROPE)
    return torch.cat((kv[..., :nope], k_pe), -1), kv[..., nope:]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool
) -> Part:
    """Attention of (queries, heads, d) to keys (tokens, heads, d) and values (tokens, heads, v).

    `paged_attn` has no use here: its queries are the last tokens, which hides context, and its keys
    are as long as its values. Torch's public attention gives no log-sum-exp; the operator beneath
    does (:func:`flash`). On a CPU it is the formula, in float32. ``is_causal`` is for as many
    tokens as queries.
    """
    return (flash if q.is_cuda else formula)(q, k, v, sm_scale, is_causal)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool
) -> Part:
    """By torch's FlashAttention, whose values are as long as keys: they get zeros at their end."""
    heads = [x.transpose(0, 1)[None] for x in (q, k, pad(v, (0, k.shape[2] - v.shape[2])))]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *heads, 0.0, is_causal, scale=sm_scale
    )
    return out[0].transpose(0, 1)[..., : v.shape[2]], lse[0].T


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, is_causal: bool
) -> Part:
    z = torch.einsum("qhd,khd->qhk", q.float(), k.float()) * sm_scale
    if is_causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
        z = z.masked_fill(hidden[:, None], float("-inf"))
    lse = z.logsumexp(-1)
    p = (z - lse[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", p, v.float()).to(q.dtype), lse


def merged(one: Part, other: Part) -> Part:
    """One result, by `attn_merge` where there is a GPU; every query saw a key of both."""
    outs, lses = (torch.stack(both) for both in zip(one, other, strict=True))
    if outs.is_cuda:
        out, lse = kernelcat.get("attn_merge")(outs, lses)
        return out, lse
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp()[..., None]
    return (weights * outs.float()).sum(0).to(outs.dtype), lse
