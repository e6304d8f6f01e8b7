"""Triton kernel of `kv_transfer`: words of pages into the mapped caches of peers."""

import triton
import triton.language as tl


@triton.jit
def push(
    source_pages,  # (num_entries,)
    dest_ranks,  # (num_entries,), -1 for none
    dest_pages,  # (num_entries,)
    cache0, cache1, cache2, cache3, cache4, cache5, cache6, cache7,  # of words
    num_tiles, page_words, page_tiles, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK words of one cache; cache0 is this rank's, the others those of the next."""
    caches = (cache0, cache1, cache2, cache3, cache4, cache5, cache6, cache7)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = tile // page_tiles
        first = (tile - entry * page_tiles) * BLOCK
        dest_rank = tl.load(dest_ranks + entry)
        source_page = tl.load(source_pages + entry).to(tl.int64)
        dest_page = tl.load(dest_pages + entry).to(tl.int64)
        at = first + tl.arange(0, BLOCK)
        mask = at < page_words
        if dest_rank >= 0:
            words = tl.load(cache0 + source_page * page_words + at, mask=mask, other=0)
            for shift in tl.static_range(RANKS):
                if (rank + shift) % RANKS == dest_rank:
                    tl.store(caches[shift] + dest_page * page_words + at, words, mask=mask)
