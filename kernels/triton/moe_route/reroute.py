"""One program reroutes assignments beyond the capacity in rounds, tile by tile, and places all.

Tiles follow one another, so that a running number of served assignments for each expert gives the
order of assignments.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.moe_route.scores import expert_of
from kernelcat.kernels.triton.moe_route.tiles import (
    load_slots,
    load_tile,
    ranks_in_tile,
    score_tile,
    store_weights,
    take_best,
)


@triton.jit
def drop(expert_ids, tokens, top_k, capacity, experts, BLOCK_T: tl.constexpr):
    """Sets ids of assignments beyond the capacity to -1.

    Returns, for each expert, the assignments that it serves, and those before the limit.
    """
    served = tl.zeros((experts.shape[0],), tl.int32)
    selected = tl.zeros((experts.shape[0],), tl.int32)
    for first in range(0, tokens, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        slot_of = load_slots(expert_ids, token, tokens, top_k, experts)
        is_used = (slot_of >= 0).to(tl.int32)
        is_refused = (slot_of >= 0) & (served[None, :] + ranks_in_tile(is_used) >= capacity)
        tl.debug_barrier()  # all ids of the tile are loaded
        tl.store(expert_ids + token[:, None] * top_k + slot_of, -1 + 0 * slot_of, mask=is_refused)
        selected += tl.sum(is_used, axis=0)
        served = tl.minimum(selected, capacity)
    return served, selected


@triton.jit
def propose(
    logits, correction, expert_ids, served, is_open, first, tokens, num_experts, top_k, num_groups,
    top_groups, capacity, experts, SOFTMAX: tl.constexpr, CORRECTION: tl.constexpr,
    LIMITED: tl.constexpr, NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_COLS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One round for one tile: ``served`` afterwards, and the number of refused proposals.

    is_open (NUM_COLS,) says which experts had room when the round began.
    """
    token = first + tl.arange(0, BLOCK_T)
    values = load_tile(
        logits, token, tokens, num_experts, num_groups, NUM_COLS, GROUP_SIZE, GROUP_COLS
    )
    scores = score_tile(
        values, correction, num_groups, top_groups, SOFTMAX, CORRECTION, LIMITED, NUM_COLS,
        GROUP_SIZE, GROUP_COLS,
    )  # fmt: skip
    slot_of = load_slots(expert_ids, token, tokens, top_k, experts)
    scores = tl.where(is_open[None, :] & (slot_of < 0), scores, float("-inf"))
    proposed = tl.full((BLOCK_T, NUM_COLS), -1, tl.int32)
    for slot in range(top_k):
        ids = tl.load(expert_ids + token * top_k + slot, mask=token < tokens, other=0)
        is_unplaced = (ids < 0)[:, None]
        is_best, left = take_best(scores)
        proposed = tl.where(is_best & is_unplaced, slot, proposed)
        scores = tl.where(is_unplaced, left, scores)
    proposes = (proposed >= 0).to(tl.int32)
    is_accepted = (proposed >= 0) & (served[None, :] + ranks_in_tile(proposes) < capacity)
    tl.debug_barrier()  # all ids of the tile are loaded
    ids = experts[None, :] + 0 * proposed
    tl.store(expert_ids + token[:, None] * top_k + proposed, ids, mask=is_accepted)
    accepted = tl.sum(is_accepted.to(tl.int32), axis=0)
    return served + accepted, tl.sum(tl.sum(proposes, axis=0) - accepted, axis=0)


@triton.jit
def place_tile(
    values, expert_ids, weights, order, position, next_place, first, tokens, top_k, scaling,
    num_served, experts, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Stores weights and maps of a tile; returns the next place of each expert in order."""
    token = first + tl.arange(0, BLOCK_T)
    slot_of = load_slots(expert_ids, token, tokens, top_k, experts)
    is_used = (slot_of >= 0).to(tl.int32)
    store_weights(weights, values, slot_of, token, top_k, scaling, SOFTMAX, RENORMALIZE)
    places, i = next_place[None, :] + ranks_in_tile(is_used), token[:, None] * top_k + slot_of
    tl.store(order + places, i, mask=slot_of >= 0)
    tl.store(position + i, places, mask=slot_of >= 0)
    for slot in range(top_k):
        assignment = token * top_k + slot
        ids = tl.load(expert_ids + assignment, mask=token < tokens, other=0)
        tl.store(position + assignment, -1, mask=ids < 0)
        tl.store(weights + assignment, 0.0, mask=ids < 0)
        tl.store(order + assignment, -1, mask=(token < tokens) & (assignment >= num_served))
    return next_place + tl.sum(is_used, axis=0)


@triton.jit
def reroute_and_place(
    logits, correction, expert_ids, weights, counts, offsets, order, position, load,
    tokens, num_experts, top_k, num_groups, top_groups, scaling, capacity,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTION: tl.constexpr,
    LIMITED: tl.constexpr, NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_COLS: tl.constexpr, LOAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """All outputs but load's old values, from the selected expert_ids. One program."""
    experts, inside = expert_of(tl.arange(0, NUM_COLS), num_groups, GROUP_SIZE, GROUP_COLS)
    column_experts = tl.where(inside, experts, -2)
    served, selected = drop(expert_ids, tokens, top_k, capacity, column_experts, BLOCK_T)
    if LOAD:
        before = tl.load(load + experts, mask=inside, other=0)
        tl.store(load + experts, before + selected, mask=inside)
    num_refused = tl.sum(selected - served, axis=0)
    while num_refused > 0:
        num_refused = 0
        is_open = inside & (served < capacity)
        tl.debug_barrier()  # all ids are stored
        for first in range(0, tokens, BLOCK_T):
            served, refused = propose(
                logits, correction, expert_ids, served, is_open, first, tokens, num_experts, top_k,
                num_groups, top_groups, capacity, column_experts, SOFTMAX, CORRECTION, LIMITED,
                NUM_COLS, GROUP_SIZE, GROUP_COLS, BLOCK_T,
            )  # fmt: skip
            num_refused += refused
    tl.debug_barrier()  # all ids are stored
    next_place, num_served = tl.cumsum(served, axis=0) - served, tl.sum(served, axis=0)
    tl.store(counts + experts, served, mask=inside)
    tl.store(offsets + experts, next_place, mask=inside)
    tl.store(offsets + num_experts, num_served)
    for first in range(0, tokens, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        values = load_tile(
            logits, token, tokens, num_experts, num_groups, NUM_COLS, GROUP_SIZE, GROUP_COLS
        )
        next_place = place_tile(
            values, expert_ids, weights, order, position, next_place, first, tokens, top_k, scaling,
            num_served, column_experts, SOFTMAX, RENORMALIZE, BLOCK_T,
        )  # fmt: skip
