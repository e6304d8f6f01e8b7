"""`moe_mlp` for one token: two launches, of which the second has weights before the first ends."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.moe_gemm.operands import weight_format
from kernelcat.kernels.cuda.moe_mlp import stream
from kernelcat.kernels.cuda.moe_mlp.operands import (
    gating,
    router_kind,
    router_scratch_bytes,
    router_sizes,
    weights,
    why_not_routed,
)
from kernelcat.reference._experts import FP4, FP8
from kernelcat.reference._moe_parts import is_empty
from kernelcat.runtime.gpu import Gpu

ITEM_ROWS = 16
"""kItemRows: rows of a result that are an item of work."""
LANE_CHUNKS = 8
"""kLaneChunks: staged rows are whole chunks of this many."""

SPACE = {
    "first_depth": (8, 4, 6, 2, 3, 12),
    "second_depth": (8, 4, 6, 2, 3, 12),
    "cluster": (2, 1, 4),
}
"""
first_depth, second_depth : copies of a warp from global memory in flight, for each product
cluster : thread blocks of the second product that share its rows
"""


@dataclass(frozen=True)
class Product:
    """One of the two products in numbers, for one configuration and GPU."""

    number: int
    n: int
    k: int
    top_k: int
    format: str
    depth: int
    cluster: int
    sms: int

    @staticmethod
    def of(number: int, problem: Problem, config: Config, gpu: Gpu) -> Product:
        hidden, inter = problem["hidden"], problem["inter"]
        n, k = (2 * inter, hidden) if number == 1 else (hidden, inter)
        depth = config["first_depth" if number == 1 else "second_depth"]
        cluster = 1 if number == 1 else config["cluster"]
        return Product(number, n, k, problem["top_k"], problem["format"], depth, cluster, gpu.sms)

    @property
    def units(self) -> int:
        """Units of a row of W, of 16 x 64 or 16 x 128 weights."""
        return ceil(self.k / stream.unit_cols(self.format))

    @property
    def items(self) -> int:
        row_tiles = ceil(self.n / ITEM_ROWS)
        return row_tiles * self.top_k if self.number == 1 else row_tiles

    @property
    def item_units(self) -> int:
        return self.units if self.number == 1 else self.units * self.top_k

    @property
    def clusters(self) -> int:
        """As few as have the least work: each has whole items."""
        most = max(1, min(self.sms // self.cluster, self.items))
        return ceil(self.items / ceil(self.items / most))

    @property
    def cluster_items(self) -> int:
        return ceil(self.items / self.clusters)

    @property
    def block_items(self) -> int:
        """Items at most that a thread block has units of."""
        whole = ceil(self.cluster_items / self.cluster)
        return whole if self.cluster == 1 else whole + 1

    @property
    def warp_units(self) -> int:
        """Units of the warp with most."""
        return ceil(self.cluster_items * self.item_units / (self.cluster * stream.WARPS))

    @property
    def rows_bytes(self) -> int:
        """Shared memory of staged activations."""
        chunks = ceil(self.units * stream.unit_cols(self.format) // 32 / LANE_CHUNKS) * LANE_CHUNKS
        return (1 if self.number == 1 else self.top_k) * chunks * 64

    @property
    def ring_bytes(self) -> int:
        """Shared memory of a warp's weights in flight."""
        return self.depth * stream.slot_bytes(self.format)

    @property
    def shared_bytes(self) -> int:
        sums = self.block_items * stream.WARPS + self.cluster_items
        inbox = self.cluster_items * self.cluster if self.cluster > 1 else 0
        return self.rows_bytes + stream.WARPS * self.ring_bytes + 4 * ITEM_ROWS * (sums + inbox)


def _products(problem: Problem, config: Config, gpu: Gpu) -> tuple[Product, ...]:
    return tuple(Product.of(number, problem, config, gpu) for number in (1, 2))


