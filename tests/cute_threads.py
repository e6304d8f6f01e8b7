"""Launches of CuTe kernels on the host: clusters of thread blocks, on top of ``cute_host``.

The threads of a cluster take turns. A thread runs until it has to wait for others: at a barrier, or
at an instruction of its warp. Shared memory begins as garbage. A barrier that not all threads reach
is an error, and so are lanes that execute different instructions of their warp. The limits: one
order of turns, and no memory order.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from cute_host import STORAGE, Pointer, Tensor, Value, cute, cutlass, here, size

LANES = 32


class Turns:
    """Whose turn it is, of the threads of a cluster: of those that can run, the one that is first.

    ``places`` are the threads' thread blocks and numbers. Some thread blocks, and some warps of a
    thread block, come before all others, so they run ahead as far as barriers allow.
    """

    def __init__(self, places: list[tuple[int, int]], body: Callable[..., None], seed: int) -> None:
        draw = random.Random(seed).sample
        order = {key: draw(range(1024), 1024) for key in ("block", "warp", "thread")}
        self.keys = [
            (order["block"][rank], order["warp"][tidx // LANES], order["thread"][tidx])
            for rank, tidx in places
        ]
        self.ready = [(key, number) for number, key in enumerate(self.keys)]
        heapq.heapify(self.ready)
        self.locks = [threading.Lock() for _ in places]
        self.stopped = set(range(len(places)))  # threads that wait for their locks
        self.failure: Exception | None = None
        self.threads = [
            threading.Thread(target=self._run, args=(number, body, place))
            for number, place in enumerate(places)
        ]

    def run(self) -> None:
        for lock in self.locks:
            lock.acquire()
        for thread in self.threads:
            thread.start()
        self._pass_on()
        for thread in self.threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self, number: int, body: Callable[..., None], place: tuple[int, int]) -> None:
        here.number = number
        try:
            self._take(number)
            body(*place)
            self._pass_on()
        except Exception as error:
            self._fail(error)

    def _take(self, number: int) -> None:
        self.locks[number].acquire()
        if self.failure is not None:
            raise self.failure

    def _pass_on(self) -> None:
        if self.ready:
            number = heapq.heappop(self.ready)[1]
            self.stopped.remove(number)
            self.locks[number].release()
        elif self.stopped:
            self._fail(RuntimeError("all threads wait: some have not reached a barrier"))

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            for number in self.stopped:
                self.locks[number].release()

    def stop(self) -> None:
        """Waits until this thread is made ready, and has its turn."""
        self.stopped.add(here.number)
        self._pass_on()
        self._take(here.number)

    def make_ready(self, numbers: list[int]) -> None:
        for number in numbers:
            heapq.heappush(self.ready, (self.keys[number], number))


class Meeting:
    """Where ``size`` threads exchange values, again and again."""

    def __init__(self, size: int, turns: Turns) -> None:
        self.size, self.turns, self.number = size, turns, 0
        self.values: dict[int, Any] = {}
        self.waiting: list[int] = []
        self.result: Any = None

    def arrive(self, place: int, value: Any, combine: Callable[[list[Any]], Any] = list) -> int:
        """The number of this meeting, which ``wait`` takes. The last one to arrive combines."""
        number = self.number
        assert place not in self.values
        self.values[place] = value
        if len(self.values) == self.size:
            self.result = combine([self.values[i] for i in sorted(self.values)])
            self.values, self.number = {}, number + 1
            self.turns.make_ready(self.waiting)
            self.waiting = []
        return number

    def wait(self, number: int) -> Any:
        if self.number == number:
            self.waiting.append(here.number)
            self.turns.stop()
        return self.result

    def exchange(self, name: str, value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
        """What ``combine`` makes of the values of all lanes, for an instruction of a warp."""

        def check(found: list[Any]) -> Any:
            assert {other for other, _ in found} == {name}, found
            return combine([each for _, each in found])

        return self.wait(self.arrive(here.lane, (name, value), check))


class Block:
    """A thread block: its shared memory and its meetings."""

    def __init__(self, rank: int, index: Any, grid: Any, num_threads: int, turns: Turns) -> None:
        self.rank, self.index, self.grid = rank, index, grid
        self.shared: list[np.ndarray] = []
        self.barrier = Meeting(num_threads, turns)
        self.warps = [Meeting(LANES, turns) for _ in range(num_threads // LANES)]


class Launch:
    """A kernel with its arguments."""

    def __init__(self, kernel: Any, args: Any) -> None:
        self.kernel, self.args = kernel, args

    def launch(self, grid: Any, block: Any, cluster: Any = None, **_: Any) -> None:
        num_blocks, num_threads = (cluster or (1, 1, 1))[0], block[0]
        assert grid[0] % num_blocks == 0 and num_threads % LANES == 0
        for first in itertools.product(range(0, grid[0], num_blocks), *map(range, grid[1:])):
            self._run(first, grid, num_blocks, num_threads)

    def _run(self, first: Any, grid: Any, num_blocks: int, num_threads: int) -> None:
        blocks: list[Block] = []
        places = list(itertools.product(range(num_blocks), range(num_threads)))
        turns = Turns(places, partial(self._thread, blocks), sum(first))
        for rank in range(num_blocks):
            index = (first[0] + rank, *first[1:])
            blocks.append(Block(rank, index, grid, num_threads, turns))
        self.cluster = Meeting(num_blocks * num_threads, turns)
        turns.run()

    def _thread(self, blocks: list[Block], rank: int, tidx: int) -> None:
        here.blocks, here.block, here.cluster = blocks, blocks[rank], self.cluster
        here.tidx, here.lane, here.num_allocations = tidx, tidx % LANES, 0
        here.warp = blocks[rank].warps[tidx // LANES]
        self.kernel(*self.args)


class Allocator:
    """Shared memory. All thread blocks of a cluster get the same arrays, in the same order."""

    def allocate_tensor(self, element: Any, layout: Any, byte_alignment: int = 1) -> Tensor:
        number, num_elements = here.num_allocations, size(layout.shape)
        here.num_allocations += 1
        if number == len(here.block.shared):
            for block in here.blocks:
                garbage = np.zeros(num_elements, STORAGE[element])
                garbage.view("uint8").fill(0xCD)
                block.shared.append(garbage)
        memory = here.block.shared[number]
        assert memory.size == num_elements
        return Tensor(Pointer(memory), layout)


def remote(pointer: Pointer, rank: int) -> Pointer:
    """The address that ``pointer`` has in the shared memory of thread block ``rank``."""
    (number,) = (i for i, m in enumerate(here.block.shared) if m is pointer.memory)
    return Pointer(here.blocks[rank].shared[number], pointer.offset)


# ---- instructions -------------------------------------------------------------------------------


def barrier() -> None:
    meeting = here.block.barrier
    meeting.wait(meeting.arrive(here.tidx, None))


def cluster_arrive() -> None:
    here.arrived = here.cluster.arrive((here.block.rank, here.tidx), None)


def redux(value: Any, kind: str) -> Any:
    return here.warp.exchange(kind, value, {"max": max, "min": min}[kind])


def ballot(condition: Any) -> int:
    votes = here.warp.exchange("ballot", bool(condition))
    bits = sum(1 << lane for lane, vote in enumerate(votes) if vote)
    return bits - (bits >> 31 << 32)  # an Int32


def shuffle(value: Any, lane: int) -> Any:
    return here.warp.exchange("shuffle", value)[lane]


def shuffle_up(value: Any, distance: int) -> Any:
    lane = here.lane - distance
    return here.warp.exchange("up", value)[lane if lane >= 0 else here.lane]


def shuffle_bfly(value: Any, distance: int) -> Any:
    return here.warp.exchange("bfly", value)[here.lane ^ distance]


def warp_sum(value: Any, threads_in_group: int = LANES) -> Any:
    values = here.warp.exchange("sum", value)
    first = here.lane // threads_in_group * threads_in_group
    return type(value)(sum(values[first : first + threads_in_group]))


def atomic(change: Callable[[int, int], int]) -> Callable[[Pointer, Any], Any]:
    def run(pointer: Pointer, value: Any) -> Any:
        old = pointer.memory[pointer.offset]
        pointer.memory[pointer.offset] = change(int(old), int(value))
        return type(value)(old)

    return run


def kernel(function: Any) -> Any:
    return lambda *args: Launch(function, args)


def exp2(x: Any, fastmath: bool = False) -> Value:
    with np.errstate(over="ignore"):
        return Value(np.exp2(np.float32(x)))


cutlass.Int16, cutlass.Boolean = np.int16, bool
cutlass.min, cutlass.max = min, max
cute.kernel = kernel
cute.make_layout = lambda shape, stride=None: Tensor(None, shape, stride).layout
cute.assume = lambda value, divby: value
cute.size = lambda x, mode=None: size(x.shape)
# A name of a mock is slow to find.
arch = SimpleNamespace(inline_ptx=cute.arch.inline_ptx, lane_idx=cute.arch.lane_idx)
cute.arch, cute.math = arch, SimpleNamespace(exp2=exp2)
arch.griddepcontrol_wait = arch.griddepcontrol_launch_dependents = lambda: None
arch.thread_idx = lambda: (here.tidx, 0, 0)
arch.warp_idx = lambda: here.tidx // LANES
arch.make_warp_uniform = lambda value: value
arch.block_idx, arch.grid_dim = lambda: here.block.index, lambda: here.block.grid
arch.block_idx_in_cluster = lambda: here.block.rank
arch.map_dsmem_ptr = remote
arch.barrier, arch.sync_warp = barrier, lambda: here.warp.exchange("sync", None)
arch.cluster_arrive = arch.cluster_arrive_relaxed = cluster_arrive
arch.cluster_wait = lambda: here.cluster.wait(here.arrived)
arch.warp_redux_sync, arch.vote_ballot_sync = redux, ballot
arch.shuffle_sync, arch.shuffle_sync_up = shuffle, shuffle_up
arch.shuffle_sync_bfly, arch.warp_reduction_sum = shuffle_bfly, warp_sum
arch.popc = lambda value: type(value)(int(value).bit_count())
arch.atomic_or, arch.atomic_add = (
    atomic(lambda x, y: x | y), atomic(lambda x, y: x + y)
)  # fmt: skip
arch.fmax, arch.fmin = lambda x, y: Value(max(x, y)), lambda x, y: Value(min(x, y))
arch.rcp_approx = lambda x: Value(1 / np.float32(x))
sys.modules["cutlass.memory"].SmemAllocator = Allocator  # type: ignore[attr-defined]
