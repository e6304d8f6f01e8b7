"""`moe_mlp` for few tokens: weights go once from global memory to the warps that multiply them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us, why_slower
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.moe_gemm.operands import weight_format
from kernelcat.kernels.cuda.moe_mlp import grouped
from kernelcat.kernels.cuda.moe_mlp.operands import (
    gating,
    route_step,
    router_kind,
    router_scratch_bytes,
    router_sizes,
    routing_workspaces,
    weights,
    why_not_routed,
)
from kernelcat.reference._assignments import active, row_blocks
from kernelcat.reference._experts import FP4, FP8
from kernelcat.reference._fp8 import BLOCK as SCALE_BLOCK
from kernelcat.reference._moe_parts import is_empty, num_assignments
from kernelcat.runtime.gpu import Gpu

WARPS = 16
"""kNumWarps."""
SUMS_PITCH = 20
"""kSumsPitch: floats from one column to the next, in a warp's sums of 16 rows."""
ROUTE_TOKENS = 16
"""Tokens at most that every thread block routes by itself: one for each warp."""
MAX_ASSIGNMENTS = 4096
"""Assignments at most, of which every thread block makes lists in shared memory."""
COMBINED = 4 * 128
"""Elements of a thread block of the last launch."""

SPACE = {
    "col_tiles": (1, 2, 4),
    "row_tiles": (1, 2),
    "team": (2, 4, 8, 16),
    "depth": (3, 4, 2, 8),
}
"""
col_tiles : tiles of 8 tokens that weights are multiplied by at a time
row_tiles : tile rows of 16 rows of W that a warp multiplies at a time
team : warps that split k, at most one for each part of k
depth : copies of a warp from global memory in flight
"""


def unit_cols(format: str) -> int:
    """Columns of W that a warp multiplies at a time."""
    return SCALE_BLOCK if format == "fp8" else 64


def slot_bytes(format: str) -> int:
    """Shared memory of a unit of 16 rows of W, with its scales."""
    if format in FP4:
        return 512 + 32 * (8 if format == "nvfp4" else 4)
    return 2048 + 32 * (4 if format == "fp8" else 0)


