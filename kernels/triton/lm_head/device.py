"""Triton kernels of `lm_head`. logits = x (tokens, hidden) @ w (vocab, hidden)^T.

Of equal logits the one of the lower token comes first.
"""

import triton
import triton.language as tl

NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def score(
    x,  # (tokens, hidden)
    w,  # (vocab, hidden)
    scores,  # (tokens, vocab) float32
    logits,  # (tokens, vocab), where HAS_LOGITS
    vocab, hidden, HAS_LOGITS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All logits of one row of x, BLOCK_V a program: sums of products, element by element."""
    rows, token = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.program_id(1)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for k in range(0, hidden, BLOCK_K):
        cols = k + tl.arange(0, BLOCK_K)
        inside = (rows < vocab)[:, None] & (cols < hidden)[None, :]
        w_tile = tl.load(w + rows[:, None].to(tl.int64) * hidden + cols[None, :], inside, 0.0)
        x_part = tl.load(x + token.to(tl.int64) * hidden + cols, cols < hidden, 0.0)
        acc += tl.sum(w_tile.to(tl.float32) * x_part.to(tl.float32)[None, :], 1)
    place = token.to(tl.int64) * vocab + rows
    tl.store(scores + place, acc, mask=rows < vocab)
    if HAS_LOGITS:
        tl.store(logits + place, acc.to(logits.dtype.element_ty), mask=rows < vocab)


@triton.jit
def take_first(
    scores,  # (tokens, vocab) float32
    values,  # (tokens, TOP_K) float32
    ids,  # (tokens, TOP_K) int32
    vocab, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first TOP_K tokens of one row; each round looks for the first after the one before."""
    token = tl.program_id(0)
    row = scores + token.to(tl.int64) * vocab
    last, last_id = float("inf"), -1
    for rank in range(TOP_K):
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_ids = tl.full((BLOCK,), NO_TOKEN, tl.int32)
        for first in range(0, vocab, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            x = tl.load(row + columns, mask=columns < vocab, other=float("-inf"))
            is_left = (x < last) | ((x == last) & (columns > last_id))
            is_better = is_left & (x > best)
            best, best_ids = tl.where(is_better, x, best), tl.where(is_better, columns, best_ids)
        last = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last, best_ids, NO_TOKEN), 0)
        tl.store(values + token * TOP_K + rank, last)
        tl.store(ids + token * TOP_K + rank, last_id)


@triton.jit
def score_tile(
    x,  # (tokens, hidden)
    w,  # (vocab, hidden)
    tile_values,  # (tokens, tiles, TOP_K) float32
    tile_ids,  # (tokens, tiles, TOP_K) int32
    logits,  # (tokens, vocab), where HAS_LOGITS
    tokens, vocab, hidden, TOP_K: tl.constexpr, HAS_LOGITS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first TOP_K of BLOCK_V tokens for each of BLOCK_T rows of x.

    A tile of w is read once, and its logits stay in registers.
    """
    tile = tl.program_id(0)
    rows, cols = tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    ts = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    w_rows = w + tl.where(rows < vocab, rows, 0)[:, None].to(tl.int64) * hidden + cols[None, :]
    x_rows = x + tl.where(ts < tokens, ts, 0)[:, None].to(tl.int64) * hidden + cols[None, :]
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for k in range(0, hidden, BLOCK_K):
        inside = (cols < hidden - k)[None, :]
        w_tile = tl.load(w_rows + k, mask=inside, other=0.0)
        x_tile = tl.load(x_rows + k, mask=inside, other=0.0)
        acc = tl.dot(w_tile, x_tile.T, acc)
    if HAS_LOGITS:
        places = logits + ts[None, :].to(tl.int64) * vocab + rows[:, None]
        is_stored = (ts < tokens)[None, :] & (rows < vocab)[:, None]
        tl.store(places, acc.to(logits.dtype.element_ty), mask=is_stored)
    scores = tl.where((rows < vocab)[:, None], acc, float("-inf"))
    first = (ts.to(tl.int64) * tl.num_programs(0) + tile) * TOP_K
    for rank in range(TOP_K):
        best = tl.max(scores, 0)
        best_ids = tl.min(tl.where(scores == best[None, :], rows[:, None], NO_TOKEN), 0)
        tl.store(tile_values + first + rank, best, mask=ts < tokens)
        tl.store(tile_ids + first + rank, best_ids, mask=ts < tokens)
        scores = tl.where(rows[:, None] == best_ids[None, :], float("-inf"), scores)


@triton.jit
def merge(
    tile_values,  # (tokens, count) float32
    tile_ids,  # (tokens, count) int32
    values,  # (tokens, TOP_K) float32
    ids,  # (tokens, TOP_K) int32
    count, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first TOP_K of the tokens that the tiles found for one row, at most BLOCK."""
    token, places = tl.program_id(0), tl.arange(0, BLOCK)
    source = token.to(tl.int64) * count + places
    scores = tl.load(tile_values + source, mask=places < count, other=float("-inf"))
    found = tl.load(tile_ids + source, mask=places < count, other=NO_TOKEN)
    for rank in range(TOP_K):
        best = tl.max(scores, 0)
        best_id = tl.min(tl.where(scores == best, found, NO_TOKEN), 0)
        tl.store(values + token * TOP_K + rank, best)
        tl.store(ids + token * TOP_K + rank, best_id)
        scores = tl.where(found == best_id, float("-inf"), scores)
