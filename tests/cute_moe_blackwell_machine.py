"""Stand-ins for what a Blackwell CuTe kernel meets: warps, rings, TMA, tensor memory, products.

A thread block's warps are threads that run the kernel's own roles at once. What the roles meet is
stood in for by what the manuals say: rings count arrivals and bytes, TMA copies boxes and writes
zeros outside of a tensor, tcgen05.cp and the block-scaled product use PTX's place of a scale, and
cp.async copies when it is waited for. A stage that was released is overwritten with NaN. Importing
this module puts the stand-ins in place.
"""

from __future__ import annotations

import math
import sys
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import cute_host
import numpy as np
from cute_host import Layout, Pointer, Tensor, Value, Word, cute, cutlass, here

LANES, WAIT_S = 32, 60.0
GRID = 2
"""Thread blocks, which run one after the other."""

# ---- threads ------------------------------------------------------------------------------------


class Barrier:
    """A barrier whose waiting threads each sleep on a lock of their own, which is fast."""

    def __init__(self, parties: int) -> None:
        self.parties, self.lock, self.broken = parties, threading.Lock(), False
        self.sleeping: list[threading.Lock] = []

    def wait(self) -> None:
        with self.lock:
            sleeping = self.sleeping
            if len(sleeping) + 1 == self.parties:
                self.sleeping = []
                for lock in sleeping:
                    lock.release()
                return
            sleeping.append(here.sleep)
        if self.broken or not here.sleep.acquire(timeout=WAIT_S) or self.broken:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        """Wakes all threads, which raise."""
        with self.lock:
            self.broken, sleeping, self.sleeping = True, self.sleeping, []
            for lock in sleeping:
                lock.release()


class Warp:
    """What the lanes of a warp exchange, in two lists by turns: all lanes have read the last but
    one when a lane writes the next."""

    def __init__(self) -> None:
        self.barrier = Barrier(LANES)
        self.values: tuple[list[Any], list[Any]] = [None] * LANES, [None] * LANES

    def exchange(self, value: Any) -> list[Any]:
        """The values of all lanes."""
        here.exchanges += 1
        values = self.values[here.exchanges % 2]
        values[here.lane] = value
        self.barrier.wait()
        return values


def shuffle(source_of: Any) -> Any:
    """A shuffle; a lane without a source keeps its value, as with shfl.up."""

    def run(value: Any, offset: int) -> Any:
        source = source_of(here.lane, offset)
        values = here.warp.exchange(value)
        return values[source] if 0 <= source < LANES else value

    return run


def ballot(predicate: Any) -> int:
    votes = here.warp.exchange(bool(predicate))
    return sum(1 << lane for lane, vote in enumerate(votes) if vote)


