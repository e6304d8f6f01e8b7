"""`tma_copy` in CuTe DSL: vector loads and stores, and boxes through shared memory by TMA.

Both kernels copy bytes, whatever the element type. The device code is in modules that import the
DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from kernelcat.catalog.cost_model import START_US, ring_copy_us, stream_us
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
from kernelcat.reference.tma_copy import ENTRY
from kernelcat.runtime.gpu import KB, MB, Gpu

UNIT = 16
"""Bytes of the widest vector; TMA's strides are multiples of as many."""

LARGE = 8 * MB
"""Bytes moved from which a copy is better off with more bytes in flight a thread block."""

VECTOR_INSTRUCTIONS = 60
"""Instructions for a vector: its address, its load and its store."""
ADDRESS_US = 0.2
"""Until a thread block knows which part of which row is its own."""

THREADS = 256
KINDS = ("*uint8", "*uint8")
TENSORS = (Pointer("src"), Pointer("dst"))


@dataclass(frozen=True)
class _Rows:
    """A copy as rows of bytes; one long row where both matrices are contiguous."""

    num_rows: int
    row_bytes: int
    src_stride: int
    dst_stride: int

    @staticmethod
    def of(problem: Problem) -> _Rows:
        size = itemsize(problem["dtype"])
        num_rows, row_bytes = problem["rows"], problem["cols"] * size
        src, dst = problem["src_stride"] * size, problem["dst_stride"] * size
        if num_rows == 1 or src == dst == row_bytes:
            aligned = ceil(num_rows * row_bytes / UNIT) * UNIT
            return _Rows(1, num_rows * row_bytes, aligned, aligned)
        return _Rows(num_rows, row_bytes, src, dst)


def _is_empty(problem: Problem) -> bool:
    return problem["rows"] * problem["cols"] == 0


# vectorized -------------------------------------------------------------------------------------


def _num_chunks(problem: Problem, config: Config) -> int:
    """Thread blocks of the vectorized kernel: each copies part of one row."""
    rows = _Rows.of(problem)
    vectors = rows.row_bytes // _vector_bytes(rows)
    return rows.num_rows * max(1, ceil(vectors / (THREADS * config["unroll"])))


def _vector_bytes(rows: _Rows) -> int:
    return gcd(UNIT, rows.src_stride, rows.dst_stride)


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    rows = _Rows.of(problem)
    num_vectors = rows.row_bytes // _vector_bytes(rows)
    if max(num_vectors, _num_chunks(problem, config)) >= 1 << 31:
        return "more vectors than 32-bit indices reach"
    return None


