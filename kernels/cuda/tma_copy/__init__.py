"""`tma_copy` in CUDA C++: ordinary vector loads, 1-D bulk copies, 2-D tensor maps.

That about 48 KB in flight an SM saturate an H200, and that the bulk engine wants 128-byte
alignment, is known from public measurements of the engine.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit.cuda import CudaSource
from kernelcat.runtime.gpu import KB, MB, Gpu

THREADS = 256
RING_THREADS = 128
MAX_GRID_Y = 65535
MAX_GRID_X = 2**31 - 1
LARGE = 4 * MB
"""Bytes from which a copy takes long enough to fill a pipeline."""
FOLD_COLS = 256
"""Elements a row when a span is folded into a matrix: the longest row a box can have."""


class Layout(NamedTuple):
    """Rows in bytes; a contiguous matrix is one row."""

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
    """How a layout is seen through tensor maps: 4-byte elements, the box, and the maps' end.

    Row r of the maps begins r * stride bytes into the tensor. Maps leave out ``tail_bytes`` bytes,
    from ``tail_offset`` on, of each of ``tail_rows`` rows.
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
        """Rows up to their last whole 16 bytes; a span is folded into rows of one box."""
        rows, row_bytes, src_stride, dst_stride = layout
        unit = 16
        if rows == 1:
            unit = src_stride = dst_stride = FOLD_COLS * 4
        mapped = row_bytes // unit * unit
        tail = (mapped, rows, row_bytes - mapped)
        if rows == 1:
            rows, mapped = mapped // unit, unit
        cols = mapped // 4
        box_cols = min(FOLD_COLS, cols)
        box_rows = min(256, tile_bytes // (box_cols * 4))
        return Boxes(rows, cols, src_stride, dst_stride, box_rows, box_cols, *tail)

    @property
    def box_bytes(self) -> int:
        return self.box_rows * self.box_cols * 4

    @property
    def boxes_per_row(self) -> int:
        return ceil(self.cols / self.box_cols)

    @property
    def count(self) -> int:
        return ceil(self.rows / self.box_rows) * self.boxes_per_row

    def map(self, tensor: str, stride: int) -> TensorMap:
        box = (self.box_cols, self.box_rows)
        return TensorMap(tensor, "int32", (self.cols, self.rows), (stride,), box)


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _lanes(layout: Layout) -> int:
    """Threads side by side on a row: a power of two, all of the block for long rows."""
    vectors = ceil(layout.row_bytes / 16)
    return min(THREADS, 1 << max(vectors - 1, 0).bit_length())


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    layout = Layout.of(problem)
    if layout.bytes == 0:
        return Program(())
    lanes, unroll = _lanes(layout), config["unroll"]
    wide = lanes == THREADS
    tile_rows = 1 if wide else unroll * THREADS // lanes
    tile_bytes = 16 * (unroll * THREADS if wide else lanes)
    grid = (ceil(layout.row_bytes / tile_bytes), min(ceil(layout.rows / tile_rows), MAX_GRID_Y), 1)
    kernel = f"kernelcat::tma_copy_vectorized<{THREADS}, {unroll}, {_bool(config['streaming'])}>"
    params = (Pointer("src"), Pointer("dst"), *map(Int64, layout), Int32(lanes))
    source = CudaSource("tma_copy/vectorized.cu", kernel)
    return Program((Step(source, (min(grid[0], MAX_GRID_X), grid[1], 1), params, THREADS),))


def _ring_step(
    variant: str, config: Config, gpu: Gpu, tiles: int, params: tuple[object, ...]
) -> Program:
    tile_bytes, stages = config["tile_kb"] * KB, config["num_stages"]
    arguments = f"{tile_bytes}, {stages}, {_bool(config['evict_first'])}"
    source = CudaSource(f"tma_copy/{variant}.cu", f"kernelcat::tma_copy_{variant}<{arguments}>")
    blocks = max(min(tiles, gpu.sms * config["blocks_per_sm"]), 1)
    shared = tile_bytes * stages
    return Program((Step(source, (blocks, 1, 1), params, RING_THREADS, shared),))


def _bulk(problem: Problem, config: Config, gpu: Gpu) -> Program:
    layout = Layout.of(problem)
    if layout.bytes == 0:
        return Program(())
    tiles = ceil(layout.bytes / (config["tile_kb"] * KB))
    params = (Pointer("src"), Pointer("dst"), Int64(layout.bytes))
    return _ring_step("bulk", config, gpu, tiles, params)


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
        Int64(boxes.count),
        Int64(boxes.boxes_per_row),
    )
    return _ring_step("tensor_map", config, gpu, boxes.count, params)


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return None


