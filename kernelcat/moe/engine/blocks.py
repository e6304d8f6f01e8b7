"""Blocks of tokens and the pages that hold them.

A *block* is ``page_size`` consecutive tokens of a request, the last block may be partly filled. A
*page* is a place in the cache that holds a block. A request's *block table* says which page holds
which block: the key and the value of token t are in page ``table[t // page_size]``, slot
``t % page_size``.

Layers with the same window form a *layer group* with pages and block tables of its own. A group
with a window gives back pages as soon as no later query can read them, so a long request keeps few
of them. gpt-oss has two groups: every other layer has a window of 128 tokens.

Requests whose prompts begin with the same tokens share the pages of full blocks, which are found by
their hashes (`block_hashes`). A shared page is never written: only full blocks are published, after
the step that wrote them has ended. Blocks whose pages were reused may be in host memory
(`host_cache`): a table then has pages into which they are copied.

Paged caches: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023). Groups of layers follow the design of vLLM's version 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.host_cache import HostCache, Transfer
from kernelcat.moe.engine.pages import NULL_PAGE, IntegrityError, PagePool


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block tables.

    Attributes
    ----------
    name : for messages
    num_pages : pages of the group's caches, the null page included
    window : a query reads at most this many tokens, its own included; 0 for no limit
    """

    name: str
    num_pages: int
    window: int = 0

    def first_block(self, position: int, page_size: int) -> int:
        """The first block that a query at ``position`` or later can read."""
        return max(0, position + 1 - self.window) // page_size if self.window else 0