class Block:
    """A thread block: runs roles at once, each on its warps' threads."""

    def __init__(self, *idx: int) -> None:
        self.idx, self.failures, self.lock = idx, [], threading.Lock()
        self.barriers: list[Barrier] = []
        self.named: dict[int, Barrier] = {}
        self.roles: list[tuple[Any, int, int]] = []

    def role(self, function: Any, first: int, lanes: int) -> None:
        """Adds threads ``first`` to ``first + lanes - 1``."""
        self.roles.append((function, first, lanes))

    def wait(self, barrier_id: int, number_of_threads: int) -> None:
        """A named barrier."""
        with self.lock:
            if barrier_id not in self.named:
                self.named[barrier_id] = Barrier(number_of_threads)
                self.barriers.append(self.named[barrier_id])
        assert self.named[barrier_id].parties == number_of_threads
        self.named[barrier_id].wait()

    def run(self) -> None:
        threads = []
        for function, first, lanes in self.roles:
            for start in range(first, first + lanes, LANES):
                warp = Warp()
                self.barriers.append(warp.barrier)
                for tidx in range(start, min(start + LANES, first + lanes)):
                    threads.append(threading.Thread(target=self._run, args=(function, tidx, warp)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [e for e in self.failures if not isinstance(e, threading.BrokenBarrierError)]
        if self.failures:
            raise (told or self.failures)[0]

    def _run(self, function: Any, tidx: int, warp: Warp) -> None:
        here.tidx, here.lane, here.warp, here.block = tidx, tidx % LANES, warp, self
        here.sleep = threading.Lock()
        here.sleep.acquire()
        here.group, here.groups, here.exchanges = [], [], 0
        try:
            function()
        except Exception as error:
            self.failures.append(error)
            for barrier in self.barriers:
                barrier.abort()


class Ring:
    """Stages with full and empty barriers; ``poison`` overwrites a stage that was released."""

    def __init__(self, block: Block, stages: int, arrivals: int, releases: int, num_bytes: int = 0,
                 poison: Any = lambda stage: None) -> None:  # fmt: skip
        self.block, self.stages, self.arrivals, self.releases = block, stages, arrivals, releases
        self.num_bytes, self.poison, self.changed = num_bytes, poison, threading.Condition()
        self.arrived: dict[int, int] = {}
        self.loaded: dict[int, int] = {}
        self.released: dict[int, int] = {}

    def count(self, counter: dict[int, int], fill: int, by: int, most: int) -> None:
        with self.changed:
            counter[fill] = counter.get(fill, 0) + by
            assert counter[fill] <= most, (fill, counter[fill], most)
            if counter[fill] == most:
                if counter is self.released:
                    self.poison(fill % self.stages)
                self.changed.notify_all()

    def wait(self, is_done: Any) -> None:
        with self.changed:
            for _ in range(int(WAIT_S * 10)):
                if self.changed.wait_for(is_done, 0.1) or self.block.failures:
                    break
        assert is_done(), "a barrier is waited for in vain"

    def is_full(self, fill: int) -> bool:
        loaded = self.loaded.get(fill, 0)
        return self.arrived.get(fill, 0) == self.arrivals and loaded == self.num_bytes

    def is_empty(self, fill: int) -> bool:
        return fill < self.stages or self.released.get(fill - self.stages, 0) == self.releases


class Handle(NamedTuple):
    """A thread's handle of a stage."""

    ring: Ring
    count: int

    @property
    def index(self) -> int:
        return self.count % self.ring.stages

    @property
    def barrier(self) -> Handle:
        return self

    def commit(self) -> None:
        self.ring.count(self.ring.arrived, self.count, 1, self.ring.arrivals)

    def release(self) -> None:
        self.ring.count(self.ring.released, self.count, 1, self.ring.releases)


class Producer:
    """``arrives``: acquiring arrives at the full barrier, as TMA's elected thread does."""

    def __init__(self, ring: Ring, arrives: bool = False) -> None:
        self.ring, self.arrives, self.counts = ring, arrives, {}

    def acquire_and_advance(self) -> Handle:
        fill = self.counts.get(here.tidx, 0)
        self.counts[here.tidx] = fill + 1
        self.ring.wait(lambda: self.ring.is_empty(fill))
        handle = Handle(self.ring, fill)
        if self.arrives and here.lane == 0:
            handle.commit()
        return handle

    def tail(self) -> None:
        fill = self.counts.get(here.tidx, 0)
        for last in range(fill, fill + self.ring.stages):
            self.ring.wait(lambda last=last: self.ring.is_empty(last))


class Consumer:
    def __init__(self, ring: Ring) -> None:
        self.ring, self.counts = ring, {}

    def wait_and_advance(self) -> Handle:
        fill = self.counts.get(here.tidx, 0)
        self.counts[here.tidx] = fill + 1
        self.ring.wait(lambda: self.ring.is_full(fill))
        return Handle(self.ring, fill)


# ---- operands and products ----------------------------------------------------------------------


class Matrix(NamedTuple):
    """A matrix as TMA loads it: rows that follow one another, or those of ``indices``."""

    values: np.ndarray  # (rows, k) float32
    stages: np.ndarray  # (stages, rows of a tile, columns of a stage)
    element_bits: int
    granule: int  # columns that a tensor map's rows and a box's first column are multiples of
    indices: Tensor | None = None


def tiles_of(operand: Matrix, row: int, col: int) -> tuple[int, int]:
    return row, col


def load(operand: Matrix, tiles: tuple[int, int], k_idx: int, stage: Handle) -> None:
    """One thread copies a box, with zeros outside of the matrix; all bytes of the box count."""
    if here.lane != 0:
        return
    (row, col), target = tiles, operand.stages[stage.index]
    num_rows, num_cols = target.shape
    rows = np.arange(row, row + num_rows)
    if operand.indices is not None:
        rows = np.array([operand.indices[i] for i in range(num_rows)])
    cols = np.arange(num_cols) + col + k_idx * num_cols
    assert cols[0] % operand.granule == 0 and operand.values.shape[1] % operand.granule == 0
    inside = np.ix_((rows >= 0) & (rows < len(operand.values)), cols < operand.values.shape[1])
    box = np.zeros(target.shape, "float32")
    found = operand.values[np.ix_(rows[inside[0][:, 0]], cols[inside[1][0]])]
    box[np.ix_(inside[0][:, 0], inside[1][0])] = found
    target[:] = box
    ring = stage.ring
    ring.count(ring.loaded, stage.count, box.size * operand.element_bits // 8, ring.num_bytes)


class Fragment:
    """Operands of products: ``[None, None, block, stage]`` are a product's columns of a stage."""

    def __init__(self, stages: np.ndarray, mma_k: int) -> None:
        self.stages, self.mma_k, self.shape = stages, mma_k, (0, 0, stages.shape[2] // mma_k)

    def __getitem__(self, at: Any) -> np.ndarray:
        _, _, block, stage = at
        return self.stages[stage, :, block * self.mma_k : (block + 1) * self.mma_k]


class Products:
    """tcgen05.mma, without or with block scales: (rows, columns) operands, or pairs with scales."""

    def set(self, field: Any, value: Any) -> None:
        self.accumulate = bool(value)

    def multiply(self, acc: np.ndarray, w: Any, a: Any) -> None:
        if isinstance(w, list):
            w, a = (operand * scale[: len(operand), None] for operand, scale in (w, a))
        acc[:] = (acc if self.accumulate else 0) + w @ a.T


class Copies:
    """tcgen05.cp.32x128b.warpx4 of an atom of scales in shared memory."""

    def __init__(self, words: np.ndarray, target: np.ndarray) -> None:
        self.words, self.target = words, target  # (stages, 128) words, (128 lanes, 4 columns, 4)

    def __iter__(self) -> Any:
        return iter((self, self, self.target))

    def __getitem__(self, at: Any) -> np.ndarray:
        return self.words[at[-1]]

    def copy(self, atom: np.ndarray, target: np.ndarray) -> None:
        target[:] = np.tile(atom.view("uint8").reshape(32, 4, 4), (4, 1, 1))


class TensorScales:
    """Scales in tensor memory, as a product ``[None, None, block]`` finds them (PTX, 1X)."""

    def __init__(self) -> None:
        self.memory = np.full((128, 4, 4), 0xFF, "uint8")

    def __getitem__(self, at: Any) -> np.ndarray:
        row = np.arange(128)
        found = [self.memory[row % 32 + 32 * q, row // 32, at[2]] for q in range(4)]
        assert all((found[0] == other).all() for other in found)
        return np.ldexp(np.float32(1), found[0].astype("int32") - 127)


class Accumulators:
    """``[None, None, None, i]`` is an accumulator; ``columns()[None, None, part]`` 32 of a row."""

    def __init__(self, num: int, block_m: int) -> None:
        self.memory = np.full((128, num * block_m), np.nan, "float32")
        self.block_m = block_m

    def __getitem__(self, at: Any) -> np.ndarray:
        return self.memory[:, at[-1] * self.block_m : (at[-1] + 1) * self.block_m]

    def columns(self) -> Any:
        memory = self.memory

        class Columns:
            def __getitem__(self, at: Any) -> np.ndarray:
                return memory[here.tidx % 128, 32 * at[2] : 32 * at[2] + 32]

        return Columns()


# ---- the DSL ------------------------------------------------------------------------------------


def copy(atom: Any, source: Any, target: Any) -> None:
    """tcgen05.cp, tcgen05.ld or cp.async, which is put off until it is waited for."""
    if isinstance(atom, Copies):
        atom.copy(source, target)
    elif isinstance(source, np.ndarray):
        target.store(source)
    else:
        here.group.append((source, target))


def commit_group() -> None:
    here.groups.append(here.group)
    here.group = []


def wait_group(pending: int) -> None:
    while len(here.groups) > pending:
        for source, target in here.groups.pop(0):
            cute_host.copy(source, target)


to_element = Value.to
Value.to = lambda self, element: self if element is Value else to_element(self, element)
arch = cute.arch
arch.thread_idx = lambda: (here.tidx, 0, 0)
arch.block_idx = lambda: here.block.idx
arch.grid_dim = lambda: (GRID, 1, 1)
arch.warp_idx, arch.make_warp_uniform = lambda: here.tidx // LANES, lambda value: value
arch.sync_warp = arch.sync_threads = lambda: here.warp.barrier.wait()
arch.barrier = lambda **of: here.block.wait(**of)
arch.shuffle_sync = shuffle(lambda lane, source: source)
arch.shuffle_sync_up = shuffle(lambda lane, offset: lane - offset)
arch.shuffle_sync_bfly = shuffle(lambda lane, mask: lane ^ mask)
arch.vote_ballot_sync, arch.popc = ballot, lambda bits: bin(bits).count("1")
arch.cp_async_commit_group, arch.cp_async_wait_group = commit_group, wait_group
for fence in ("fence_proxy", "fence_view_async_tmem_load"):
    setattr(arch, fence, lambda *of, **kind: None)
cute.make_copy_atom = lambda *of, **bits: None
sys.modules["cutlass.cute.nvgpu"].cpasync.CopyG2SOp = lambda: None
arch.rcp_approx = lambda x: 1 / x if x else math.inf
arch.fmin = lambda a, b, nan: Value(np.minimum(a, b))
arch.fmax = lambda a, b, nan: Value(np.maximum(a, b))
cute.math.exp = lambda x, fastmath: math.exp(min(x, 700))
cute.copy = copy
cute.size = lambda tensor, mode=None: cute_host.size(
    tensor.shape[mode[0]] if mode else tensor.shape
)
cute.gemm = lambda mma, d, w, a, c: mma.multiply(d, w, a)
cute.recast_ptr = lambda pointer, dtype: Pointer(
    pointer.memory.view("uint32" if dtype is Word else "uint16")
)
cute.make_layout = lambda shape, stride=None: Layout(shape, stride) if stride else shape
cutlass.min, cutlass.max = min, max
cutlass.Uint16 = np.uint16


class Element(str):
    """The name of an element type, which has a width."""

    width = 16


cutlass.BFloat16, cutlass.Float16 = Element("bfloat16"), Element("float16")
cutlass.Float8E4M3FN = SimpleNamespace(width=8)
for module in (
    "pipeline", "tensor_utils", "utils", "utils.blackwell_helpers", "utils.blockscaled_layout",
    "utils.hopper_helpers",
):  # fmt: skip
    sys.modules[f"cutlass.{module}"] = MagicMock()
