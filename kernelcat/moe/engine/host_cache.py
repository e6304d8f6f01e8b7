"""Blocks in host memory: which pages are copied there, and which blocks are fetched from there.

The prefix cache of the device forgets blocks when their pages are reused. With host memory the
pages that will be reused next are copied there *before* somebody needs them (*offload*), as an
operating system writes dirty pages back: a step never waits for the copy. `reserve` pages are free
or cold at any time, if the copies keep up; a page that is needed while its copy runs is taken all
the same, and the copy counts for nothing.

A request whose prefix continues in host memory takes pages for the blocks, and runs when they have
arrived (*fetch*). Steps of other requests run meanwhile. Blocks that arrive are published like
blocks that a step has written.

A *transfer* holds no page. A table that is closed while its blocks arrive abandons the transfer,
whose pages may then get another owner: the step that is launched next must start after the
transfer's end. Slots stay as long as a transfer writes or reads them.

Not thread-safe: the scheduler's thread owns everything here.

Offload of the prefix cache follows the idea of LMCache and vLLM's KV connectors; writing back ahead
of reuse is that of operating systems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelcat.moe.engine.fetch_policy import FetchPolicy
from kernelcat.moe.engine.host_pool import HostPool
from kernelcat.moe.engine.pages import PagePool

OFFLOAD_PAGES = 64
"""Pages of each layer group in one transfer to host memory, at most."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block that is in ``page`` of layer group ``group`` and in ``slot`` of the group's slots.

    ``num_forgotten`` is the page's, when the move was planned.
    """

    group: int
    page: int
    slot: int
    hash: bytes
    num_forgotten: int = 0


@dataclass(eq=False)
class Transfer:
    """Blocks that are copied together.

    Attributes
    ----------
    moves : the blocks, in any order
    is_fetch : from host memory to pages; else from pages to host memory
    num_tokens : tokens that a fetch saves a request
    is_abandoned : the fetch's pages may have another owner
    has_ended : the copies have ended, and everybody knows it
    """

    moves: list[Move]
    is_fetch: bool
    num_tokens: int = 0
    is_abandoned: bool = False
    has_ended: bool = False


class HostCache:
    """Plans transfers between the pages of all layer groups and slots of host memory.

    Parameters
    ----------
    pools : the pages of each group
    num_slots : slots of each group
    page_bytes : bytes of a page of each group
    reserve : pages of each group that shall be free or cold
    policy : whether a prefix is fetched

    Attributes
    ----------
    slots : the slots of each group
    planned : transfers that must be started, in this order
    started : transfers that have not ended
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        num_slots: int,
        page_bytes: Sequence[int],
        reserve: Sequence[int],
        policy: FetchPolicy,
    ) -> None:
        self.pools, self.page_bytes, self.reserve = pools, page_bytes, reserve
        self.policy = policy
        self.slots = [HostPool(num_slots) for _ in pools]
        self.planned: list[Transfer] = []
        self.started: list[Transfer] = []
        self._totals: Counter[str] = Counter()
        self._arriving: set[tuple[int, bytes]] = set()

    def knows(self, group: int, value: bytes) -> bool:
        """Whether host memory has the block of ``group`` with this hash."""
        return self.slots[group].knows(value)

    def is_arriving(self, group: int, value: bytes) -> bool:
        """Whether a fetch brings the block, which then can be shared."""
        return (group, value) in self._arriving

    # ---- planning -------------------------------------------------------------------------------

    def is_worth(self, num_tokens: int, groups: Sequence[int]) -> bool:
        """Whether a request shall wait for one block of each of ``groups``, to save tokens."""
        before = (t.moves for t in (*self.planned, *self.started) if t.is_fetch)
        ahead = (move.group for moves in before for move in moves)
        num_bytes = sum(self.page_bytes[g] for g in (*groups, *ahead))
        return self.policy.is_worth(num_tokens, num_bytes)

    def fetch(self, blocks: Sequence[tuple[int, int, bytes]], num_tokens: int) -> Transfer:
        """Plans to copy blocks (group, page, hash), which host memory has, to their pages."""
        moves = [Move(g, page, self.slots[g].lock(value), value) for g, page, value in blocks]
        self._arriving.update((move.group, move.hash) for move in moves)
        transfer = Transfer(moves, True, num_tokens)
        self.planned.append(transfer)
        return transfer

    def abandon(self, transfer: Transfer) -> None:
        """The table that waits for a fetch is closed."""
        transfer.is_abandoned = True
        self._arriving.difference_update((move.group, move.hash) for move in transfer.moves)

    def plan_offload(self) -> None:
        """Plans to copy the pages that are reused next, until `reserve` are free or cold."""
        moves = []
        for g, (pool, slots) in enumerate(zip(self.pools, self.slots, strict=True)):
            missing = self.reserve[g] - pool.num_spare
            for page in pool.cool(min(max(missing, 0), OFFLOAD_PAGES)):
                value = pool.hash_of(page)
                assert value is not None
                slot = slots.reserve(value)
                if slot is not None:
                    moves.append(Move(g, page, slot, value, pool.num_forgotten(page)))
        if moves:
            self.planned.append(Transfer(moves, False))

    def start(self) -> list[Transfer]:
        """The transfers that were planned, which the caller starts before the next step."""
        transfers, self.planned = self.planned, []
        self.started += transfers
        return transfers

    # ---- results --------------------------------------------------------------------------------

    def end(self, transfer: Transfer) -> None:
        """The copies of a transfer have ended."""
        self.started.remove(transfer)
        transfer.has_ended = True
        if not transfer.is_fetch:
            self._end_offload(transfer)
            return
        for move in transfer.moves:
            self.slots[move.group].unlock(move.hash)
            if not transfer.is_abandoned:
                self.pools[move.group].publish(move.page, move.hash)
                self._arriving.discard((move.group, move.hash))
        self._count("fetched", transfer.moves)
        if not transfer.is_abandoned:
            self._totals["fetched_tokens_total"] += transfer.num_tokens

    def _end_offload(self, transfer: Transfer) -> None:
        """Blocks can be found in host memory, but for those whose pages were taken meanwhile."""
        stored = []
        for move in transfer.moves:
            if self.pools[move.group].num_forgotten(move.page) == move.num_forgotten:
                self.slots[move.group].store(move.hash)
                stored.append(move)
            else:
                self.slots[move.group].drop(move.hash)
        self._count("offloaded", stored)

    def _count(self, what: str, moves: Sequence[Move]) -> None:
        self._totals[f"{what}_pages_total"] += len(moves)
        self._totals[f"{what}_bytes_total"] += sum(self.page_bytes[move.group] for move in moves)

    def numbers(self) -> dict[str, Any]:
        """Values of `statistics.Statistics` by name."""
        return {
            **self._totals,
            "host_pages": sum(slots.num_slots for slots in self.slots),
            "host_pages_in_use": sum(slots.num_used for slots in self.slots),
            "host_bandwidth": self.policy.bandwidth,
        }

    def forget_blocks(self) -> None:
        """Forgets all blocks; no transfer is on its way."""
        for slots in self.slots:
            slots.forget_blocks()

    # ---- proof ----------------------------------------------------------------------------------

    def faults(self, waited_for: Sequence[Transfer]) -> list[str]:
        """What contradicts the fetches that block tables wait for; [] if nothing."""
        transfers = (*self.planned, *self.started)
        fetches = [t for t in transfers if t.is_fetch and not t.is_abandoned]
        found = []
        if len(fetches) != len(waited_for) or set(fetches) != set(waited_for):
            found.append("block tables do not wait for the fetches that are on their way")
        arriving = [(move.group, move.hash) for fetch in fetches for move in fetch.moves]
        if len(set(arriving)) != len(arriving) or set(arriving) != self._arriving:
            found.append("blocks that arrive are not those of the fetches, or arrive twice")
        for g, slots in enumerate(self.slots):
            moves = [(t.is_fetch, move) for t in transfers for move in t.moves if move.group == g]
            reserved = {move.hash: move.slot for is_fetch, move in moves if not is_fetch}
            readers = Counter(move.hash for is_fetch, move in moves if is_fetch)
            found += [f"slots of group {g}: {fault}" for fault in slots.faults(reserved, readers)]
        for move in (move for fetch in fetches for move in fetch.moves):
            if self.pools[move.group].hash_of(move.page) is not None:
                found.append(f"page {move.page} of group {move.group} is known before it arrives")
        return found
