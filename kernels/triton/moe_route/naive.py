"""Routing without tricks: a program for each logit, one for each token, and one for all places.

The arrays are those of the entry (reference/moe_route.py). NUM_COLS and GROUP_COLS are explained in
scores.py; SLOTS is a power of two that is at least top_k.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.moe_route.scores import (
    expert_of,
    limit_to_groups,
    selection_scores,
    unscaled_weights,
)


@triton.jit
def multiply(
    x, router, router_bias, all_logits, experts, hidden, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """One logit of one token a program: all_logits is (tokens, experts) float32."""
    token, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(x + token * hidden + k, mask=k < hidden, other=0.0)
        b = tl.load(router + expert * hidden + k, mask=k < hidden, other=0.0)
        sums += a.to(tl.float32) * b.to(tl.float32)
    logit = tl.sum(sums, axis=0)
    if HAS_BIAS:
        logit += tl.load(router_bias + expert).to(tl.float32)
    tl.store(all_logits + token * experts + expert, logit)


@triton.jit
def load_token(
    logits, correction, token, num_experts, num_groups, top_groups,
    SOFTMAX: tl.constexpr, CORRECTION: tl.constexpr, LIMITED: tl.constexpr,
    NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr,
):  # fmt: skip
    """Logits and selection scores of a token, each (1, NUM_COLS)."""
    experts, inside = expert_of(tl.arange(0, NUM_COLS), num_groups, GROUP_SIZE, GROUP_COLS)
    row = logits + num_experts.to(tl.int64) * token
    values = tl.load(row + experts, mask=inside, other=float("-inf")).to(tl.float32)[None, :]
    scores = selection_scores(values, correction, experts, inside, SOFTMAX, CORRECTION)
    if LIMITED:
        scores = limit_to_groups(scores, num_groups, top_groups, GROUP_SIZE, GROUP_COLS)
    return values, scores


@triton.jit
def store_weights(
    weights, values, slot_of, token, top_k, scaling,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Weights of a token. values is (1, columns), slot_of (columns,): a column's slot or -1."""
    scores = tl.reshape(unscaled_weights(values, tl.max(values), SOFTMAX), slot_of.shape)
    if RENORMALIZE:
        scores = scores / (tl.sum(tl.where(slot_of >= 0, scores, 0.0), axis=0) + 1e-20)
    elif SOFTMAX:
        scores = scores / tl.sum(scores, axis=0)
    slots = tl.arange(0, SLOTS)
    is_slot = slot_of[None, :] == slots[:, None]
    row = tl.sum(tl.where(is_slot, scores[None, :], 0.0), axis=1) * scaling
    tl.store(weights + token * top_k + slots, row, mask=slots < top_k)


