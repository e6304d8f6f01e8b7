"""Tiles of tokens: their logits, the slots that they use of each expert, and ranks within a tile.

A tile is (BLOCK_T, NUM_COLS): a row a token, experts in columns as scores.py says.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.split_k import sum_splits
from kernelcat.kernels.triton.moe_route.scores import (
    expert_of,
    limit_to_groups,
    selection_scores,
    unscaled_weights,
)


@triton.jit
def load_tile(
    logits, token, num_tokens, num_experts, num_groups,
    NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr,
):  # fmt: skip
    """Logits of tokens ``token`` (BLOCK_T,) in float32: -inf in columns without an expert."""
    experts, inside = expert_of(tl.arange(0, NUM_COLS), num_groups, GROUP_SIZE, GROUP_COLS)
    rows = logits + token.to(tl.int64)[:, None] * num_experts
    mask = (token < num_tokens)[:, None] & inside[None, :]
    values = tl.load(rows + experts[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where((token < num_tokens)[:, None] | ~inside[None, :], values, 0.0)


@triton.jit
def multiply_tile(
    x, router, router_bias, partials, arrivals, tile, split, num_tokens, num_experts, num_groups,
    hidden, HAS_BIAS: tl.constexpr, NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_COLS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """A tile of x @ router^T + router_bias, and whether this program has it.

    Programs of one tile multiply every SPLIT_K-th k-block each; the last one to arrive has the sum.
    """
    token, cols = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, NUM_COLS)
    experts, inside = expert_of(cols, num_groups, GROUP_SIZE, GROUP_COLS)
    acc = tl.zeros((BLOCK_T, NUM_COLS), tl.float32)
    x_rows = x + token.to(tl.int64)[:, None] * hidden
    router_rows = router + experts.to(tl.int64)[None, :] * hidden
    for start in range(split * BLOCK_K, hidden, SPLIT_K * BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = (token < num_tokens)[:, None] & (k < hidden)[None, :]
        a = tl.load(x_rows + k[None, :], mask=a_mask, other=0.0)
        b_mask = (k < hidden)[:, None] & inside[None, :]
        b = tl.load(router_rows + k[:, None], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc, is_last = sum_splits(acc, partials, arrivals, tile, split, SPLIT_K)
    if HAS_BIAS:
        acc += tl.load(router_bias + experts, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(inside[None, :], acc, float("-inf")), is_last


@triton.jit
def score_tile(
    values, correction, num_groups, top_groups,
    SOFTMAX: tl.constexpr, CORRECTION: tl.constexpr, LIMITED: tl.constexpr,
    NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr,
):  # fmt: skip
    """Selection scores of logits ``values``, -inf outside of a token's best groups."""
    experts, inside = expert_of(tl.arange(0, NUM_COLS), num_groups, GROUP_SIZE, GROUP_COLS)
    scores = selection_scores(values, correction, experts, inside, SOFTMAX, CORRECTION)
    if LIMITED:
        scores = limit_to_groups(scores, num_groups, top_groups, GROUP_SIZE, GROUP_COLS)
    return scores


@triton.jit
def take_best(scores):
    """The best column of each row as a mask; empty where all scores are -inf. And what is left."""
    best, column = tl.max(
        scores, axis=1, return_indices=True, return_indices_tie_break_left=True
    )  # fmt: skip
    is_best = tl.arange(0, scores.shape[1])[None, :] == column[:, None]
    is_best = is_best & (best > float("-inf"))[:, None]
    return is_best, tl.where(is_best, float("-inf"), scores)


@triton.jit
def store_weights(
    weights, values, slot_of, token, top_k, scaling, SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Weights of the experts that tokens use. slot_of is a tile of slots, -1 for unused experts."""
    is_used = slot_of >= 0
    scores = unscaled_weights(values, tl.max(values, axis=1)[:, None], SOFTMAX)
    if RENORMALIZE:
        factor = scaling / (tl.sum(tl.where(is_used, scores, 0.0), axis=1) + 1e-20)
        scores = scores * factor[:, None]
    elif SOFTMAX:
        scores = scores * (scaling / tl.sum(scores, axis=1))[:, None]
    else:
        scores = scores * scaling
    tl.store(weights + token[:, None] * top_k + slot_of, scores, mask=is_used)


@triton.jit
def load_slots(expert_ids, token, num_tokens, top_k, experts):
    """The slots of expert_ids (tokens, top_k) as a tile; -1 for unused experts.

    experts is (NUM_COLS,): the expert of each column, and a number below -1 for columns without an
    expert.
    """
    slot_of = tl.full((token.shape[0], experts.shape[0]), -1, tl.int32)
    for slot in range(top_k):
        ids = tl.load(expert_ids + token * top_k + slot, mask=token < num_tokens, other=-1)
        slot_of = tl.where(experts[None, :] == ids[:, None], slot, slot_of)
    return slot_of


@triton.jit
def ranks_in_tile(is_used):
    """For each place of a tile (int32, 1 where used): used places above it in its column."""
    return tl.cumsum(is_used, axis=0) - is_used
