"""`tma_copy` in CUDA C++: ordinary vector loads, 1-D bulk copies, 2-D tensor maps.

Two facts come from public measurements of the bulk copy engine: about 48 KB in flight on each SM
saturate an H200, and copies that begin at multiples of 128 bytes are fastest.
"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import NamedTuple

from kernelcat.catalog.cost_model import LOAD_US, ring_copy_us, stream_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance
from kernelcat.runtime.gpu import KB, MB, Gpu

THREADS = 256
RING_THREADS = 128
MAX_BLOCKS_Y = 65535
"""Thread blocks that a grid can have along y."""
LARGE_BYTES = 4 * MB
"""A copy of more bytes takes long enough to fill the ring of stages."""
FOLD_COLS = 256
"""Elements in a row when a span is folded into a matrix: as many as a row of a box can have."""


class Layout(NamedTuple):
    """The matrix in bytes: ``rows`` of ``row_bytes``, strides between rows; a span is one row.

    A contiguous matrix is a span, whose strides are 0.
    """

    rows: int
    row_bytes: int
    src_stride: int
    dst_stride: int

    @staticmethod
    def of(problem: Problem) -> Layout:
        rows, cols, size = problem["rows"], problem["cols"], itemsize(problem["dtype"])
        src, dst = problem["src_stride"], problem["dst_stride"]
        if rows <= 1 or src == dst == cols:
            return Layout(min(rows, 1), rows * cols * size, 0, 0)
        return Layout(rows, cols * size, src * size, dst * size)

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


class Boxes(NamedTuple):
    """A layout as tensor maps describe it, what a box is, and the tail that maps leave out.

    Maps have ``rows`` x ``cols`` elements of 4 bytes; row r begins r * stride bytes into the
    tensor. The tail is ``tail_bytes`` bytes of each of ``tail_rows`` rows, from the byte
    ``tail_offset`` of the row on.
    """

    rows: int
    cols: int
    src_stride: int
    dst_stride: int
    box_rows: int
    box_cols: int
    tail_offset: int
    tail_rows: int
    tail_bytes: int

    @staticmethod
    def of(layout: Layout, tile_bytes: int) -> Boxes:
        """Boxes of at most ``tile_bytes``.

        Maps have every row up to its last whole 16 bytes. A span is folded into rows of
        FOLD_COLS elements, and what is left of it is the tail.
        """
        rows, row_bytes, src_stride, dst_stride = layout
        unit = 16
        if rows == 1:
            unit = src_stride = dst_stride = FOLD_COLS * 4
        mapped = row_bytes // unit * unit
        tail = {"tail_offset": mapped, "tail_rows": rows, "tail_bytes": row_bytes - mapped}
        if rows == 1:
            rows, mapped = mapped // unit, unit
        cols = mapped // 4
        box_cols = min(FOLD_COLS, cols)
        box_rows = min(256, tile_bytes // (box_cols * 4))
        return Boxes(rows, cols, src_stride, dst_stride, box_rows, box_cols, **tail)

    @property
    def box_bytes(self) -> int:
        return self.box_rows * self.box_cols * 4

    @property
    def boxes_per_row(self) -> int:
        return ceil(self.cols / self.box_cols)

    @property
    def num_boxes(self) -> int:
        return ceil(self.rows / self.box_rows) * self.boxes_per_row

    def map(self, tensor: str, stride: int) -> TensorMap:
        box = (self.box_cols, self.box_rows)
        return TensorMap(tensor, "int32", (self.cols, self.rows), (stride,), box)


# ---- programs ----------------------------------------------------------------------------------


def _num_lanes(layout: Layout) -> int:
    """Threads side by side on a row: a power of two, all of the thread block for long rows."""
    vectors = ceil(layout.row_bytes / 16)
    return min(THREADS, 1 << max(vectors - 1, 0).bit_length())


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    layout = Layout.of(problem)
    if layout.bytes == 0:
        return Program(())
    num_lanes, unroll = _num_lanes(layout), config["unroll"]
    is_wide = num_lanes == THREADS
    tile_rows = 1 if is_wide else unroll * THREADS // num_lanes
    tile_bytes = 16 * (unroll * THREADS if is_wide else num_lanes)
    grid = (
        min(ceil(layout.row_bytes / tile_bytes), MAX_BLOCKS),
        min(ceil(layout.rows / tile_rows), MAX_BLOCKS_Y),
        1,
    )
    source = instance(
        "tma_copy/vectorized.cu", "tma_copy_vectorized", THREADS, unroll, config["streaming"]
    )
    params = (Pointer("src"), Pointer("dst"), *map(Int64, layout), Int32(num_lanes))
    return Program((Step(source, grid, params, THREADS),))


def _ring_program(
    variant: str, config: Config, gpu: Gpu, num_tiles: int, params: tuple[Param, ...]
) -> Program:
    """Persistent thread blocks, each with a ring of stages, copy ``num_tiles`` tiles."""
    tile_bytes, num_stages = config["tile_kb"] * KB, config["num_stages"]
    source = instance(
        f"tma_copy/{variant}.cu",
        f"tma_copy_{variant}",
        *(tile_bytes, num_stages, config["evict_first"]),
    )
    num_blocks = max(min(num_tiles, gpu.sms * config["blocks_per_sm"]), 1)
    step = Step(source, (num_blocks, 1, 1), params, RING_THREADS, tile_bytes * num_stages)
    return Program((step,))


def _bulk(problem: Problem, config: Config, gpu: Gpu) -> Program:
    layout = Layout.of(problem)
    if layout.bytes == 0:
        return Program(())
    num_tiles = ceil(layout.bytes / (config["tile_kb"] * KB))
    params = (Pointer("src"), Pointer("dst"), Int64(layout.bytes))
    return _ring_program("bulk", config, gpu, num_tiles, params)


def _tensor_map(problem: Problem, config: Config, gpu: Gpu) -> Program:
    layout = Layout.of(problem)
    if layout.bytes == 0:
        return Program(())
    boxes = Boxes.of(layout, config["tile_kb"] * KB)
    params = (
        boxes.map("src", boxes.src_stride),
        boxes.map("dst", boxes.dst_stride),
        Pointer("src"),
        Pointer("dst"),
        *map(Int64, (boxes.tail_offset, boxes.tail_rows, boxes.tail_bytes)),
        *map(Int64, (layout.src_stride, layout.dst_stride)),
        Int32(boxes.box_cols),
        Int32(boxes.box_rows),
        Int32(boxes.box_bytes),
        Int64(boxes.num_boxes),
        Int64(boxes.boxes_per_row),
    )
    return _ring_program("tensor_map", config, gpu, boxes.num_boxes, params)


# ---- which configurations serve ----------------------------------------------------------------


def _block_bytes(config: Config) -> int:
    """Shared memory of a thread block: its stages, and no more than 1 KB for their barriers."""
    return int(config["tile_kb"] * KB * config["num_stages"] + KB)


def _in_flight_kb(config: Config) -> int:
    """KB that an SM loads at a time in the steady state, when half of the stages are stored."""
    num_stages = config["num_stages"]
    return int(config["tile_kb"] * (num_stages - num_stages // 2) * config["blocks_per_sm"])


def _illegal_ring(config: Config, gpu: Gpu) -> str | None:
    if _block_bytes(config) > gpu.shared_bytes:
        return (
            f"the stages take {_block_bytes(config) // KB} KB of shared memory, and {gpu.name} "
            f"has {gpu.shared_bytes // KB}"
        )
    return None


def _illegal_bulk(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if Layout.of(problem).rows > 1:
        return "a bulk copy moves one contiguous span, and these rows are strided"
    return _illegal_ring(config, gpu)


def _illegal_tensor_map(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    layout = Layout.of(problem)
    if layout.src_stride % 16 or layout.dst_stride % 16:
        return "a tensor map needs rows that begin a multiple of 16 bytes apart"
    if layout.rows == 1 and layout.bytes < FOLD_COLS * 4:
        return f"a span of {layout.bytes} bytes does not fill a box's row of {FOLD_COLS * 4}"
    if layout.row_bytes < 16:
        return f"a tensor map needs rows of 16 bytes or more, and these have {layout.row_bytes}"
    if max(layout.src_stride, layout.dst_stride) >= 2**40 or layout.rows >= 2**31:
        return "a tensor map has fewer than 2^31 rows, which begin less than 2^40 bytes apart"
    if layout.rows > 1 and layout.row_bytes >= 2**31:
        return "a tensor map's rows are shorter than 2^31 bytes"
    return _illegal_ring(config, gpu)


def _unpromising_ring(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if Layout.of(problem).bytes > LARGE_BYTES and not 24 <= _in_flight_kb(config) <= 96:
        return f"{_in_flight_kb(config)} KB in flight on an SM; large copies need 24 to 96"
    num_blocks = config["blocks_per_sm"]
    if _block_bytes(config) * num_blocks > gpu.shared_bytes:
        return (
            f"{num_blocks} thread blocks of {_block_bytes(config) // KB} KB do not fit in the "
            f"{gpu.shared_bytes // KB} KB of an SM's shared memory"
        )
    return None


# ---- which one without measuring ---------------------------------------------------------------


def _default_ring(problem: Problem, gpu: Gpu) -> Config:
    """48 KB of loads and 48 KB of stores in flight on an SM; small copies use all SMs."""
    is_large = Layout.of(problem).bytes > LARGE_BYTES
    return Config(
        tile_kb=16 if is_large else 4, num_stages=6, blocks_per_sm=1, evict_first=is_large
    )


STRIDED_INSTRUCTIONS = 330
"""Instructions for a vector of strided rows: 64-bit divisions, and tests for the ends of a row."""
ADDRESS_US = 0.4
"""Until a thread knows which row and which vectors are its own."""


def _estimate_vectorized(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, or for strided rows the instructions that find each vector's place.

    Unstreamed stores of several vectors a thread fill large copies better; small copies have more
    threads with a vector each.
    """
    layout, resident = Layout.of(problem), 768 // THREADS  # thread blocks on an SM
    vectors = layout.bytes / 16
    blocks = ceil(vectors / (THREADS * config["unroll"]))
    kept = 1.0 if config["streaming"] else 1.005
    instructions = STRIDED_INSTRUCTIONS * vectors if layout.rows > 1 else 0.0
    us = stream_us(
        2 * layout.bytes, gpu, blocks=blocks, rounds=blocks / (gpu.sms * resident),
        share=0.98 * kept, instructions=instructions,
    )  # fmt: skip
    return us + ADDRESS_US


