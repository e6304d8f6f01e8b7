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
the step that wrote them has ended.

Paged caches: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023). Groups of layers follow the design of vLLM's version 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernelcat.errors import InvalidArgument
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
    """

    pages: npt.NDArray[np.int32]
    hashes: list[bytes]
    first_blocks: list[int]
    num_blocks: int = 0
    num_published: int = 0


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
        count = len(hashes)
        for group, pool in zip(self.groups, self.pools, strict=True):
            if not group.window:
                hits = (i for i in range(count) if pool.find(hashes[i]) is None)
                count = next(hits, count)
        while count:
            missing = [
                block
                for group, pool in zip(self.groups, self.pools, strict=True)
                for block in range(group.first_block(count * self.page_size, self.page_size), count)
                if pool.find(hashes[block]) is None
            ]
            if not missing:
                break
            # any count above the first missing block needs that block too
            count = min(missing)
        return count

    def open(self, hashes: list[bytes], max_cached: int) -> BlockTable:
        """A new block table that shares the longest cached prefix.

        Parameters
        ----------
        hashes : of the request's full blocks; the table keeps the list
        max_cached : blocks that may be shared at most
        """
        count = self.num_cached_blocks(hashes[:max_cached])
        shape = len(self.groups), self.table_width
        table = BlockTable(np.full(shape, NULL_PAGE, np.int32), hashes, [0] * len(self.groups))
        table.num_blocks = table.num_published = count
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            table.first_blocks[g] = group.first_block(count * self.page_size, self.page_size)
            for block in range(table.first_blocks[g], count):
                page = pool.find(hashes[block])
                assert page is not None
                pool.share(page)
                table.pages[g, block] = page
        self.tables.add(table)
        return table

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

    def has_room(self, missing: Sequence[int], chunk: int) -> bool:
        """Whether requests that lack ``missing`` pages each could all have them now.

        ``chunk`` is as in `max_pages`: a window limits what a request needs at a time.
        """
        return all(
            sum(min(count, self.max_pages(group, chunk)) for count in missing) <= pool.num_available
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

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
        self.shrink(table, 0)
        self.tables.remove(table)

    def _release(self, table: BlockTable, g: int, first: int, end: int) -> None:
        """Gives back blocks ``first`` to ``end - 1`` of group ``g``.

        The last block comes first: the beginnings of prompts stay in the cache longest.
        """
        pages = table.pages[g, first:end]
        self.pools[g].release(reversed(pages.tolist()))
        pages[:] = NULL_PAGE

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
