"""Stream-K: which tiles of a product are dealt out by k-blocks, and what their sums cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kernelcat.catalog.implementation import ConfigValue

WAVES: tuple[ConfigValue, ...] = (1, 2)
"""Waves of tiles that are streamed, at most: what is left of all tiles after whole waves, and one
whole wave more where it is 2."""

MIN_K_BLOCKS = 4
"""K-blocks that a thread block multiplies, at least, of streamed tiles."""

_MEETING_US = 1.5
"""Two atomics and the barriers around them."""

_PARTIAL_BYTES = 80e9
"""Bytes of partial sums that one SM writes, or reads, in a second."""


@dataclass(frozen=True)
class StreamPlan:
    """The host's view of stream_k.cuh's schedule for one thread block on each of ``sms`` SMs.

    The last waves of ``num_tiles`` tiles of ``num_k`` k-blocks are streamed.
    """

    num_tiles: int
    num_k: int
    waves: int
    sms: int

    @property
    def num_whole(self) -> int:
        """Tiles that one thread block computes, in whole waves."""
        return max(self.num_tiles // self.sms - self.waves + 1, 0) * self.sms

    @property
    def num_streamed(self) -> int:
        return self.num_tiles - self.num_whole

    @property
    def num_blocks(self) -> int:
        """Thread blocks: fewer than SMs where there are few k-blocks."""
        if self.num_whole:
            return self.sms
        return max(min(self.sms, self.num_streamed * self.num_k // MIN_K_BLOCKS), 1)

    @property
    def num_streamed_k(self) -> int:
        """K-blocks of streamed tiles that the busiest thread block multiplies."""
        return ceil(self.num_streamed * self.num_k / self.num_blocks)

    @property
    def num_k_blocks(self) -> int:
        """K-blocks that the busiest thread block multiplies."""
        return self.num_streamed_k + self.num_whole // self.sms * self.num_k

    @property
    def num_sharers(self) -> int:
        """Thread blocks that share a streamed tile, at most."""
        if self.num_streamed == 0:
            return 1
        blocks, tiles = self.num_blocks, self.num_streamed
        return ceil(blocks / tiles) + (blocks % tiles > 0)

    def workspaces(self, tile_sums: int, num_consumers: int) -> dict[str, int]:
        """Partial sums and counters, in bytes, of tiles of ``tile_sums`` elements."""
        return {
            "partials": (self.num_streamed + self.num_blocks - 1) * tile_sums * 4,
            "counters": self.num_streamed * num_consumers * 4,
        }

    def addition_us(self, tile_sums: int) -> float:
        """Time of the thread block that adds up a tile of which ``tile_sums`` elements count."""
        return _MEETING_US + self.num_sharers * tile_sums * 4 / _PARTIAL_BYTES * 1e6

    def why_illegal(self) -> str | None:
        if self.num_whole and self.num_streamed * self.num_k < MIN_K_BLOCKS * self.sms:
            return (
                f"{self.num_streamed} streamed tiles of {self.num_k} k-blocks leave fewer than "
                f"{MIN_K_BLOCKS} k-blocks for each of {self.sms} thread blocks"
            )
        return None

    def why_unpromising(self) -> str | None:
        if self.num_tiles and self.num_streamed % self.sms == 0:
            return f"{self.num_streamed} streamed tiles are whole waves on {self.sms} SMs"
        if 0 < self.num_tiles < self.sms and self.waves > 1:
            return "all tiles are streamed with waves=1 already"
        return None