@dataclass(frozen=True)
class Product:
    """One of the two products in numbers, for one configuration."""

    number: int
    n: int
    k: int
    format: str
    has_fp8_products: bool
    col_tiles: int
    row_tiles: int
    team: int
    depth: int

    @staticmethod
    def of(number: int, problem: Problem, config: Config) -> Product:
        hidden, inter = problem["hidden"], problem["inter"]
        n, k = (2 * inter, hidden) if number == 1 else (hidden, inter)
        product = Product(
            number,
            n,
            k,
            format=problem["format"],
            has_fp8_products=problem["act_dtype"] == FP8,
            **{name: config[name] for name in SPACE},
        )
        max_team = 1 << (max(product.units, 1).bit_length() - 1)
        return replace(product, team=min(product.team, max_team))

    @property
    def unit_cols(self) -> int:
        return unit_cols(self.format)

    @property
    def units(self) -> int:
        return ceil(self.k / self.unit_cols)

    @property
    def row_groups(self) -> int:
        """Row groups of an expert, each a work item of a team of warps."""
        return ceil(self.n / (16 * self.row_tiles))

    @property
    def rows_bytes(self) -> int:
        """Shared memory of staged activations, with scales for float8."""
        size = 1 if self.has_fp8_products else 2
        scales = 4 * self.units if self.has_fp8_products else 0
        return 8 * self.col_tiles * (self.units * self.unit_cols * size + scales)

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one unit of a warp."""
        return self.row_tiles * slot_bytes(self.format)

    @property
    def sums_bytes(self) -> int:
        return WARPS * self.row_tiles * 8 * SUMS_PITCH * 4


def _reserved_bytes(product: Product, problem: Problem) -> int:
    """Shared memory of staged rows; before they are staged, ids and scores are there."""
    ids = 4 * num_assignments(problem) + router_scratch_bytes(problem, WARPS) * _routes(problem)
    return max(product.rows_bytes, ceil(ids / 16) * 16)


def _shared_bytes(product: Product, problem: Problem) -> int:
    rings = WARPS * product.depth * product.slot_bytes
    numbers = num_assignments(problem) + 2 * _max_passes(product, problem) + problem["experts"] + 2
    lists = 4 * numbers
    return _reserved_bytes(product, problem) + rings + product.sums_bytes + lists


def _routes(problem: Problem) -> bool:
    """Whether every thread block routes all tokens by itself."""
    return bool(problem["tokens"] <= ROUTE_TOKENS)


def _max_passes(product: Product, problem: Problem) -> int:
    """An upper limit of the passes over experts' weights, for any assignments."""
    return int(problem["experts"] + num_assignments(problem) // (8 * product.col_tiles))


def _max_items(product: Product, problem: Problem) -> int:
    """Work items if as many experts as possible have tokens."""
    passes = min(_max_passes(product, problem), num_assignments(problem))
    return passes * product.row_groups


def _product_step(product: Product, problem: Problem, config: Config, gpu: Gpu) -> Step:
    is_second = product.number == 2
    source = instance(
        "moe_mlp/stream.cu",
        "moe_mlp_stream",
        *(problem["dtype"], problem["act_dtype"], weight_format(problem), gating(problem)),
        *(is_second, _routes(problem), *router_kind(problem)),
        *(product.col_tiles, product.row_tiles, product.team, product.depth),
    )
    operands = (Pointer("h" if is_second else "x"), *weights(product.number))
    result = Pointer("y" if is_second else "h")
    sizes = (product.n, product.k, _reserved_bytes(product, problem))
    return Step(
        source,
        (min(gpu.sms, _max_items(product, problem)), 1, 1),
        (
            *(*operands, result, *map(Pointer, ("logits", "correction", "ids", "gates"))),
            *(Int32(problem["tokens"]), *router_sizes(problem), *map(Int32, sizes)),
        ),
        WARPS * 32,
        max(_shared_bytes(product, problem), gpu.shared_bytes // 2),  # one thread block an SM
        programmatic=True,
    )


def _combine_step(problem: Problem) -> Step:
    return Step(
        instance("moe_mlp/combine.cu", "moe_mlp_combine", problem["dtype"]),
        (ceil(problem["tokens"] * problem["hidden"] / COMBINED), 1, 1),
        (
            *map(Pointer, ("y", "gates", "residual", "out")),
            *(Int32(problem[axis]) for axis in ("tokens", "top_k", "hidden")),
        ),
        128,
        programmatic=True,
    )


def _products(problem: Problem, config: Config) -> tuple[Product, ...]:
    return tuple(Product.of(number, problem, config) for number in (1, 2))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    route = () if _routes(problem) else (route_step(problem, programmatic=True),)
    products = (
        _product_step(product, problem, config, gpu) for product in _products(problem, config)
    )
    rows = num_assignments(problem)
    workspaces = {
        **routing_workspaces(problem),
        "h": rows * problem["inter"] * itemsize(problem["dtype"]),
        "y": rows * problem["hidden"] * 4,
    }
    return Program((*route, *products, _combine_step(problem)), workspaces)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if (why := why_not_routed(problem)) or is_empty(problem):
        return why
    if why := why_not_streamed(problem):
        return why
    for product in _products(problem, config):
        if (size := _shared_bytes(product, problem)) > gpu.shared_bytes:
            return (
                f"activations, weights in flight and sums take {size} bytes, more than the "
                f"{gpu.shared_bytes} bytes of shared memory"
            )
    return None


def why_not_streamed(problem: Problem) -> str | None:
    """Why no configuration serves the problem, or None."""
    format = problem["format"]
    if format in FP4 and problem["packing"] != "tiles":
        return "weights in rows are not in the order of registers: kernelcat.fp4.prepack makes it"
    if problem["act_dtype"] == FP8 and format in FP4:
        return "float8 activations are multiplied by float8 weights only, not by 4-bit weights"
    if problem["inter"] == 0:
        return "there is nothing to multiply for inter=0"
    if num_assignments(problem) > MAX_ASSIGNMENTS:
        return (
            f"{num_assignments(problem)} assignments are more than the {MAX_ASSIGNMENTS} of which "
            "thread blocks make lists"
        )
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if is_empty(problem):
        return None
    cols = problem["tokens"]
    if config["col_tiles"] > 1 and 8 * config["col_tiles"] >= 2 * max(cols, 8):
        return f"{8 * config['col_tiles']} columns are mostly empty for {cols} tokens"
    passes = num_assignments(problem) / active(problem) / (8 * config["col_tiles"])
    if passes > MAX_PASSES:
        return f"weights are read {passes:.3g} times, by {8 * config['col_tiles']} tokens at a time"
    num_tiles = config["col_tiles"] * config["row_tiles"]
    if num_tiles > (MAX_TILES_FLOAT8 if problem["act_dtype"] == FP8 else MAX_TILES):
        return f"the sums of {num_tiles} tiles of 16 x 8 leave too few registers for the rest"
    in_flight = min(
        WARPS * product.depth * product.slot_bytes for product in _products(problem, config)
    )
    if in_flight < MIN_IN_FLIGHT:
        return f"{in_flight} bytes in flight of an SM are too few for the memory's latency"
    return why_slower(_estimate(problem, config, gpu), grouped.IMPLEMENTATION, problem, gpu)


MIN_IN_FLIGHT = 30 * 1024
MAX_PASSES = 4
MAX_TILES = 4
MAX_TILES_FLOAT8 = 2
"""Tiles of 16 rows x 8 tokens of a warp; with float8 activations, four tiles spill registers."""
START_US = 4.0
"""Routing, lists and the first activations: those of the second product overlap with the first."""
COMBINE_US = 2.0
COPY_NS = 1000
"""From the start of a copy to its data, when all SMs copy."""
UNIT_NS = 400
"""A unit of a warp at least, however few warps are active."""
ISSUE_NS = 3.0
"""Nanoseconds of an SM's issue slots for a unit of a warp, besides products."""
STEP_NS = {"fp4": 3.4, "fp8": 2.9, "float8": 1.3, "16 bits": 1.4}
"""Nanoseconds of an SM's issue slots for 16 x 16 weights: copies, decoding, scales. ``float8`` are
weights in fp8 with activations in float8."""
COLUMN_NS = 1.35
"""Nanoseconds of an SM's issue slots for the product of 16 x 16 weights and 8 tokens."""
SUM_NS, SUM_TILE_NS = 20, 12
"""Nanoseconds of an SM for the sums of a warp of a team, and for each tile of 16 x 8 of the sums,
for each work item."""
SHARED_BYTES_NS = 240
"""Bytes of shared memory that an SM reads or writes in a nanosecond."""
OVERLAP = 0.05
"""Share of the shorter time, of the SMs or of the memory, that the longer does not hide."""


def _step_ns(format: str, has_fp8_products: bool) -> float:
    if format in FP4:
        return STEP_NS["fp4"]
    if format == "fp8":
        return STEP_NS["float8" if has_fp8_products else "fp8"]
    return STEP_NS["16 bits"]


def issue_ns(
    format: str, *, row_tiles: int = 1, col_tiles: int = 1, has_fp8_products: bool = False
) -> float:
    """Nanoseconds of an SM's issue slots for a unit of a warp, with its products."""
    steps = row_tiles * unit_cols(format) / 16
    return ISSUE_NS + steps * (_step_ns(format, has_fp8_products) + COLUMN_NS * col_tiles)


def _unit_ns(product: Product) -> float:
    """Nanoseconds of an SM for a unit of a warp: issue slots or shared memory."""
    unit_issue_ns = issue_ns(
        product.format,
        row_tiles=product.row_tiles,
        col_tiles=product.col_tiles,
        has_fp8_products=product.has_fp8_products,
    )
    rows_bytes = 8 * product.col_tiles * product.unit_cols * (1 if product.has_fp8_products else 2)
    return max(unit_issue_ns, (2 * product.slot_bytes + rows_bytes) / SHARED_BYTES_NS)


def _busiest_us(product: Product, num_items: float, gpu: Gpu) -> float:
    """The time of the SM with the most work items: rounds of all teams, then of the teams left."""
    unit_ns, units = _unit_ns(product), ceil(product.units / product.team)
    least_ns = max(UNIT_NS, COPY_NS / product.depth)
    rounds, left = divmod(ceil(num_items / gpu.sms), WARPS // product.team)
    ns = rounds * units * max(WARPS * unit_ns, least_ns)
    if left:
        ns += units * max(left * product.team * unit_ns, least_ns)
    sum_ns = SUM_NS + SUM_TILE_NS * product.row_tiles * product.col_tiles
    return (ns + num_items / gpu.sms * product.team * sum_ns) * 1e-3


def _product_us(product: Product, problem: Problem, gpu: Gpu) -> float:
    """The time of the busiest SM or of the memory."""
    num_items = row_blocks(problem, 8 * product.col_tiles) * product.row_groups
    busy_us = _busiest_us(product, num_items, gpu)
    memory_us = copy_us(num_items * product.units * product.slot_bytes, gpu) - LAUNCH_US
    return max(busy_us, memory_us) + OVERLAP * min(busy_us, memory_us)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    route_us = 0.0 if _routes(problem) else LAUNCH_US
    products_us = sum(_product_us(product, problem, gpu) for product in _products(problem, config))
    return LAUNCH_US + route_us + START_US + products_us + COMBINE_US


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="cuda",
    variant="stream",
    summary="for few tokens: weights stream to tensor cores; thread blocks route by themselves",
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
    rank=2,
)