def _in_flight_kb(config: Config) -> int:
    """KB of loads under way in an SM once stores keep up: half of the stages wait for theirs."""
    stages = config["num_stages"]
    return int(config["tile_kb"] * (stages - stages // 2) * config["blocks_per_sm"])


def _reject_ring(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if Layout.of(problem).bytes > LARGE and not 24 <= _in_flight_kb(config) <= 96:
        return f"{_in_flight_kb(config)} KB in flight an SM; large copies want 24 to 96"
    shared = config["tile_kb"] * KB * config["num_stages"] + KB
    if shared * config["blocks_per_sm"] > gpu.shared_bytes:
        return (
            f"{config['blocks_per_sm']} blocks of {shared // KB} KB do not fit in an SM's "
            f"{gpu.shared_bytes // KB} KB of shared memory"
        )
    return None


def _reject_bulk(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if Layout.of(problem).rows > 1:
        return "a bulk copy moves one contiguous span, and these rows are strided"
    return _reject_ring(config, problem, gpu)


def _reject_tensor_map(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    layout = Layout.of(problem)
    if layout.src_stride % 16 or layout.dst_stride % 16:
        return "a tensor map needs rows that are a multiple of 16 bytes apart"
    if layout.rows == 1 and layout.bytes < FOLD_COLS * 4:
        return f"a span under {FOLD_COLS * 4} bytes does not fill a box's row"
    if layout.row_bytes < 16:
        return "rows under 16 bytes are too short for a tensor map"
    if max(layout.src_stride, layout.dst_stride) >= 2**40 or layout.rows >= 2**31:
        return "a tensor map's rows are under 2^31 and under 2^40 bytes apart"
    if layout.rows > 1 and layout.row_bytes >= 2**31:
        return "a tensor map's rows are under 2^31 bytes long"
    return _reject_ring(config, problem, gpu)


def _default_vectorized(problem: Problem, gpu: Gpu) -> Config:
    return Config(unroll=4, streaming=True)


def _default_ring(problem: Problem, gpu: Gpu) -> Config:
    """48 KB of loads and as much of stores in flight an SM; small copies are spread thin."""
    large = Layout.of(problem).bytes > LARGE
    return Config(tile_kb=16 if large else 4, num_stages=6, blocks_per_sm=1, evict_first=large)


def _estimate_vectorized(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(2 * Layout.of(problem).bytes, gpu, 0.85 + 0.005 * config["unroll"])


def _estimate_ring(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes in flight up to 48 KB of loads an SM; a ring takes filling."""
    in_flight_kb = _in_flight_kb(config)
    efficiency = 0.90 * min(in_flight_kb / 48, 1) - 0.0001 * in_flight_kb
    bonus = 0.001 if config["evict_first"] else 0.0
    fill_us = 0.02 * config["tile_kb"]
    return copy_us(2 * Layout.of(problem).bytes, gpu, efficiency + bonus) + fill_us


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
        summary="16-byte loads and stores, several in flight a thread; any strides and alignment",
        archs=("sm_80+",),
        space={"unroll": (1, 2, 4), "streaming": (False, True)},
        illegal=_reject_vectorized,
        default=_default_vectorized,
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
        illegal=_reject_bulk,
        default=_default_ring,
        program=_bulk,
        estimate=_estimate_ring,
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
        illegal=_reject_tensor_map,
        default=_default_ring,
        program=_tensor_map,
        estimate=_estimate_ring,
        techniques={"tma": "UTMALDG", "tma store": "UTMASTG", "mbarrier": "SYNCS"},
        rank=2,
    ),
)
