"""Which rank gets a request: the one with the fewest, or one that has the prompt's beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kernelcat.moe.engine.block_hashes import extend_hashes

MAX_LEAD = 4
"""Requests that a rank may have more than the one with the fewest, and get another one whose
prefix it has."""
MAX_BLOCKS = 1 << 16
"""Blocks of tokens that the router remembers of each rank."""


class Router:
    """Chooses among ranks that run requests of their own. Not thread-safe.

    A rank is taken to cache the full blocks of all prompts that it has got, the latest
    `MAX_BLOCKS`. A rank that has lost them computes them again: only time is lost.

    Parameters
    ----------
    ranks : how many there are
    page_size : tokens of a block

    Attributes
    ----------
    num_running : requests of each rank that have not ended
    """

    def __init__(self, ranks: int, page_size: int) -> None:
        self.num_running = [0] * ranks
        self._page_size = page_size
        self._blocks: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(ranks)]

    def start(self, prompt: Sequence[int], salt: str = "") -> int:
        """The rank that gets a request; `end` says when the request has ended.

        The rank with the most blocks of the prompt, unless it is `MAX_LEAD` requests ahead of the
        one with the fewest; of equal ones the one with the fewest requests.
        """
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, self._page_size, salt)
        fewest = min(self.num_running)
        rank = max(
            (rank for rank, count in enumerate(self.num_running) if count <= fewest + MAX_LEAD),
            key=lambda rank: (self._num_known(rank, hashes), -self.num_running[rank]),
        )
        self.num_running[rank] += 1
        blocks = self._blocks[rank]
        for block in hashes:
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > MAX_BLOCKS:
            blocks.popitem(last=False)
        return rank

    def end(self, rank: int) -> None:
        """A request of ``rank`` has ended."""
        self.num_running[rank] -= 1

    def _num_known(self, rank: int, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks the rank has got before."""
        known = self._blocks[rank]
        return next((i for i, block in enumerate(hashes) if block not in known), len(hashes))
