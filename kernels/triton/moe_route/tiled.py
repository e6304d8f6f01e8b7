"""Routing of tiles of tokens, in one launch, or in two: `select`, then `place`.

The arrays are those of the entry (reference/moe_route.py), and workspaces: block_counts
(tiles, NUM_COLS) is the number of assignments of each expert in each tile; earlier
(tiles, NUM_COLS) those in the tiles before; starts where an expert's assignments begin in order;
all_logits (tokens, experts) the router's product, if assignments are rerouted. With ONE_LAUNCH the
program that finishes last makes the maps of all tiles.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.moe_route.reroute import reroute_and_place
from kernelcat.kernels.triton.moe_route.scores import column_of, expert_of
from kernelcat.kernels.triton.moe_route.tiles import (
    load_tile,
    multiply_tile,
    ranks_in_tile,
    score_tile,
    store_weights,
    take_best,
)


@triton.jit
def select_tile(
    values, scores, expert_ids, weights, position, block_counts, tile, tokens, top_k, num_groups,
    scaling, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, NUM_COLS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Selects experts of a tile; stores ids, weights, counts, and ranks in the tile as position."""
    token, cols = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, NUM_COLS)
    experts, _ = expert_of(cols, num_groups, GROUP_SIZE, GROUP_COLS)
    slot_of = tl.full((BLOCK_T, NUM_COLS), -1, tl.int32)
    for slot in range(top_k):
        is_best, scores = take_best(scores)
        slot_of = tl.where(is_best & (token < tokens)[:, None], slot, slot_of)
    is_used = (slot_of >= 0).to(tl.int32)
    places = token[:, None] * top_k + slot_of
    tl.store(expert_ids + places, experts[None, :] + 0 * slot_of, mask=slot_of >= 0)
    tl.store(position + places, ranks_in_tile(is_used), mask=slot_of >= 0)
    store_weights(weights, values, slot_of, token, top_k, scaling, SOFTMAX, RENORMALIZE)
    tl.store(block_counts + tile * NUM_COLS + cols, tl.sum(is_used, axis=0))


