"""The pages of one cache: which are in use, which hold a known block, which are free.

Each page except page 0 is in exactly one place:

    in use    at least one block table has the page
    cached    no block table has the page, but the page holds a block under its hash
    cold      as cached, and the block has been copied to host memory, or is being copied
    free      the page holds nothing that can be found

New pages are free pages first, then cold ones, then cached ones, the least recently used one first.
A page in use may have a hash too: another request whose prompt begins with the same tokens shares
the page. Without host memory (`host_cache`) no page is cold.

Page 0 is the null page. No request owns the null page. Entries of block tables that no query reads
name the null page, so every entry is a valid address, and rows that pad a CUDA graph write to it.
The null page never holds NaN: where a tile of keys begins before a window, its values have a weight
of zero, and NaN would remain NaN.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kernelcat.errors import InvalidArgument, KernelcatError

NULL_PAGE = 0
"""The page that no request owns."""


class IntegrityError(KernelcatError):
    """Pages, block tables or queues contradict one another: an error in the engine."""


class PagePool:
    """The pages of one cache, with reference counts.

    Parameters
    ----------
    num_pages : pages of the cache, the null page included; at least 2

    Raises
    ------
    InvalidArgument
        ``num_pages`` is less than 2.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InvalidArgument(f"num_pages={num_pages} must be at least 2: page 0 is reserved")
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}
        self._num_forgotten = [0] * num_pages
        self._nameless: set[int] = set()  # in use, and their blocks were forgotten

    @property
    def num_available(self) -> int:
        """Pages that `take` can return: free, cold and cached ones."""
        return self.num_spare + len(self._cached)

    @property
    def num_spare(self) -> int:
        """Pages that `take` returns first: no block is lost with them that host memory can have."""
        return len(self._free) + len(self._cold)

    @property
    def num_in_use(self) -> int:
        """Pages that at least one block table has."""
        return self.num_pages - 1 - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages that no block table has and that hold a block under its hash."""
        return len(self._cached) + len(self._cold)

    def take(self, count: int) -> list[int]:
        """``count`` pages with one reference each. The caller has seen `num_available`.

        Raises
        ------
        IntegrityError
            Fewer pages are available.
        """
        if count > self.num_available:
            raise IntegrityError(f"{count} pages were taken, {self.num_available} are available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> int:
        """The least recently used cold or cached page, which forgets its block."""
        page, _ = (self._cold or self._cached).popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        """Removes the hash of a page."""
        value = self._hashes[page]
        if value is not None:
            del self._by_hash[value]
            self._hashes[page] = None
            self._num_forgotten[page] += 1

    def cool(self, count: int) -> list[int]:
        """Makes the ``count`` least recently used cached pages cold; fewer if there are fewer."""
        pages = [page for page, _ in zip(self._cached, range(count), strict=False)]
        for page in pages:
            del self._cached[page]
            self._cold[page] = None
        return pages

    def num_forgotten(self, page: int) -> int:
        """How often ``page`` has lost a block: equal numbers mean that its block stayed."""
        return self._num_forgotten[page]

    def share(self, page: int) -> None:
        """Adds a reference to a page that `find` returned."""
        if not self._references[page]:
            del (self._cold if page in self._cold else self._cached)[page]
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes one reference of each page, in order: pages that come first are reused first.

        Raises
        ------
        IntegrityError
            A page has no reference.
        """
        for page in pages:
            if self._references[page] <= 0:
                raise IntegrityError(f"page {page} is released, and has no reference")
            self._references[page] -= 1
            if self._references[page]:
                continue
            self._nameless.discard(page)
            if self._hashes[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def find(self, value: bytes) -> int | None:
        """The page that holds the block with this hash, or None."""
        return self._by_hash.get(value)

    def publish(self, page: int, value: bytes) -> None:
        """Makes the block in ``page`` known by its hash, unless another page holds such a block."""
        if value not in self._by_hash and self._hashes[page] is None:
            self._by_hash[value] = page
            self._hashes[page] = value

    def hash_of(self, page: int) -> bytes | None:
        """The hash under which `find` returns ``page``, or None."""
        return self._hashes[page]

    def forget_blocks(self) -> None:
        """Removes all hashes, for example because a fault may have spoiled what pages hold.

        Block tables keep the pages that they have, shared ones among them.
        """
        for page in list(self._by_hash.values()):
            if self._references[page]:
                self._nameless.add(page)
            self._forget(page)
        for pages in (self._cold, self._cached):
            self._free.extend(pages)
            pages.clear()

    def faults(self, references: Mapping[int, int]) -> list[str]:
        """What contradicts the references that were counted in all block tables; [] if nothing.

        Parameters
        ----------
        references : page -> number of block tables that have the page
        """
        found = []
        for page in range(self.num_pages):
            count = references.get(page, 0)
            if self._references[page] != count:
                found.append(
                    f"page {page} counts {self._references[page]} references, tables have {count}"
                )
        used = (page for page, n in references.items() if n)
        places = [*self._free, *self._cold, *self._cached, *used]
        expected = list(range(1, self.num_pages))
        if sorted(places) != expected:
            lost = sorted(set(expected) - set(places))
            twice = sorted({page for page in places if places.count(page) > 1})
            found.append(f"pages in no place: {lost}; in two places: {twice}")
        by_page = {page: value for page, value in enumerate(self._hashes) if value is not None}
        if {value: page for page, value in by_page.items()} != self._by_hash:
            found.append("hashes of pages are not those by which pages are found")
        found += [f"free page {page} has a hash" for page in self._free if page in by_page]
        cached = (*self._cold, *self._cached)
        found += [f"cached page {page} has no hash" for page in cached if page not in by_page]
        shared = {page for page, count in references.items() if count > 1}
        for page in sorted(shared - by_page.keys() - self._nameless):
            found.append(f"shared page {page} has no hash")
        return found
