"""`tma_copy` in Triton: through registers (vectorized), or by TMA descriptors (tensor_map)."""

from dataclasses import dataclass
from itertools import chain
from math import ceil, gcd

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.tma_copy.device:"

MIN_BYTES_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 48 << 10, 128 << 10
"""Bytes that an SM has in flight where loads cover the latency of memory, and no more."""
REGISTER_BYTES = 128 << 10
"""Bytes of tiles that the registers of an SM hold."""
ACCESS_INSTRUCTIONS = 30
"""Instructions for a load and its store, address and mask included."""
PROGRAM_FACTOR = 1.01
"""All threads of a program wait for each tile, where CUDA's ring has one thread."""
RESERVED_BYTES = 2048
"""Shared memory of a program besides its tiles: what the GPU reserves, and barriers."""


@dataclass(frozen=True)
class Matrix:
    """The copied matrix: rows of ``cols`` elements of ``size`` bytes each; strides in elements."""

    rows: int
    cols: int
    src_stride: int
    dst_stride: int
    size: int

    @staticmethod
    def of(problem: Problem) -> "Matrix":
        """The problem's matrix; a contiguous copy becomes one row."""
        rows, cols = problem["rows"], problem["cols"]
        strides = problem["src_stride"], problem["dst_stride"]
        size = itemsize(problem["dtype"])
        if rows == 1 or strides == (cols, cols):
            return Matrix(1, rows * cols, rows * cols, rows * cols, size)
        return Matrix(rows, cols, *strides, size)

    def folded(self, width_bytes: int) -> "Matrix":
        """One row whose bytes are a multiple of ``width_bytes`` as rows of ``width_bytes``."""
        width = width_bytes // self.size
        if self.rows > 1 or self.cols % width:
            return self
        return Matrix(self.cols // width, width, width, width, self.size)

    @property
    def alignment(self) -> int:
        """Elements of the widest access, 16 bytes at most, that the start of every row allows."""
        return gcd(self.src_stride, self.dst_stride, 16 // self.size)


def _register_tile(matrix: Matrix, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile: as wide as the matrix, and as high as ``tile_bytes`` allow."""
    elements = config["tile_bytes"] // matrix.size
    cols = min(1 << (matrix.cols - 1).bit_length(), elements)
    return elements // cols, cols


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    matrix, dtype = Matrix.of(problem), problem["dtype"]
    block_rows, block_cols = _register_tile(matrix, config)
    launch = triton.step(
        KERNELS + "vectorized",
        (ceil(matrix.cols / block_cols), ceil(matrix.rows / block_rows), 1),
        {
            "src": triton.pointer("src", dtype),
            "dst": triton.pointer("dst", dtype),
            "rows": triton.integer(matrix.rows, divisor=1),
            "cols": triton.integer(matrix.cols, divisor=1),
            "src_stride": triton.integer(matrix.src_stride),
            "dst_stride": triton.integer(matrix.dst_stride),
        },
        {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "VECTOR": matrix.alignment},
        num_warps=config["warps"],
    )
    return Program((launch,))


def _descriptor_tile(matrix: Matrix, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile that a descriptor loads."""
    return config["tile_bytes"] // config["width_bytes"], config["width_bytes"] // matrix.size


def _tensor_map(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    matrix, dtype = Matrix.of(problem).folded(config["width_bytes"]), problem["dtype"]
    block = _descriptor_tile(matrix, config)
    num_programs = gpu.sms * config["per_sm"]
    shape = (matrix.rows, matrix.cols)
    launch = triton.step(
        KERNELS + "tensor_map",
        (min(num_programs, _num_tiles(matrix, block)), 1, 1),
        {
            "src": triton.descriptor("src", dtype, shape, block, matrix.src_stride),
            "dst": triton.descriptor("dst", dtype, shape, block, matrix.dst_stride),
            "rows": triton.integer(matrix.rows, divisor=1),
            "cols": triton.integer(matrix.cols, divisor=1),
        },
        {
            "BLOCK_ROWS": block[0],
            "BLOCK_COLS": block[1],
            "NUM_PROGRAMS": num_programs,
            "STAGES": config["stages"],
        },
        num_warps=4,
    )
    return Program((launch,))


def _num_tiles(matrix: Matrix, block: tuple[int, int]) -> int:
    return ceil(matrix.rows / block[0]) * ceil(matrix.cols / block[1])


def _is_empty(problem: Problem) -> bool:
    return problem["rows"] == 0 or problem["cols"] == 0


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    matrix = Matrix.of(problem)
    tiles_down = ceil(matrix.rows / _register_tile(matrix, config)[0])
    if tiles_down > MAX_GRID_Y:
        return f"{tiles_down} tiles of rows: the second axis of a grid has at most {MAX_GRID_Y}"
    return None


def _illegal_tensor_map(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    width = config["width_bytes"]
    matrix = Matrix.of(problem).folded(width)
    row_bytes = matrix.cols * matrix.size
    if matrix.rows == 1 and row_bytes > width:
        return f"{row_bytes} contiguous bytes must be a multiple of width_bytes={width}"
    for stride in (matrix.src_stride, matrix.dst_stride):
        if stride * matrix.size % 16:
            return f"rows {stride * matrix.size} bytes apart: TMA needs a multiple of 16"
    if row_bytes % 16:
        return f"rows of {row_bytes} bytes: a TMA store writes a multiple of 16"
    tiles_bytes = config["tile_bytes"] * config["stages"] + RESERVED_BYTES
    if tiles_bytes > gpu.shared_bytes:
        return f"{tiles_bytes} bytes of tiles are more shared memory than a program can have"
    return None


def _unpromising_tensor_map(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    in_flight = config["tile_bytes"] * config["stages"] * config["per_sm"]
    if in_flight + RESERVED_BYTES * config["per_sm"] > gpu.shared_bytes:
        return f"{config['per_sm']} programs with {in_flight} bytes of tiles do not fit on an SM"
    if in_flight < MIN_BYTES_IN_FLIGHT:
        return f"{in_flight} bytes of tiles on an SM are too few to cover the latency of memory"
    if in_flight > MAX_BYTES_IN_FLIGHT:
        return f"{in_flight} bytes of tiles on an SM are more than cover the latency of memory"
    return None


def _default_vectorized(problem: Problem, gpu: Gpu) -> Config:
    """Tiles of 16 KB, or smaller ones where larger ones would be fewer than four for each SM."""
    total_bytes = problem["rows"] * problem["cols"] * itemsize(problem["dtype"])
    sizes = (size for size in (16384, 8192) if total_bytes >= 4 * gpu.sms * size)
    config = Config(tile_bytes=next(sizes, 4096), warps=4)
    if VECTORIZED.illegal(config, problem, gpu):
        return Config(tile_bytes=32768, warps=4)
    return config


def _default_tensor_map(problem: Problem, gpu: Gpu) -> Config:
    """Two programs on an SM with three tiles of 16 KB each; wide tiles where rows lie apart."""
    width = 128 if Matrix.of(problem).rows == 1 else 512
    preferred = Config(tile_bytes=16384, width_bytes=width, stages=3, per_sm=2)
    promising = list(TENSOR_MAP.configs(problem, gpu))
    if preferred in promising:
        return preferred
    return next(chain(promising, TENSOR_MAP.legal(problem, gpu)), preferred)


def _estimate_vectorized(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory; narrow accesses are more instructions, and tiles of whole registers start late."""
    size = itemsize(problem["dtype"])
    num_bytes, tile_bytes = problem["rows"] * problem["cols"] * size, config["tile_bytes"]
    threads = 32 * config["warps"]
    tiles = ceil(num_bytes / tile_bytes)
    resident = min(2048 // threads, REGISTER_BYTES // tile_bytes)
    access_bytes = min(16, Matrix.of(problem).alignment * size)
    instructions = ACCESS_INSTRUCTIONS * num_bytes / access_bytes
    return cost_model.stream_us(
        2 * num_bytes, gpu, blocks=tiles, rounds=tiles / (gpu.sms * resident),
        share=0.975, instructions=instructions,
    ) + 0.01 * tile_bytes / 4096  # fmt: skip


def _estimate_tensor_map(problem: Problem, config: Config, gpu: Gpu) -> float:
    num_bytes = problem["rows"] * problem["cols"] * itemsize(problem["dtype"])
    loads = config["stages"] / 2  # the others are stored
    us = cost_model.ring_copy_us(
        num_bytes, gpu, tile_bytes=config["tile_bytes"], loads=loads, per_sm=config["per_sm"],
        boxes=True,
    )  # fmt: skip
    return us * PROGRAM_FACTOR


VECTORIZED = Implementation(
    entry="tma_copy",
    language="triton",
    variant="vectorized",
    summary="one tile a program through registers, 16-byte loads and stores; any strides",
    archs=("sm_80+",),
    space={"tile_bytes": (4096, 8192, 16384, 32768), "warps": (4, 8)},
    illegal=_illegal_vectorized,
    default=_default_vectorized,
    program=_vectorized,
    estimate=_estimate_vectorized,
    rank=0,
)

TENSOR_MAP = Implementation(
    entry="tma_copy",
    language="triton",
    variant="tensor_map",
    summary="persistent programs load and store tiles through 2-D tensor descriptors",
    archs=("sm_90+",),
    space={
        "tile_bytes": (16384, 32768),
        "width_bytes": (128, 512),
        "stages": (2, 3, 4),
        "per_sm": (1, 2, 4),
    },
    illegal=_illegal_tensor_map,
    unpromising=_unpromising_tensor_map,
    default=_default_tensor_map,
    program=_tensor_map,
    estimate=_estimate_tensor_map,
    techniques={"tma": "UTMALDG", "tma_store": "UTMASTG"},
    rank=2,
)

IMPLEMENTATIONS = (VECTORIZED, TENSOR_MAP)
