"""`moe_gemm`'s Blackwell CuTe kernels on the host (``cute_host``): cases in, verdicts out, as JSON.

A thread block's warps are threads that run the kernel's own roles at once. What the roles meet is
stood in for by what the manuals say: rings count arrivals and bytes, TMA copies boxes and writes
zeros outside of a tensor, tcgen05.cp and the block-scaled product use PTX's place of a scale, and
cp.async copies when it is waited for. A stage that was released is overwritten with NaN.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import cute_host
import numpy as np
from cute_host import Layout, Pointer, Tensor, Value, Word, cute, cutlass, here, on, registers

LANES, WAIT_S = 32, 60.0
HOST = SimpleNamespace(xp=np, synchronize=lambda: None)

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

from kernelcat import catalog, dtypes  # noqa: E402
from kernelcat.catalog.implementation import Config  # noqa: E402
from kernelcat.kernels.cute.moe_gemm import block_scaled, combine, tcgen05  # noqa: E402
from kernelcat.kernels.cute.moe_gemm.blackwell import loader, product, scales  # noqa: E402
from kernelcat.reference import _experts  # noqa: E402
from kernelcat.runtime import gpu  # noqa: E402
from kernelcat.verify import gate  # noqa: E402

ENTRY = catalog.entry("moe_gemm")
VARIANTS = {module.IMPLEMENTATION.variant: module.IMPLEMENTATION
            for module in (block_scaled, tcgen05)}  # fmt: skip
GRID = 2
"""Thread blocks, which run one after the other."""


def decoded(problem: Any, arrays: Any) -> tuple[np.ndarray, np.ndarray]:
    """Float32 elements of A (rows, K), and of W (experts * N, K) without scales."""
    a = dtypes.decode(arrays["a"], problem["act_dtype"])
    kind = _experts.WEIGHT.where(problem.values)
    w = dtypes.decode(arrays["w"], kind)
    return a, w.reshape(-1, w.shape[-1])


class Shared:
    """What the roles of a thread block share: stages, accumulators, rings and scales."""

    def __init__(self, kernel: Any, block: Block) -> None:
        num, block_m, block_k = kernel.num_stages, kernel.block_m, kernel.block_k
        self.w = np.full((num, 128, block_k), np.nan, "float32")
        self.a = np.full((num, block_m, block_k), np.nan, "float32")
        self.words = np.full((num, 128), 0xFFFFFFFF, "uint32")
        self.indices = on(np.full(block_m, -7, "int32"), block_m)
        self.row_scales = on(
            np.full(block_m * scales.SLOTS, np.nan, "float32"), (1, block_m, scales.SLOTS)
        )
        self.accumulators = Accumulators(kernel.num_accumulators, block_m)

        def poison(stage: int) -> None:
            self.w[stage], self.a[stage] = np.nan, np.nan

        stages = Ring(block, num, 1, 1, kernel.loaded_bytes, poison)
        self.producer, self.consumer = Producer(stages, arrives=True), Consumer(stages)

        def poison_scales(stage: int) -> None:
            self.words[stage] = 0xFFFFFFFF

        of_scales = Ring(block, num, LANES, 1, poison=poison_scales)
        self.scale_producer, self.scale_consumer = Producer(of_scales), Consumer(of_scales)
        sums = Ring(block, kernel.num_accumulators, 1, kernel.readers)
        self.issuer, self.reader = Producer(sums), Consumer(sums)

        tW, tA = TensorScales(), TensorScales()
        ones = np.zeros((1, 128), "uint32")
        self.scales = scales.BlockScales(
            words=Tensor(Pointer(self.words.reshape(-1)), (4, LANES, num)),
            ones=Tensor(Pointer(ones.reshape(-1)), 128),
            w=tW,
            a=tA,
            w_copy=Copies(self.words, tW.memory),
            a_copy=Copies(ones, tA.memory),
        )


def run_block(problem: Any, arrays: Any, kernel: Any, out: Tensor, idx: int) -> None:
    n, k, top_k, experts = (problem[axis] for axis in ("N", "K", "top_k", "experts"))
    a, w = decoded(problem, arrays)
    order = on(arrays["order"], len(arrays["order"]))
    lists = tuple(on(np.zeros(experts + 1, "int32"), experts + 1) for _ in range(2))
    k_blocks, rows = -(-k // 128), len(a)
    m_sa = m_sw = None
    if kernel.is_promoted:
        m_sa = on(arrays["a_scale"], (1, rows, k_blocks), (1, 1, rows))
        m_sw = Pointer(np.ascontiguousarray(arrays["w_scale"]).reshape(-1))
        if kernel.is_block_scaled:
            m_sw = scales.stored_words(m_sw, experts * n, k, kernel.k_tail == 0)
        else:
            n_blocks = -(-n // 128)
            strides = 1, k_blocks, n_blocks * k_blocks
            m_sw = Tensor(m_sw, (k_blocks, n_blocks, experts), strides)
    bias = dtypes.decode(arrays["bias"], problem["dtype"]) if kernel.output.bias else None
    m_bias = on(bias, (n, experts)) if kernel.output.bias else None

    block = Block(idx, 0, 0)
    block.role(
        lambda: kernel.tiles.load(on(arrays["offsets"], experts + 1), *lists, LANES), 0, LANES
    )
    block.run()

    block = Block(idx, 0, 0)
    shared = Shared(kernel, block)
    for i in range(128):
        shared.scales.ones[i] = Word(scales.ONE)
    bits, granule = (4, 128) if kernel.is_block_scaled else (1024 // kernel.block_k, 1)
    full = k - kernel.k_tail
    left = Matrix(w[:, :full], shared.w, bits, granule)
    tail = Matrix(w[:, k - 128 :], shared.w, bits, granule)
    indices = shared.indices if kernel.gather else None
    right = Matrix(a, shared.a, 1024 // kernel.block_k, 1, indices)

    def read() -> None:
        parts = None, shared.accumulators.columns(), None, registers(32, Value)
        kernel.read(
            lists, parts, m_sw, m_sa, shared.row_scales, m_bias, order, out, shared.reader, n, k,
            top_k,
        )  # fmt: skip

    def multiply() -> None:
        kernel.multiply(
            lists, Products(), Fragment(shared.w, kernel.block_k // 4),
            Fragment(shared.a, kernel.block_k // 4), shared.accumulators, shared.scales,
            shared.consumer, shared.scale_consumer, shared.issuer, n, k,
        )  # fmt: skip

    def produce() -> None:
        kernel.produce(
            lists, left, tail, right, order, shared.indices, shared.producer, n, k, top_k
        )

    def load_scales() -> None:
        kernel.load_scales(lists, m_sw, shared.scales.words, shared.scale_producer, n, k)

    block.role(read, 0, 128)
    block.role(multiply, 128, 1)
    block.role(produce, 160, LANES)
    if kernel.is_block_scaled:
        block.role(load_scales, 192, LANES)
    if kernel.reader_groups > 1:
        block.role(read, 256, 128)
    block.run()


def run_product(problem: Any, arrays: Any, step: Any, out: np.ndarray) -> None:
    """``out`` (rows, pitch) float32 is written, not rounded."""
    kernel = product.Product(**dict(step.source.constants))
    kernel.output.dtype = Value
    rows, pitch = out.shape
    m_out = Tensor(
        Pointer(out.reshape(-1)),
        (kernel.output.width, pitch // kernel.output.width, rows),
        (1, kernel.output.width, pitch),
    )
    for idx in range(GRID):
        run_block(problem, arrays, kernel, m_out, idx)


def run_combine(problem: Any, arrays: Any, step: Any, partial: np.ndarray, d: np.ndarray) -> None:
    """``partial`` (rows, pitch) and ``d`` (tokens, N) are float32; ``d`` is written."""
    kernel = combine.Combine(**dict(step.source.constants))
    kernel.dtype = kernel.row_dtype = Value
    (tokens, n), (rows, pitch), top_k = d.shape, partial.shape, problem["top_k"]
    vectors, width = pitch // combine.VECTOR, combine.VECTOR
    m_partial = on(partial, (width, vectors, rows), (1, width, pitch))
    m_position, m_gates = (on(arrays[name], (top_k, tokens)) for name in ("position", "gates"))
    elements = (kernel.vector, n // kernel.vector, tokens), (1, kernel.vector, n)
    m_d = m_residual = Tensor(Pointer(d.reshape(-1)), *elements)
    if problem["residual"]:
        m_residual = on(dtypes.decode(arrays["residual"], problem["dtype"]), *elements)
    for token, y, thread in np.ndindex(tokens, step.grid[1], vectors):
        here.tidx, here.block = thread, Block(token, y, 0)
        kernel.kernel(m_partial, m_position, m_gates, m_residual, m_d)


def judge(variant: str, config: dict[str, int], axes: dict[str, Any]) -> list[Any]:
    problem, target = ENTRY.problem(**axes), gpu.find("b200")
    implementation, chosen = VARIANTS[variant], Config(config)
    assert implementation.why_not(chosen, problem, target) is None
    steps = implementation.program(problem, chosen, target).steps
    prepared = gate.prepare(ENTRY, problem, HOST, 3)
    arrays, kind = prepared.arrays, ENTRY.outputs[0].dtype_of(problem)
    d = np.full(arrays["d"].shape, np.nan, "float32")
    if problem["combine"]:
        pitch = steps[1].params[-1].value
        partial = np.full((problem["tokens"] * problem["top_k"], pitch), np.nan, "float32")
        run_product(problem, arrays, steps[0], partial)
        rounded = dtypes.decode(dtypes.encode(partial, kind), kind)
        run_combine(problem, arrays, steps[1], rounded, d)
    else:
        run_product(problem, arrays, steps[0], d)
    verdict = prepared.verify(
        lambda arrays: lambda: arrays["d"].__setitem__(..., dtypes.encode(d, kind))
    )
    return [verdict.passed, verdict.detail, verdict.max_error]


# ---- faults, which the verdicts must show --------------------------------------------------------


def forget_the_overlap() -> None:
    """Products of columns that two k-blocks share are computed twice."""
    product.Product.known_products = lambda self, k_idx, num_k_blocks: 0


def shift_the_scales() -> None:
    """A lane writes the scales of its rows one row too far."""
    right = loader.load_words

    def wrong(source: Any, row: int, last: int, part: int, words: Tensor) -> None:
        right(source, row + 1, last, part, words)

    loader.load_words = wrong


def gather_in_order() -> None:
    """Rows of A are the first ones, not the tokens."""

    def wrong(self: Any, order: Tensor, indices: Tensor, *place: int) -> None:
        indices[here.lane] = here.lane

    product.Product.find_rows = wrong


def release_too_early() -> None:
    """A stage is released before its products are computed."""
    released = Consumer.wait_and_advance

    def wrong(self: Consumer) -> Handle:
        handle = released(self)
        if self.ring.num_bytes:
            handle.release()
            return handle._replace(ring=SimpleNamespace(
                stages=self.ring.stages, count=lambda *_: None, released=None, releases=0
            ))  # fmt: skip
        return handle

    Consumer.wait_and_advance = wrong


FAULTS = {f.__name__: f for f in (
    forget_the_overlap, shift_the_scales, gather_in_order, release_too_early,
)}  # fmt: skip


if __name__ == "__main__":
    loader.tiles_of, loader.load = tiles_of, load
    threading.stack_size(1 << 18)
    sys.setswitchinterval(1.0)  # a thread runs until it waits
    for name in sys.argv[1:]:
        FAULTS[name]()
    print(json.dumps({name: judge(*case) for name, case in json.load(sys.stdin).items()}))
