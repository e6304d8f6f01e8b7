"""`moe_gemm`'s Blackwell CuTe kernels on the host (``cute_host``): cases in, verdicts out, as JSON.

``cute_moe_blackwell_machine`` stands in for what the kernels' roles meet.
"""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
from cute_host import Pointer, Tensor, Value, Word, here, on, registers
from cute_moe_blackwell_machine import (
    GRID,
    LANES,
    Accumulators,
    Block,
    Consumer,
    Copies,
    Fragment,
    Handle,
    Matrix,
    Producer,
    Products,
    Ring,
    TensorScales,
    load,
    tiles_of,
)

HOST = SimpleNamespace(xp=np, synchronize=lambda: None)

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