@triton.jit
def store_counts(
    totals, counts, offsets, load, num_experts, num_groups, capacity, NUM_COLS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """Stores counts and offsets, and adds to load. totals is (NUM_COLS,), before the limit."""
    experts, inside = expert_of(tl.arange(0, NUM_COLS), num_groups, GROUP_SIZE, GROUP_COLS)
    served = tl.minimum(totals, capacity)
    tl.store(counts + experts, served, mask=inside)
    tl.store(offsets + experts, tl.cumsum(served, axis=0) - served, mask=inside)
    tl.store(offsets + num_experts, tl.sum(served, axis=0))
    if LOAD:
        before = tl.load(load + experts, mask=inside, other=0)
        tl.store(load + experts, before + totals, mask=inside)


@triton.jit
def place_assignments(
    expert_ids, weights, order, position, earlier, starts, first, end, top_k, capacity, num_served,
    GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr, NUM_COLS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Places assignments first ... end - 1, BLOCK at a time. starts is (NUM_COLS,)."""
    for block in range(first, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        mask = i < end
        expert = tl.load(expert_ids + i, mask=mask, other=0)
        column = column_of(expert, GROUP_SIZE, GROUP_COLS)
        tile = i // (BLOCK_T * top_k)
        rank = tl.load(position + i, mask=mask, other=0)
        rank += tl.load(earlier + tile * NUM_COLS + column, mask=mask, other=0)
        place = tl.load(starts + column, mask=mask, other=0) + rank
        is_served = rank < capacity
        tl.store(order + place, i, mask=mask & is_served)
        tl.store(position + i, tl.where(is_served, place, -1), mask=mask)
        tl.store(expert_ids + i, -1, mask=mask & ~is_served)
        tl.store(weights + i, 0.0, mask=mask & ~is_served)
        tl.store(order + i, -1, mask=mask & (i >= num_served))


@triton.jit
def place_all(
    expert_ids, weights, counts, offsets, order, position, load, block_counts, earlier, starts,
    tokens, num_experts, top_k, num_groups, capacity, num_tiles,
    NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """One program makes the maps of all tiles, ROWS tiles' counts at a time."""
    cols = tl.arange(0, NUM_COLS)
    totals = tl.zeros((NUM_COLS,), tl.int32)
    for first in range(0, num_tiles, ROWS):
        tile = first + tl.arange(0, ROWS)
        at = tile[:, None] * NUM_COLS + cols[None, :]
        mask = (tile < num_tiles)[:, None] & (cols >= 0)[None, :]
        block = tl.load(block_counts + at, mask=mask, other=0, cache_modifier=".cg")
        tl.store(earlier + at, totals[None, :] + tl.cumsum(block, axis=0) - block, mask=mask)
        totals += tl.sum(block, axis=0)
    store_counts(
        totals, counts, offsets, load, num_experts, num_groups, capacity, NUM_COLS, GROUP_SIZE,
        GROUP_COLS, LOAD,
    )  # fmt: skip
    served = tl.minimum(totals, capacity)
    tl.store(starts + cols, tl.cumsum(served, axis=0) - served)
    tl.debug_barrier()  # all threads store before one of them loads
    place_assignments(
        expert_ids, weights, order, position, earlier, starts, 0, tokens * top_k, top_k, capacity,
        tl.sum(served, axis=0), GROUP_SIZE, GROUP_COLS, NUM_COLS, BLOCK_T, BLOCK,
    )  # fmt: skip


@triton.jit
def select(
    logits, x, router, router_bias, correction,
    expert_ids, weights, counts, offsets, order, position, load,
    block_counts, earlier, starts, all_logits, partials, arrivals, num_finished,
    tokens, num_experts, top_k, num_groups, top_groups, scaling, hidden, capacity,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTION: tl.constexpr,
    LIMITED: tl.constexpr, NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_COLS: tl.constexpr, LOAD: tl.constexpr, PRODUCT: tl.constexpr, HAS_BIAS: tl.constexpr,
    REROUTE: tl.constexpr, ONE_LAUNCH: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile a program, or one of SPLIT_K splits of a tile's product."""
    await_previous(DEPENDENT)
    tile, split = tl.program_id(0) // SPLIT_K, tl.program_id(0) % SPLIT_K
    token, cols = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, NUM_COLS)
    num_tiles, has_tile = tl.cdiv(tokens, BLOCK_T), True
    if PRODUCT:
        values, has_tile = multiply_tile(
            x, router, router_bias, partials, arrivals, tile, split, tokens, num_experts,
            num_groups, hidden, HAS_BIAS, NUM_COLS, GROUP_SIZE, GROUP_COLS, BLOCK_T, BLOCK_K,
            SPLIT_K,
        )  # fmt: skip
    else:
        values = load_tile(
            logits, token, tokens, num_experts, num_groups, NUM_COLS, GROUP_SIZE, GROUP_COLS
        )
    if has_tile:
        if PRODUCT and REROUTE:
            experts, inside = expert_of(cols, num_groups, GROUP_SIZE, GROUP_COLS)
            rows = all_logits + token.to(tl.int64)[:, None] * num_experts
            mask = (token < tokens)[:, None] & inside[None, :]
            tl.store(rows + experts[None, :], values, mask=mask)
        scores = score_tile(
            values, correction, num_groups, top_groups, SOFTMAX, CORRECTION, LIMITED, NUM_COLS,
            GROUP_SIZE, GROUP_COLS,
        )  # fmt: skip
        select_tile(
            values, scores, expert_ids, weights, position, block_counts, tile, tokens, top_k,
            num_groups, scaling, SOFTMAX, RENORMALIZE, NUM_COLS, GROUP_SIZE, GROUP_COLS, BLOCK_T,
        )  # fmt: skip
        if ONE_LAUNCH:
            tl.debug_barrier()  # all threads store before one thread counts
            if tl.atomic_add(num_finished, 1, sem="acq_rel") == tl.maximum(num_tiles, 1) - 1:
                tl.store(num_finished, 0)
                if REROUTE:
                    reroute_and_place(
                        all_logits if PRODUCT else logits, correction, expert_ids, weights, counts,
                        offsets, order, position, load, tokens, num_experts, top_k, num_groups,
                        top_groups, scaling, capacity, SOFTMAX, RENORMALIZE, CORRECTION, LIMITED,
                        NUM_COLS, GROUP_SIZE, GROUP_COLS, LOAD, BLOCK_T,
                    )  # fmt: skip
                else:
                    place_all(
                        expert_ids, weights, counts, offsets, order, position, load, block_counts,
                        earlier, starts, tokens, num_experts, top_k, num_groups, capacity,
                        num_tiles, NUM_COLS, GROUP_SIZE, GROUP_COLS, BLOCK_T, ROWS, BLOCK, LOAD,
                    )  # fmt: skip


@triton.jit
def place(
    expert_ids, weights, counts, offsets, order, position, load, block_counts, earlier, starts,
    tokens, num_experts, top_k, num_groups, capacity,
    NUM_COLS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    """Adds up the counts of all tiles, and places the assignments of one tile. starts has a row
    (NUM_COLS,) for each program."""
    await_previous(DEPENDENT)
    tile, cols, num_tiles = tl.program_id(0), tl.arange(0, NUM_COLS), tl.num_programs(0)
    totals, before = tl.zeros((NUM_COLS,), tl.int32), tl.zeros((NUM_COLS,), tl.int32)
    for first in range(0, num_tiles, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_tiles)[:, None] & (cols >= 0)[None, :]
        at = row[:, None] * NUM_COLS + cols[None, :]
        block = tl.load(block_counts + at, mask=mask, other=0)
        totals += tl.sum(block, axis=0)
        before += tl.sum(tl.where((row < tile)[:, None], block, 0), axis=0)
    if tile == 0:
        store_counts(
            totals, counts, offsets, load, num_experts, num_groups, capacity, NUM_COLS, GROUP_SIZE,
            GROUP_COLS, LOAD,
        )  # fmt: skip
    served = tl.minimum(totals, capacity)
    tl.store(starts + tile * NUM_COLS + cols, tl.cumsum(served, axis=0) - served)
    tl.store(earlier + tile * NUM_COLS + cols, before)
    tl.debug_barrier()  # all threads store before one of them loads
    first = tile * BLOCK_T * top_k
    end = tl.minimum(first + BLOCK_T * top_k, tokens * top_k)
    place_assignments(
        expert_ids, weights, order, position, earlier, starts + tile * NUM_COLS, first, end, top_k,
        capacity, tl.sum(served, axis=0), GROUP_SIZE, GROUP_COLS, NUM_COLS, BLOCK_T, BLOCK,
    )  # fmt: skip