def _vectorized_default(problem: Problem, gpu: Gpu) -> Config:
    return Config(unroll=4 if ENTRY.bytes_moved(problem) > LARGE else 1)


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    rows = _Rows.of(problem)
    constants = (("vector_bytes", _vector_bytes(rows)), ("unroll", config["unroll"]))
    kinds = (*KINDS, "int32", "int64", "int64", "int64", "int32")
    source = CuteSource("tma_copy.vectorized:Vectorized", kinds, constants)
    num_ctas = _num_chunks(problem, config)
    sizes = (rows.row_bytes, rows.src_stride, rows.dst_stride)
    params = (*TENSORS, Int32(rows.num_rows), *map(Int64, sizes), Int32(num_ctas))
    return Program((Step(source, (num_ctas, 1, 1), params, block=THREADS),))


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory; large copies are fastest as many thread blocks of one vector a thread."""
    if _is_empty(problem):
        return START_US
    moved, unroll, rows = ENTRY.bytes_moved(problem), config["unroll"], _Rows.of(problem)
    chunks = _num_chunks(problem, config)
    resident = 2048 // THREADS  # thread blocks on an SM
    is_full = chunks > resident * gpu.sms
    share = 1.0 - 0.005 * (unroll - 1) if is_full else 1.0
    instructions = VECTOR_INSTRUCTIONS * moved / 2 / _vector_bytes(rows)
    us = stream_us(
        moved, gpu, blocks=chunks, rounds=chunks / (gpu.sms * resident), share=share,
        instructions=instructions,
    )  # fmt: skip
    return us + ADDRESS_US


# tensor_map -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Boxes:
    """The matrix and the box of a tensor map, in elements of ``element_bytes``."""

    element_bytes: int
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
        rows = _Rows.of(problem)
        if rows.num_rows == 1 and rows.row_bytes % UNIT == 0:
            return _Boxes._folded(rows.row_bytes // 4, box_bytes)
        size = gcd(4, rows.row_bytes)
        cols = rows.row_bytes // size
        box_cols = min(256, max(UNIT // size, 1 << (cols - 1).bit_length()))
        box_rows = min(256, box_bytes // (box_cols * size))
        strides = rows.src_stride // size, rows.dst_stride // size
        return _Boxes(size, rows.num_rows, cols, *strides, box_rows, box_cols)

    @staticmethod
    def _folded(words: int, box_bytes: int) -> _Boxes:
        """Contiguous words as rows of up to 1 KB, so that a box is contiguous as well."""
        cols = gcd(256, words)
        box_rows = min(256, box_bytes // (4 * cols))
        return _Boxes(4, words // cols, cols, cols, cols, box_rows, cols)


def _illegal_tensor_map(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    rows = _Rows.of(problem)
    if rows.src_stride % UNIT or rows.dst_stride % UNIT:
        return f"strides must be multiples of {UNIT} bytes: TMA has no others"
    if rows.row_bytes % UNIT:
        return f"rows of {rows.row_bytes} bytes: a TMA store writes whole units of {UNIT} bytes"
    boxes = _Boxes.of(problem, config["box_bytes"])
    if max(boxes.rows, boxes.cols) > 1 << 32 or boxes.count >= 1 << 31:
        return "a dimension is larger than a tensor map can describe"
    ctas_per_sm = config["ctas_per_sm"]
    shared = (config["box_bytes"] * config["stages"] + 2 * KB) * ctas_per_sm
    if shared > gpu.shared_bytes:
        return f"{ctas_per_sm} rings of boxes take {shared} bytes; an SM has {gpu.shared_bytes}"
    return None


def _tensor_map_default(problem: Problem, gpu: Gpu) -> Config:
    return Config(
        box_bytes=16 * KB if ENTRY.bytes_moved(problem) > LARGE else 8 * KB,
        stages=4,
        ctas_per_sm=2 if gpu.shared_bytes > 160 * KB else 1,
    )


def _tensor_map_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    boxes = _Boxes.of(problem, config["box_bytes"])
    constants = (
        ("element_bytes", boxes.element_bytes),
        ("box_rows", boxes.box_rows),
        ("box_cols", boxes.box_cols),
        ("num_stages", config["stages"]),
    )
    kinds = (*KINDS, "int64", "int64", "int64", "int64", "int32")
    source = CuteSource("tma_copy.tensor_map:TensorMap", kinds, constants)
    num_ctas = min(boxes.count, gpu.sms * config["ctas_per_sm"])
    sizes = (boxes.rows, boxes.cols, boxes.src_stride, boxes.dst_stride)
    params = (*TENSORS, *map(Int64, sizes), Int32(num_ctas))
    return Program((Step(source, (num_ctas, 1, 1), params, block=32),))


def _tensor_map_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    loads, per_sm = config["stages"] / 2, config["ctas_per_sm"]  # the others are stored
    num_bytes, box_bytes = ENTRY.bytes_moved(problem) // 2, config["box_bytes"]
    return ring_copy_us(
        num_bytes, gpu, tile_bytes=box_bytes, loads=loads, per_sm=per_sm, boxes=True
    )


IMPLEMENTATIONS = (
    Implementation(
        entry="tma_copy",
        language="cute",
        variant="vectorized",
        summary="vectors of up to 16 bytes, several of a thread in flight",
        archs=("sm_80+",),
        space={"unroll": (1, 2, 4, 8)},
        illegal=_illegal_vectorized,
        default=_vectorized_default,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG", "vector store": "STG"},
        rank=0,
    ),
    Implementation(
        entry="tma_copy",
        language="cute",
        variant="tensor_map",
        summary="persistent ring of TMA boxes; TMA leaves out what lies outside the matrix",
        archs=("sm_90+",),
        space={"box_bytes": (16384, 8192), "stages": (6, 4), "ctas_per_sm": (2, 1)},
        illegal=_illegal_tensor_map,
        default=_tensor_map_default,
        program=_tensor_map_program,
        estimate=_tensor_map_estimate,
        techniques={"tma load": "UTMALDG", "tma store": "UTMASTG", "mbarrier": "SYNCS"},
        rank=2,
    ),
)
