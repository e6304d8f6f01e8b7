"""Pages, block tables, the prefix cache and windows; and that the proof of integrity has teeth."""

from __future__ import annotations

import pytest

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.block_hashes import extend_hashes
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.pages import NULL_PAGE, IntegrityError, PagePool

SIZE = 4


def manager(*windows, num_pages=20, **options):
    groups = [LayerGroup(f"g{i}", num_pages, window) for i, window in enumerate(windows or (0,))]
    return BlockManager(groups, SIZE, 16, **options)


def hashes_of(tokens, salt=""):
    hashes = []
    extend_hashes(hashes, tokens, SIZE, salt)
    return hashes


def opened(blocks, tokens):
    """A block table that has computed ``tokens``."""
    table = blocks.open(hashes_of(tokens), (len(tokens) - 1) // SIZE)
    assert blocks.extend(table, len(tokens))
    blocks.publish(table, len(tokens))
    blocks.check_integrity()
    return table


# ---- hashes -------------------------------------------------------------------------------------


def test_a_hash_covers_all_tokens_up_to_the_end_of_its_block():
    tokens = list(range(12))
    hashes = hashes_of(tokens)
    assert len(hashes) == 3
    for i in range(12):
        other = hashes_of([*tokens[:i], 99, *tokens[i + 1 :]])
        assert [a == b for a, b in zip(hashes, other, strict=True)] == [
            block < i // SIZE for block in range(3)
        ]


def test_partly_filled_blocks_have_no_hash_and_lists_grow():
    hashes = hashes_of(range(7))
    assert len(hashes) == 1
    extend_hashes(hashes, range(12), SIZE)
    assert hashes == hashes_of(range(12))


def test_salts_share_nothing():
    assert not set(hashes_of(range(12))) & set(hashes_of(range(12), "tenant"))


# ---- pages --------------------------------------------------------------------------------------


def test_a_pool_gives_each_page_once_and_never_the_null_page():
    pool = PagePool(6)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.num_available == 0
    with pytest.raises(IntegrityError, match="1 pages were taken, 0 are available"):
        pool.take(1)


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(InvalidArgument, match="num_pages=1 must be at least 2"):
        PagePool(1)


def test_cached_pages_are_reused_last_and_in_the_order_of_their_release():
    pool = PagePool(6)
    a, b, c, d, e = pool.take(5)
    for page in (a, b, c):
        pool.publish(page, bytes([page]))
    pool.release([b, d, a, c, e])
    assert (pool.num_cached, pool.num_available, pool.num_in_use) == (3, 5, 0)
    pool.share(b)
    pool.release([b])  # now the most recently used
    assert set(pool.take(2)) == {d, e}
    assert pool.take(3) == [a, c, b]
    assert pool.find(bytes([a])) is None


def test_a_page_is_not_released_twice():
    pool = PagePool(3)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(IntegrityError, match="has no reference"):
        pool.release(pages)


def test_blocks_can_be_forgotten():
    blocks = manager()
    running, ended = opened(blocks, range(9)), opened(blocks, range(100, 109))
    blocks.close(ended)
    blocks.pools[0].forget_blocks()
    blocks.check_integrity()
    assert blocks.num_cached_blocks(hashes_of(range(9))) == 0
    blocks.close(running)
    blocks.check_integrity()
    assert blocks.pools[0].num_cached == 0


def test_shared_blocks_can_be_forgotten():
    blocks = manager()
    first = opened(blocks, range(10))
    second = blocks.open(hashes_of(range(10)), 2)
    blocks.pools[0].forget_blocks()
    blocks.check_integrity()
    blocks.close(first)
    blocks.check_integrity()
    blocks.close(second)
    blocks.check_integrity()
    assert blocks.pools[0].num_available == blocks.pools[0].num_pages - 1


def test_a_page_that_is_shared_without_a_name_is_found():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.share(page)
    assert pool.faults({page: 2}) == [f"shared page {page} has no hash"]


# ---- sharing ------------------------------------------------------------------------------------


def test_full_blocks_are_shared_without_a_copy():
    blocks = manager()
    first = opened(blocks, range(10))
    second = blocks.open(hashes_of(range(10)), 2)
    assert second.num_blocks == 2
    assert second.pages[0, :2].tolist() == first.pages[0, :2].tolist()
    assert blocks.pools[0].num_in_use == 3
    assert blocks.extend(second, 10)
    assert second.pages[0, 2] != first.pages[0, 2]
    blocks.check_integrity()
    blocks.close(first)
    blocks.check_integrity()
    blocks.close(second)
    blocks.check_integrity()
    assert blocks.pools[0].num_in_use == 0
    assert blocks.num_cached_blocks(hashes_of(range(10))) == 2


def test_the_end_of_a_prompt_leaves_the_cache_before_its_beginning():
    blocks = manager(num_pages=6)
    blocks.close(opened(blocks, range(17)))
    other = blocks.open([], 0)
    assert blocks.extend(other, 2 * SIZE)  # one free page, one cached
    assert blocks.num_cached_blocks(hashes_of(range(17))) == 3


def test_two_cold_requests_with_equal_tokens_keep_their_own_pages():
    blocks = manager()
    tables = [blocks.open(hashes_of(range(9)), 2) for _ in range(2)]
    for table in tables:
        assert blocks.extend(table, 9)
    for table in tables:
        blocks.publish(table, 9)
    blocks.check_integrity()
    assert blocks.pools[0].num_in_use == 6
    for table in tables:
        blocks.close(table)
        blocks.check_integrity()
    assert blocks.pools[0].num_cached == 2


def test_without_prefix_cache_nothing_is_shared():
    blocks = manager(has_prefix_cache=False)
    blocks.close(opened(blocks, range(9)))
    assert blocks.num_cached_blocks(hashes_of(range(9))) == 0
    assert blocks.pools[0].num_cached == 0


def test_a_failed_extension_changes_nothing():
    blocks = manager(0, 0, num_pages=6)
    table = opened(blocks, range(8))
    blocks.pools[1].take(3)  # no page is left in group 1
    before = table.pages.copy()
    assert not blocks.extend(table, 9)
    assert (table.pages == before).all()
    assert (table.num_blocks, blocks.pools[0].num_available) == (2, 3)


# ---- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_trim_frees_exactly_the_pages_that_no_later_query_reads(window):
    for position in range(1, 30):
        blocks = manager(0, window)
        table = opened(blocks, range(position))
        blocks.trim(table, position)
        blocks.check_integrity()
        read = {max(0, t) // SIZE for t in range(position - window + 1, position)}
        row = table.pages[1, : table.num_blocks].tolist()
        # the block that the next token goes to stays too
        needed = {block for block in read | {position // SIZE} if block < table.num_blocks}
        assert {block for block, page in enumerate(row) if page != NULL_PAGE} == needed
        assert NULL_PAGE not in table.pages[0, : table.num_blocks]


def test_a_hit_needs_only_the_window_in_a_group_with_a_window():
    blocks = manager(0, 6)
    table = opened(blocks, range(17))
    window_pages = table.pages[1].tolist()
    blocks.close(table)
    pool = blocks.pools[1]
    cached = blocks.open(hashes_of(range(17)), 4)
    assert cached.num_blocks == 4
    assert cached.first_blocks == [0, 2]
    assert cached.pages[1, :4].tolist() == [NULL_PAGE, NULL_PAGE, *window_pages[2:4]]
    blocks.check_integrity()
    blocks.close(cached)
    # without block 3 in the group with the window, 3 blocks can be used, which need blocks 1 and 2
    pool._cached.move_to_end(window_pages[3], last=False)
    pool.take(len(pool._free) + 1)
    assert blocks.num_cached_blocks(hashes_of(range(17))) == 3


def test_a_hole_in_the_window_shortens_the_hit():
    blocks = manager(0, 6, num_pages=12)
    blocks.close(opened(blocks, range(33)))
    pool = blocks.pools[1]
    kept = {0, 1, 2, 4, 6}
    for block, value in enumerate(hashes_of(range(33))):
        if block not in kept:
            page = pool.find(value)
            pool._forget(page)
            del pool._cached[page]
            pool._free.append(page)
    blocks.check_integrity()
    assert blocks.num_cached_blocks(hashes_of(range(33))) == 3


def test_pages_of_a_window_do_not_grow_with_the_request():
    blocks = manager(0, 6, num_pages=17)
    table = blocks.open(hashes_of([]), 0)
    for num_tokens in range(3, 60, 3):
        assert blocks.extend(table, num_tokens)
        assert blocks.pools[1].num_in_use <= blocks.max_pages(blocks.groups[1], 3)
        blocks.trim(table, num_tokens)
        blocks.check_integrity()


def test_blocks_that_a_window_has_given_back_are_not_published():
    blocks = manager(6)
    table = blocks.open(hashes_of(range(17)), 4)
    assert blocks.extend(table, 17)
    blocks.trim(table, 17)
    blocks.publish(table, 17)
    blocks.check_integrity()
    assert [blocks.pools[0].find(value) is not None for value in table.hashes] == [
        False, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
def test_max_pages_is_the_most_that_a_chunk_needs(window, chunk):
    blocks = manager(window)
    spans = [
        (start + chunk - 1) // SIZE - max(0, start - window + 1) // SIZE + 1 for start in range(40)
    ]
    assert blocks.max_pages(blocks.groups[0], chunk) == max(spans)


# ---- the proof ----------------------------------------------------------------------------------


def leak(blocks, table):
    blocks.pools[0]._free.pop()


def count_twice(blocks, table):
    blocks.pools[0]._free.append(int(table.pages[0, 0]))


def forget_a_reference(blocks, table):
    blocks.pools[0]._references[int(table.pages[0, 0])] = 0


def keep_a_reference(blocks, table):
    blocks.pools[0]._references[blocks.pools[0]._free[0]] = 1


def drop_a_table(blocks, table):
    blocks.tables.remove(table)


def use_a_page_twice(blocks, table):
    table.pages[0, 1] = table.pages[0, 0]


def use_the_null_page(blocks, table):
    table.pages[0, 1] = NULL_PAGE


def leave_a_page_behind(blocks, table):
    table.pages[0, table.num_blocks] = 1


def publish_under_a_wrong_hash(blocks, table):
    pool, page = blocks.pools[0], int(table.pages[0, 0])
    pool._forget(page)
    pool.publish(page, b"wrong")


def lose_a_hash(blocks, table):
    blocks.pools[0]._by_hash.popitem()


def share_an_unpublished_page(blocks, table):
    other = blocks.open([], 0)
    page = int(table.pages[0, 2])
    other.pages[0, 0], other.num_blocks = page, 1
    blocks.pools[0]._references[page] += 1


@pytest.mark.parametrize(
    "plant",
    [
        leak, count_twice, forget_a_reference, keep_a_reference, drop_a_table, use_a_page_twice,
        use_the_null_page, leave_a_page_behind, publish_under_a_wrong_hash, lose_a_hash,
        share_an_unpublished_page,
    ],
)  # fmt: skip
def test_each_planted_fault_is_found(plant):
    blocks = manager()
    table = opened(blocks, range(10))
    plant(blocks, table)
    with pytest.raises(IntegrityError):
        blocks.check_integrity()


def test_a_manager_without_groups_is_refused():
    with pytest.raises(InvalidArgument, match="must not be empty"):
        BlockManager([], SIZE, 16)