@dataclass(eq=False)
class BlockTable:
    """The pages of one request.

    Attributes
    ----------
    pages : int32 (groups, table_width); row g is the block table of layer group g
    hashes : hashes of the request's full blocks, a list that the request extends
    first_blocks : for each group the first block that has a page; earlier ones have the null page
    num_blocks : blocks that have a page, those that a window gave back included
    num_published : leading blocks that have been published, or were found in the cache
    in_host : (group, block) of blocks that `BlockManager.fetch` shall bring from host memory
    num_saved : tokens that they save
    transfer : the fetch that brings them
    """

    pages: npt.NDArray[np.int32]
    hashes: list[bytes]
    first_blocks: list[int]
    num_blocks: int = 0
    num_published: int = 0
    in_host: list[tuple[int, int]] = field(default_factory=list)
    num_saved: int = 0
    transfer: Transfer | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether blocks are on their way from host memory: no step may use the table yet."""
        return self.transfer is not None and not self.transfer.has_ended


class BlockManager:
    """Block tables of all running requests, over the pages of all layer groups.

    Parameters
    ----------
    groups : the model's layer groups, in the order of the first axis of `BlockTable.pages`
    page_size : tokens of a page, equal in all groups
    table_width : blocks that a request may have
    has_prefix_cache : whether requests share pages of equal blocks

    Attributes
    ----------
    pools : the pages of each group
    tables : block tables that are open
    host : blocks in host memory; None where there are none

    Raises
    ------
    InvalidArgument
        There is no group, or a size is not positive.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        page_size: int,
        table_width: int,
        has_prefix_cache: bool = True,
    ) -> None:
        if not groups or page_size < 1 or table_width < 1:
            raise InvalidArgument(
                f"groups={list(groups)}, page_size={page_size} and table_width={table_width} "
                "must not be empty or zero"
            )
        self.groups = tuple(groups)
        self.page_size = page_size
        self.table_width = table_width
        self.has_prefix_cache = has_prefix_cache
        self.pools = [PagePool(group.num_pages) for group in groups]
        self.tables: set[BlockTable] = set()
        self.host: HostCache | None = None

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.page_size)

    @property
    def max_tokens(self) -> int:
        """Tokens that the caches hold of one request that has all pages."""
        room = (group.num_pages - 1 for group in self.groups if not group.window)
        return min([self.table_width, *room]) * self.page_size

    def max_pages(self, group: LayerGroup, chunk: int) -> int:
        """Pages that a request has in ``group`` at most while ``chunk`` new tokens are written."""
        if not group.window:
            return self.table_width
        # tokens that span the most pages begin in the last slot of a page
        return min(self.table_width, self.blocks_of(group.window - 1 + chunk - 1) + 1)

    # ---- the prefix cache -----------------------------------------------------------------------

    def num_cached_blocks(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks whose keys and values a request can take from the cache.

        A group without a window needs all these blocks. A group with a window needs those that the
        first query after them reads.
        """
        if not self.has_prefix_cache:
            return 0
        return self._num_leading(hashes, self._has_page)

    def _has_page(self, g: int, value: bytes) -> bool:
        return self.pools[g].find(value) is not None

    def _num_leading(self, hashes: Sequence[bytes], has: Callable[[int, bytes], bool]) -> int:
        """Leading blocks that can be used, where ``has(g, hash)`` tells what group g has."""
        count = len(hashes)
        for g, group in enumerate(self.groups):
            if not group.window:
                misses = (i for i in range(count) if not has(g, hashes[i]))
                count = next(misses, count)
        while count:
            missing = [b for g, b in self._needed(count) if not has(g, hashes[b])]
            if not missing:
                break
            # any count above the first missing block needs that block too
            count = min(missing)
        return count

    def _needed(self, count: int) -> list[tuple[int, int]]:
        """(group, block) of all that a request with ``count`` leading blocks reads later."""
        return [
            (g, block)
            for g, group in enumerate(self.groups)
            for block in range(group.first_block(count * self.page_size, self.page_size), count)
        ]

    def open(self, hashes: list[bytes], max_cached: int) -> BlockTable:
        """A new block table that shares the longest cached prefix.

        With host memory the prefix may be longer: then `fetch` follows, before any other call.

        Parameters
        ----------
        hashes : of the request's full blocks; the table keeps the list
        max_cached : blocks that may be shared at most
        """
        num_cached = self.num_cached_blocks(hashes[:max_cached])
        count = self._num_with_host(hashes[:max_cached], num_cached)
        shape = len(self.groups), self.table_width
        table = BlockTable(np.full(shape, NULL_PAGE, np.int32), hashes, [0] * len(self.groups))
        table.num_blocks = table.num_published = count
        table.num_saved = (count - num_cached) * self.page_size
        for g, group in enumerate(self.groups):
            table.first_blocks[g] = group.first_block(count * self.page_size, self.page_size)
        for g, block in self._needed(count):
            page = self.pools[g].find(hashes[block])
            if page is None:
                table.in_host.append((g, block))
            else:
                self.pools[g].share(page)
                table.pages[g, block] = page
        self.tables.add(table)
        return table

    def _num_with_host(self, hashes: Sequence[bytes], num_cached: int) -> int:
        """Leading blocks to take from pages and host memory; ``num_cached`` are in pages."""
        host = self.host
        if host is None or num_cached == len(hashes):
            return num_cached
        count = self._num_leading(hashes, lambda g, v: self._has_page(g, v) or host.knows(g, v))
        missing = [(g, b) for g, b in self._needed(count) if not self._has_page(g, hashes[b])]
        copied = [g for g, b in missing if not host.is_arriving(g, hashes[b])]
        num_tokens = (count - num_cached) * self.page_size
        return count if host.is_worth(num_tokens, copied) else num_cached

    def fetch(self, table: BlockTable) -> bool:
        """Gives ``table`` pages for the blocks that it has in host memory, and plans the copies.

        False, and nothing has changed, if a group lacks pages, or if a fetch of another request
        brings one of the blocks: it can be shared soon.
        """
        if not table.in_host:
            return True
        assert self.host is not None
        counts = self.num_in_host(table)
        if any(n > pool.num_available for n, pool in zip(counts, self.pools, strict=True)):
            return False
        if any(self.host.is_arriving(g, table.hashes[b]) for g, b in table.in_host):
            return False
        blocks = []
        for g, block in table.in_host:
            [page] = self.pools[g].take(1)
            table.pages[g, block] = page
            blocks.append((g, page, table.hashes[block]))
        table.in_host = []
        table.transfer = self.host.fetch(blocks, table.num_saved)
        return True

    def num_in_host(self, table: BlockTable) -> list[int]:
        """Pages of each group that `fetch` would take."""
        counts = Counter(g for g, _ in table.in_host)
        return [counts[g] for g in range(len(self.groups))]

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Makes the full blocks of the first ``num_tokens`` tokens known to other requests.

        The step that wrote their keys and values has ended, and ``table.hashes`` has their hashes.
        """
        count = num_tokens // self.page_size
        if not self.has_prefix_cache or count <= table.num_published:
            return
        for g, pool in enumerate(self.pools):
            for block in range(max(table.num_published, table.first_blocks[g]), count):
                pool.publish(int(table.pages[g, block]), table.hashes[block])
        table.num_published = count

    # ---- pages ----------------------------------------------------------------------------------

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """Pages that ``table`` lacks, in each group, for its first ``num_tokens`` tokens."""
        return max(0, self.blocks_of(num_tokens) - table.num_blocks)

    def has_room(self, missing: Sequence[int], chunk: int, in_host: Sequence[int]) -> bool:
        """Whether requests that lack ``missing`` pages each could all have them now.

        ``chunk`` is as in `max_pages`: a window limits what a request needs at a time. The first
        request also needs ``in_host`` pages of each group, for blocks in host memory.
        """
        first, *others = missing
        for group, pool, more in zip(self.groups, self.pools, in_host, strict=True):
            most = self.max_pages(group, chunk)
            if sum(min(count, most) for count in (first + more, *others)) > pool.num_available:
                return False
        return True

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Gives ``table`` pages for its first ``num_tokens`` tokens; False if a group lacks them.

        Nothing has changed where the result is False.
        """
        count = self.num_missing(table, num_tokens)
        if not count:
            return True
        if any(pool.num_available < count for pool in self.pools):
            return False
        end = table.num_blocks + count
        for g, pool in enumerate(self.pools):
            table.pages[g, table.num_blocks : end] = pool.take(count)
        table.num_blocks = end
        return True

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """As `extend`, but for the tokens that a query at ``num_tokens`` or later can read."""
        self.trim(table, num_tokens)
        end = self.blocks_of(num_tokens)
        firsts = [
            max(table.num_blocks, min(group.first_block(num_tokens, self.page_size), end))
            for group in self.groups
        ]
        pools = list(zip(self.pools, firsts, strict=True))
        if any(pool.num_available < end - first for pool, first in pools):
            return False
        for g, (pool, first) in enumerate(pools):
            table.pages[g, first:end] = pool.take(max(end - first, 0))
            if first > table.num_blocks:
                table.first_blocks[g] = first
        table.num_blocks = max(table.num_blocks, end)
        return True

    def trim(self, table: BlockTable, position: int) -> None:
        """Gives back the pages that no query at ``position`` or later can read."""
        for g, group in enumerate(self.groups):
            if not group.window:
                continue
            first = min(group.first_block(position, self.page_size), table.num_blocks)
            if first > table.first_blocks[g]:
                self._release(table, g, table.first_blocks[g], first)
                table.first_blocks[g] = first

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Gives back the pages after those of the first ``num_tokens`` tokens."""
        count = self.blocks_of(num_tokens)
        if count < table.num_blocks:
            for g in range(len(self.groups)):
                self._release(table, g, max(count, table.first_blocks[g]), table.num_blocks)
            table.num_blocks = count

    def close(self, table: BlockTable) -> None:
        """Gives back all pages of ``table``; published blocks stay in the cache."""
        if self.host is not None and table.transfer is not None and table.is_arriving:
            self.host.abandon(table.transfer)
        self.shrink(table, 0)
        self.tables.remove(table)

    def _release(self, table: BlockTable, g: int, first: int, end: int) -> None:
        """Gives back blocks ``first`` to ``end - 1`` of group ``g``.

        The last block comes first: the beginnings of prompts stay in the cache longest.
        """
        pages = table.pages[g, first:end]
        # blocks in host memory that nobody fetched have no page
        self.pools[g].release(page for page in pages[::-1].tolist() if page != NULL_PAGE)
        pages[:] = NULL_PAGE

    def forget_blocks(self) -> None:
        """Forgets all blocks, because a fault may have spoiled them; no transfer is on its way."""
        for pool in self.pools:
            pool.forget_blocks()
        if self.host is not None:
            self.host.forget_blocks()

    # ---- proof ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Counts all references anew and compares them with what the pools say.

        Raises
        ------
        IntegrityError
            A page leaks, is in two places, is shared without a hash or under another hash, or an
            entry of a block table is not valid.
        """
        faults = []
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            references: Counter[int] = Counter()
            for table in self.tables:
                faults += self._table_faults(table, g)
                references.update(table.pages[g, table.first_blocks[g] : table.num_blocks].tolist())
            faults += [f"group {group.name}: {fault}" for fault in pool.faults(references)]
        if self.host is not None:
            transfers = (table.transfer for table in self.tables if table.is_arriving)
            faults += self.host.faults([each for each in transfers if each is not None])
        if faults:
            raise IntegrityError("; ".join(faults))

    def _table_faults(self, table: BlockTable, g: int) -> list[str]:
        """What is wrong with the row of group ``g``."""
        first, end, pool = table.first_blocks[g], table.num_blocks, self.pools[g]
        row = table.pages[g].tolist()
        found = []
        if any(page != NULL_PAGE for page in row[:first] + row[end:]):
            found.append(f"{row}: only blocks {first} to {end - 1} may have pages")
        if len(set(row[first:end])) != end - first:
            found.append(f"{row}: a page is there twice")
        for block, page in enumerate(row[first:end], first):
            if not NULL_PAGE < page < pool.num_pages:
                found.append(f"block {block} has page {page} of {pool.num_pages}")
            elif (known := pool.hash_of(page)) and table.hashes[block : block + 1] != [known]:
                found.append(f"block {block} has page {page}, which holds another block")
        return found