@triton.jit
def select(
    logits, correction, expert_ids, weights, num_experts, top_k, num_groups, top_groups, scaling,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTION: tl.constexpr,
    LIMITED: tl.constexpr, NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_COLS: tl.constexpr, SLOTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The experts of one token a program, and their weights."""
    await_previous(DEPENDENT)
    token, cols = tl.program_id(0), tl.arange(0, NUM_COLS)
    values, scores = load_token(
        logits, correction, token, num_experts, num_groups, top_groups, SOFTMAX, CORRECTION,
        LIMITED, NUM_COLS, GROUP_SIZE, GROUP_COLS,
    )  # fmt: skip
    scores = tl.reshape(scores, (NUM_COLS,))
    experts, _ = expert_of(cols, num_groups, GROUP_SIZE, GROUP_COLS)
    slot_of = tl.full((NUM_COLS,), -1, tl.int32)
    for slot in range(top_k):
        is_best = cols == tl.argmax(scores, axis=0, tie_break_left=True)
        slot_of = tl.where(is_best, slot, slot_of)
        scores = tl.where(is_best, float("-inf"), scores)
    ids = expert_ids + token * top_k + slot_of
    tl.store(ids, experts, mask=slot_of >= 0)
    store_weights(
        weights, values, slot_of, token, top_k, scaling, SOFTMAX, RENORMALIZE, SLOTS
    )  # fmt: skip


@triton.jit
def place(
    logits, correction, expert_ids, weights, counts, offsets, order, position, load,
    tokens, num_experts, top_k, num_groups, top_groups, scaling, capacity,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTION: tl.constexpr,
    LIMITED: tl.constexpr, NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_COLS: tl.constexpr, SLOTS: tl.constexpr, REROUTE: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """One program goes over all tokens in order: once to count, and once to place."""
    cols, slots = tl.arange(0, NUM_COLS), tl.arange(0, SLOTS)
    experts, inside = expert_of(cols, num_groups, GROUP_SIZE, GROUP_COLS)
    served, selected = tl.zeros((NUM_COLS,), tl.int32), tl.zeros((NUM_COLS,), tl.int32)
    num_unplaced = 0
    for token in range(tokens):
        row = token * top_k + slots
        ids = tl.load(expert_ids + row, mask=slots < top_k, other=-1)
        is_used = ids[:, None] == tl.where(inside, experts, -2)[None, :]  # (SLOTS, NUM_COLS)
        uses = tl.max(is_used.to(tl.int32), axis=0)
        is_served = tl.max((is_used & (served < capacity)[None, :]).to(tl.int32), axis=1)
        tl.store(expert_ids + row, -1, mask=(slots < top_k) & (is_served == 0))
        tl.store(weights + row, 0.0, mask=(slots < top_k) & (is_served == 0))
        num_unplaced += top_k - tl.sum(is_served, axis=0)
        selected += uses
        served = tl.minimum(served + uses, capacity)
    if LOAD:
        before = tl.load(load + experts, mask=inside, other=0)
        tl.store(load + experts, before + selected, mask=inside)
    if REROUTE:
        while num_unplaced > 0:
            tl.debug_barrier()
            is_open = inside & (served < capacity)  # when the round began
            num_unplaced = 0
            for token in range(tokens):
                values, scores = load_token(
                    logits, correction, token, num_experts, num_groups, top_groups, SOFTMAX,
                    CORRECTION, LIMITED, NUM_COLS, GROUP_SIZE, GROUP_COLS,
                )  # fmt: skip
                scores = tl.reshape(scores, (NUM_COLS,))
                row = expert_ids + token * top_k
                ids = tl.load(row + slots, mask=slots < top_k, other=-1)
                is_used = tl.max((ids[:, None] == experts[None, :]).to(tl.int32), axis=0) > 0
                scores = tl.where(is_open & ~is_used, scores, float("-inf"))
                for slot in range(top_k):
                    is_placed = tl.sum(tl.where(slots == slot, ids, 0), axis=0) >= 0
                    if (not is_placed) & (tl.max(scores, axis=0) > float("-inf")):
                        is_best = cols == tl.argmax(scores, axis=0, tie_break_left=True)
                        accepted = is_best & (served < capacity)
                        tl.store(row + slot + 0 * cols, experts, mask=accepted)
                        served += accepted.to(tl.int32)
                        scores = tl.where(is_best, float("-inf"), scores)
                        num_unplaced += 1 - tl.sum(accepted.to(tl.int32), axis=0)
        tl.debug_barrier()
        for token in range(tokens):
            values, scores = load_token(
                logits, correction, token, num_experts, num_groups, top_groups, SOFTMAX,
                CORRECTION, LIMITED, NUM_COLS, GROUP_SIZE, GROUP_COLS,
            )  # fmt: skip
            row = expert_ids + token * top_k
            ids = tl.load(row + slots, mask=slots < top_k, other=-1)
            is_used = ids[:, None] == tl.where(inside, experts, -2)[None, :]
            slot_of = tl.max(tl.where(is_used, slots[:, None], -1), axis=0)
            store_weights(
                weights, values, slot_of, token, top_k, scaling, SOFTMAX, RENORMALIZE, SLOTS
            )  # fmt: skip
    tl.debug_barrier()
    starts = tl.cumsum(served, axis=0) - served
    tl.store(counts + experts, served, mask=inside)
    tl.store(offsets + experts, starts, mask=inside)
    num_served = tl.sum(served, axis=0)
    tl.store(offsets + num_experts, num_served)
    for token in range(tokens):
        row = token * top_k + slots
        ids = tl.load(expert_ids + row, mask=slots < top_k, other=-1)
        is_used = ids[:, None] == tl.where(inside, experts, -2)[None, :]
        places = tl.max(tl.where(is_used, starts[None, :], -1), axis=1)
        tl.store(order + places, row, mask=places >= 0)
        tl.store(position + row, places, mask=slots < top_k)
        tl.store(order + row, -1, mask=(slots < top_k) & (row >= num_served))
        starts += tl.max(is_used.to(tl.int32), axis=0)
