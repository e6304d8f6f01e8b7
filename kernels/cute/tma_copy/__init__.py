"""`tma_copy` in CuTe DSL: vector loads and stores, and boxes through shared memory by TMA.

Both copy bytes: the element type only tells how many. The device code is in modules that import the
DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit.cute import CuteSource
from kernelcat.runtime.gpu import Gpu

UNIT = 16
"""Bytes of the widest vector, and what TMA's strides are multiples of."""

THREADS = 256
BYTES = ("*uint8", "*uint8")
TENSORS = (Pointer("src"), Pointer("dst"))


@dataclass(frozen=True)
class _Bytes:
    """A copy seen as bytes; one long row where the matrices are contiguous."""

    rows: int
    row: int
    src_stride: int
    dst_stride: int

    @staticmethod
    def of(problem: Problem) -> _Bytes:
        size = itemsize(problem["dtype"])
        rows, row = problem["rows"], problem["cols"] * size
        src, dst = problem["src_stride"] * size, problem["dst_stride"] * size
        if rows == 1 or src == dst == row:
            aligned = ceil(rows * row / UNIT) * UNIT
            return _Bytes(1, rows * row, aligned, aligned)
        return _Bytes(rows, row, src, dst)


def _nothing(problem: Problem) -> bool:
    return problem["rows"] * problem["cols"] == 0


def _moved(problem: Problem) -> int:
    return 2 * problem["rows"] * problem["cols"] * itemsize(problem["dtype"])


# vectorized -------------------------------------------------------------------------------------


def _chunks(problem: Problem, config: Config) -> int:
    """CTAs of the vectorized kernel: each copies part of one row."""
    data = _Bytes.of(problem)
    vectors = data.row // _vector_bytes(data)
    return data.rows * max(1, ceil(vectors / (THREADS * config["unroll"])))


def _vector_bytes(data: _Bytes) -> int:
    return gcd(UNIT, data.src_stride, data.dst_stride)


def _vectorized_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    data = _Bytes.of(problem)
    if _nothing(problem):
        return None
    if data.row // _vector_bytes(data) >= 1 << 31 or _chunks(problem, config) >= 1 << 31:
        return "more vectors than 32-bit indices reach"
    return None


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _nothing(problem):
        return Program(())
    data = _Bytes.of(problem)
    constants = (("vector_bytes", _vector_bytes(data)), ("unroll", config["unroll"]))
    kinds = (*BYTES, "int32", "int64", "int64", "int64", "int32")
    source = CuteSource("tma_copy.vectorized:Vectorized", kinds, constants)
    grid = _chunks(problem, config)
    sizes = (Int32(data.rows), Int64(data.row), Int64(data.src_stride), Int64(data.dst_stride))
    return Program((Step(source, (grid, 1, 1), (*TENSORS, *sizes, Int32(grid)), block=THREADS),))


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    narrow = UNIT / _vector_bytes(_Bytes.of(problem)) if not _nothing(problem) else 1
    return copy_us(_moved(problem), gpu, {1: 0.80, 2: 0.84, 4: 0.86, 8: 0.85}[config["unroll"]]) * (
        1 + 0.3 * (narrow - 1)
    )


# tensor_map -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Boxes:
    """The matrix and the box TMA works with, in elements of ``element`` bytes."""

    element: int
    rows: int
    cols: int
    src_stride: int
    dst_stride: int
    box_rows: int
    box_cols: int

    @property
    def count(self) -> int:
        return ceil(self.rows / self.box_rows) * ceil(self.cols / self.box_cols)

    @staticmethod
    def of(problem: Problem, box_bytes: int) -> _Boxes:
        data = _Bytes.of(problem)
        if data.rows == 1 and data.row % UNIT == 0:
            return _Boxes._folded(data.row // 4, box_bytes)
        element = gcd(4, data.row)
        box_cols = min(256, max(UNIT // element, 1 << (data.row // element - 1).bit_length()))
        box_rows = min(256, box_bytes // (box_cols * element))
        strides = data.src_stride // element, data.dst_stride // element
        return _Boxes(element, data.rows, data.row // element, *strides, box_rows, box_cols)

    @staticmethod
    def _folded(words: int, box_bytes: int) -> _Boxes:
        """Contiguous data as rows of up to 1 KB, so that a box is one piece of memory."""
        cols = gcd(256, words)
        box_rows = min(256, box_bytes // (4 * cols))
        return _Boxes(4, words // cols, cols, cols, cols, box_rows, cols)


def _tensor_map_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _nothing(problem):
        return None
    data = _Bytes.of(problem)
    if data.src_stride % UNIT or data.dst_stride % UNIT:
        return "TMA needs strides that are multiples of 16 bytes"
    if data.row % UNIT:
        return f"rows of {data.row} bytes: a TMA store writes whole units of 16"
    boxes = _Boxes.of(problem, config["box_bytes"])
    if max(boxes.rows, boxes.cols) > 1 << 32 or boxes.count >= 1 << 31:
        return "a dimension is beyond what a tensor map can describe"
    shared = config["box_bytes"] * config["stages"] * config["ctas_per_sm"]
    if shared + 2048 * config["ctas_per_sm"] > gpu.shared_bytes:
        return f"{shared} bytes of boxes do not fit in an SM's {gpu.shared_bytes}"
    return None


def _tensor_map_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _nothing(problem):
        return Program(())
    boxes = _Boxes.of(problem, config["box_bytes"])
    constants = (
        ("element_bytes", boxes.element),
        ("box_rows", boxes.box_rows),
        ("box_cols", boxes.box_cols),
        ("stages", config["stages"]),
    )
    kinds = (*BYTES, "int64", "int64", "int64", "int64", "int32")
    source = CuteSource("tma_copy.tensor_map:TensorMap", kinds, constants)
    grid = min(boxes.count, gpu.sms * config["ctas_per_sm"])
    sizes = (boxes.rows, boxes.cols, boxes.src_stride, boxes.dst_stride)
    params = (*TENSORS, *map(Int64, sizes), Int32(grid))
    return Program((Step(source, (grid, 1, 1), params, block=32),))


def _tensor_map_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    in_flight = config["box_bytes"] * config["stages"] * config["ctas_per_sm"]
    return copy_us(_moved(problem), gpu, 0.88 * min(1.0, (in_flight / 65536) ** 0.1))


IMPLEMENTATIONS = (
    Implementation(
        entry="tma_copy",
        language="cute",
        variant="vectorized",
        summary="vectors of up to 16 bytes, several in flight a thread",
        archs=("sm_80+",),
        space={"unroll": (1, 2, 4, 8)},
        illegal=_vectorized_reject,
        default=lambda problem, gpu: Config(unroll=4 if _moved(problem) > 1 << 23 else 1),
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG", "vector store": "STG"},
        rank=0,
    ),
    Implementation(
        entry="tma_copy",
        language="cute",
        variant="tensor_map",
        summary="persistent ring of TMA boxes, out-of-bounds edges left to TMA",
        archs=("sm_90+",),
        space={"box_bytes": (16384, 8192), "stages": (6, 4), "ctas_per_sm": (2, 1)},
        illegal=_tensor_map_reject,
        default=lambda problem, gpu: Config(
            box_bytes=16384 if _moved(problem) > 1 << 23 else 8192,
            stages=4,
            ctas_per_sm=2 if gpu.shared_bytes > 160 * 1024 else 1,
        ),
        program=_tensor_map_program,
        estimate=_tensor_map_estimate,
        techniques={"tma load": "UTMALDG", "tma store": "UTMASTG", "mbarrier": "SYNCS"},
        rank=2,
    ),
)