def _estimate_ring(is_box: bool, problem: Problem, config: Config, gpu: Gpu) -> float:
    """The ring, then the bytes that tensor maps leave out, each by a thread of the other warps."""
    layout, tile_bytes = Layout.of(problem), config["tile_kb"] * KB
    loads, per_sm = config["num_stages"] / 2, config["blocks_per_sm"]  # the others are stored
    us = ring_copy_us(
        layout.bytes, gpu, tile_bytes=tile_bytes, loads=loads, per_sm=per_sm, boxes=is_box
    )
    if is_box:
        boxes, tail_threads = Boxes.of(layout, tile_bytes), gpu.sms * per_sm * (RING_THREADS - 32)
        us += LOAD_US * (boxes.tail_rows * boxes.tail_bytes // tail_threads)
    # Equal but for this: what large copies evict from L2 at once leaves room for stores.
    return us * (0.999 if config["evict_first"] and layout.bytes > LARGE_BYTES else 1.0)


RING_SPACE = {
    "tile_kb": (4, 8, 16),
    "num_stages": (4, 6, 8),
    "blocks_per_sm": (1, 2),
    "evict_first": (False, True),
}

IMPLEMENTATIONS = (
    Implementation(
        entry="tma_copy",
        language="cuda",
        variant="vectorized",
        summary="16-byte loads and stores, several in flight; any strides and alignment",
        archs=("sm_80+",),
        space={"unroll": (1, 2, 4), "streaming": (True, False)},
        program=_vectorized,
        estimate=_estimate_vectorized,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=0,
    ),
    Implementation(
        entry="tma_copy",
        language="cuda",
        variant="bulk",
        summary="a ring of 1-D bulk copies through shared memory; contiguous spans",
        archs=("sm_90+",),
        space=RING_SPACE,
        illegal=_illegal_bulk,
        unpromising=_unpromising_ring,
        default=_default_ring,
        program=_bulk,
        estimate=partial(_estimate_ring, False),
        techniques={"bulk copy": "UBLKCP.S.G", "bulk store": "UBLKCP.G.S", "mbarrier": "SYNCS"},
        rank=1,
    ),
    Implementation(
        entry="tma_copy",
        language="cuda",
        variant="tensor_map",
        summary="a ring of 2-D tensor-map boxes; strided rows, edges clipped by the hardware",
        archs=("sm_90+",),
        space=RING_SPACE,
        illegal=_illegal_tensor_map,
        unpromising=_unpromising_ring,
        default=_default_ring,
        program=_tensor_map,
        estimate=partial(_estimate_ring, True),
        techniques={"tma": "UTMALDG", "tma store": "UTMASTG", "mbarrier": "SYNCS"},
        rank=2,
    ),
)
