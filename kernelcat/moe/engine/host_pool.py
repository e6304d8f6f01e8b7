"""The slots of one layer group in host memory: which hold a known block, and which are free.

A *slot* is a place in host memory that holds what a page holds. Each slot is in exactly one place:

    free      the slot holds nothing
    reserved  a copy from a page is on its way; the block cannot be found yet
    stored    the slot holds a block under its hash; copies to pages may read the slot

A new block takes a free slot, or that of the least recently used stored block that nobody reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    """A slot that has a block, or waits for one; ``num_readers`` copies read the slot."""

    slot: int
    is_stored: bool = False
    num_readers: int = 0


class HostPool:
    """``num_slots`` slots for blocks of one layer group."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return len(self._entries)

    def knows(self, value: bytes) -> bool:
        """Whether a slot holds the block with this hash."""
        entry = self._entries.get(value)
        return entry is not None and entry.is_stored

    def reserve(self, value: bytes) -> int | None:
        """A slot for the block, which a copy writes now; `store` or `drop` follows.

        None if the block has a slot already, which becomes the most recently used one, or if
        every slot is reserved or read.
        """
        if value in self._entries:
            self._entries.move_to_end(value)
            return None
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._entries[value] = _Entry(slot)
        return slot

    def _evict(self) -> int | None:
        """The slot of the least recently used block that can leave."""
        for value, entry in self._entries.items():
            if entry.is_stored and not entry.num_readers:
                del self._entries[value]
                return entry.slot
        return None

    def store(self, value: bytes) -> None:
        """The copy to the reserved slot has ended: the block can be found."""
        self._entries[value].is_stored = True

    def drop(self, value: bytes) -> None:
        """The copy to the reserved slot is worthless: the slot is free."""
        self._free.append(self._entries.pop(value).slot)

    def lock(self, value: bytes) -> int:
        """The slot of a stored block, which stays until `unlock` because a copy reads it."""
        entry = self._entries[value]
        entry.num_readers += 1
        self._entries.move_to_end(value)
        return entry.slot

    def unlock(self, value: bytes) -> None:
        """A copy that read the block's slot has ended."""
        self._entries[value].num_readers -= 1

    def forget_blocks(self) -> None:
        """Frees all slots; no copy is on its way."""
        self._free.extend(entry.slot for entry in self._entries.values())
        self._entries.clear()

    def faults(self, reserved: Mapping[bytes, int], readers: Mapping[bytes, int]) -> list[str]:
        """What contradicts the copies on their way; [] if nothing.

        Parameters
        ----------
        reserved : hash -> slot that a copy writes
        readers : hash -> copies that read the block's slot
        """
        found = []
        slots = [*self._free, *(entry.slot for entry in self._entries.values())]
        if sorted(slots) != list(range(self.num_slots)):
            found.append(f"slots in no place or in two: {sorted(slots)} of {self.num_slots}")
        waiting = {v: entry.slot for v, entry in self._entries.items() if not entry.is_stored}
        if waiting != dict(reserved):
            found.append(f"slots {waiting} are reserved, copies write {dict(reserved)}")
        read = {v: entry.num_readers for v, entry in self._entries.items() if entry.num_readers}
        if read != dict(readers):
            found.append(f"slots count readers {read}, copies read {dict(readers)}")
        if any(not self.knows(value) for value in readers):
            found.append("a copy reads a slot without a block")
        return found