def _step(product: Product, problem: Problem, gpu: Gpu) -> Step:
    is_second = product.number == 2
    source = instance(
        "moe_mlp/single.cu",
        "moe_mlp_single",
        *(problem["dtype"], weight_format(problem), gating(problem), is_second),
        *(*router_kind(problem), product.depth, product.cluster),
    )
    operands = (Pointer("h" if is_second else "x"), *weights(product.number))
    result = (Pointer("residual"), Pointer("out" if is_second else "h"))
    sizes = (product.n, product.k, product.rows_bytes, product.block_items)
    # Half of an SM's shared memory for the first product: one of its thread blocks an SM, and room
    # for one of the second product's.
    shared = product.shared_bytes if is_second else max(product.shared_bytes, _half(gpu))
    return Step(
        source,
        (product.clusters * product.cluster, 1, 1),
        (
            *(*operands, *result, Pointer("logits"), Pointer("correction")),
            *(*router_sizes(problem), *map(Int32, sizes)),
        ),
        stream.WARPS * 32,
        shared,
        cluster=(product.cluster, 1, 1),
        programmatic=True,
        max_carveout=True,
    )


def _half(gpu: Gpu) -> int:
    return gpu.shared_bytes // 2


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    steps = tuple(_step(product, problem, gpu) for product in _products(problem, config, gpu))
    h_bytes = problem["top_k"] * problem["inter"] * itemsize(problem["dtype"])
    return Program(steps, {"h": h_bytes})


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if (why := why_not_routed(problem)) or is_empty(problem):
        return why
    if problem["tokens"] != 1:
        return f"{problem['tokens']} tokens are not one"
    if problem["act_dtype"] == FP8:
        return "activations of one token stay in 16 bits here"
    if why := stream.why_not_streamed(problem):
        return why
    first, second = _products(problem, config, gpu)
    if product := next((p for p in (first, second) if p.shared_bytes > gpu.shared_bytes), None):
        return (
            f"activations, weights in flight and sums take {product.shared_bytes} bytes, more than "
            f"the {gpu.shared_bytes} bytes of shared memory"
        )
    if router_scratch_bytes(problem, 1) > min(first.ring_bytes, second.ring_bytes):
        return "scores of a token's experts do not fit in the memory of a warp's weights"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    first, second = _products(problem, config, gpu)
    if min(first.ring_bytes, second.ring_bytes) * stream.WARPS < stream.MIN_IN_FLIGHT:
        return "too few bytes in flight for the memory's latency"
    if max(first.shared_bytes, second.shared_bytes) > _half(gpu):
        return "thread blocks of both products do not fit on an SM together"
    return None


START_US = 2.5
"""Routing and the first weights."""
BETWEEN_US = 2.0
"""From the end of the first product to the second's first products: h is written and read."""
CLUSTER_US = 0.5
"""Sums of a cluster's thread blocks, by shared memory."""
ONE_COLUMN = 0.9
"""Time of a unit's products for one token, of those for eight."""

ROWS = 1.12
"""Time of the memory for weights in rows, of that for tiles: a warp reads 128 bytes of each of 16
rows, and no other warp reads their neighbours at the time."""


def _product_us(product: Product, gpu: Gpu) -> float:
    """The time of the warps with most units, or of the memory."""
    unit_ns = stream.WARPS * ONE_COLUMN * stream.issue_ns(product.format)
    busy_us = product.warp_units * max(unit_ns, stream.UNIT_NS) * 1e-3
    num_bytes = product.items * product.item_units * stream.slot_bytes(product.format)
    memory_us = (copy_us(num_bytes, gpu) - LAUNCH_US) * (1.0 if product.format in FP4 else ROWS)
    early_us = 0.0
    if product.number == 2:  # what is in shared memory before h is complete
        early = product.ring_bytes * stream.WARPS * product.clusters * product.cluster / num_bytes
        early_us = min(early, 1.0) * memory_us
    longer = max(busy_us, memory_us - early_us)
    return longer + stream.OVERLAP * min(busy_us, memory_us)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    products = _products(problem, config, gpu)
    products_us = sum(_product_us(product, gpu) for product in products)
    sums_us = CLUSTER_US if config["cluster"] > 1 else 0.0
    return LAUNCH_US + START_US + products_us + BETWEEN_US + sums_us


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="cuda",
    variant="single",
    summary="for one token: two launches, the second with its weights in flight early",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "asynchronous copies": "LDGSTS",
        "dependent launch": "ACQBULK",
    },
    rank=3,
)
