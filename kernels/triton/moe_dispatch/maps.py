"""The index maps of the rows that have come: assignments sorted by expert, as grouped products take
them. A program finds the assignments of an expert in all ids, in their order."""

import triton
import triton.language as tl


@triton.jit
def make_maps(
    source_offsets, offsets, order, position, ids, numbers, counts, tokens, chunks, top_k,
    local_experts, map_programs, rank, RANKS: tl.constexpr, TOP_K: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The maps of every map_programs-th expert; programs share what belongs to no expert.

    Arguments are those of `receive` in device.py.
    """
    SIZE: tl.constexpr = CHUNK * TOP_K
    program, num_ids = tl.program_id(0), RANKS * tokens * top_k
    lane = tl.arange(0, SIZE)
    first_expert = rank * local_experts
    num_assignments, num_rows = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for expert in range(program, local_experts, map_programs):
        lower, num_assignments = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for first in range(0, num_ids, SIZE):
            others = tl.load(ids + first + lane, mask=first + lane < num_ids, other=-1)
            others = tl.where(others < 0, local_experts, others - first_expert)
            is_here = (others >= 0) & (others < local_experts)
            lower += tl.sum((is_here & (others < expert)).to(tl.int32), axis=0)
            num_assignments += tl.sum(is_here.to(tl.int32), axis=0)
        tl.store(offsets + expert, lower)
        if expert == local_experts - 1:
            tl.store(offsets + local_experts, num_assignments)
        place, num_rows = lower, tl.full([], 0, tl.int32)
        for chunk in range(0, RANKS * chunks):
            first = chunk % chunks * CHUNK
            first_token = chunk // chunks * tokens + first
            mask = lane < tl.minimum(tokens - first, CHUNK) * top_k
            others = tl.load(ids + first_token * top_k + lane, mask=mask, other=-1)
            number = tl.load(numbers + first_token + lane // top_k, mask=mask, other=-1)
            at = (num_rows + number) * top_k + lane % top_k
            found = mask & (others == first_expert + expert)
            end = tl.cumsum(found.to(tl.int32), axis=0)
            tl.store(order + place + end - 1, at, mask=found)
            tl.store(position + at, place + end - 1, mask=found)
            if expert == 0:
                is_here = (others >= first_expert) & (others < first_expert + local_experts)
                tl.store(position + at, -1, mask=(number >= 0) & ~is_here)
            place += tl.sum(found.to(tl.int32), axis=0)
            num_rows += tl.load(counts + chunk)
    for first in range(num_assignments + program * SIZE, num_ids, map_programs * SIZE):
        tl.store(order + first + lane, -1, mask=first + lane < num_ids)
    for first in range(num_rows * top_k + program * SIZE, num_ids, map_programs * SIZE):
        tl.store(position + first + lane, -1, mask=first + lane < num_ids)
    if program == 0:
        chunk = tl.arange(0, CHUNKS)
        in_chunk = tl.load(counts + chunk, mask=chunk < RANKS * chunks, other=0)
        for source in tl.static_range(RANKS + 1):
            before = tl.where(chunk < source * chunks, in_chunk, 0)
            tl.store(source_offsets + source, tl.sum(before, axis=0))
