"""`tma_copy` in Triton: vectorized (through registers) and tensor_map (through TMA descriptors)."""

from dataclasses import dataclass
from math import ceil, gcd

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit import triton
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.tma_copy.device:"

MIN_BYTES_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 48 << 10, 128 << 10


@dataclass(frozen=True)
class Matrix:
    """What is copied, as rows of ``cols`` elements of ``size`` bytes; strides in elements."""

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
        """A single row in lines of ``width_bytes``, where it divides into such."""
        width = width_bytes // self.size
        if self.rows > 1 or self.cols % width:
            return self
        return Matrix(self.cols // width, width, width, width, self.size)

    @property
    def alignment(self) -> int:
        """Elements in the widest access (to 16 bytes) that every row's start is aligned to."""
        return gcd(self.src_stride, self.dst_stride, 16 // self.size)


def _register_tile(matrix: Matrix, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile: as wide as the matrix, then as high as the bytes allow."""
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
    return config["tile_bytes"] // config["width_bytes"], config["width_bytes"] // matrix.size


def _tensor_map(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    matrix, dtype = Matrix.of(problem).folded(config["width_bytes"]), problem["dtype"]
    block = _descriptor_tile(matrix, config)
    programs = gpu.sms * config["per_sm"]
    shape = (matrix.rows, matrix.cols)
    launch = triton.step(
        KERNELS + "tensor_map",
        (min(programs, _tiles(matrix, block)), 1, 1),
        {
            "src": triton.descriptor("src", dtype, shape, block, matrix.src_stride),
            "dst": triton.descriptor("dst", dtype, shape, block, matrix.dst_stride),
            "rows": triton.integer(matrix.rows, divisor=1),
            "cols": triton.integer(matrix.cols, divisor=1),
        },
        {
            "BLOCK_ROWS": block[0],
            "BLOCK_COLS": block[1],
            "NUM_PROGRAMS": programs,
            "STAGES": config["stages"],
        },
        num_warps=4,
    )
    return Program((launch,))


def _tiles(matrix: Matrix, block: tuple[int, int]) -> int:
    return ceil(matrix.rows / block[0]) * ceil(matrix.cols / block[1])


def _is_empty(problem: Problem) -> bool:
    return problem["rows"] == 0 or problem["cols"] == 0


def _reject_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    matrix = Matrix.of(problem)
    if ceil(matrix.rows / _register_tile(matrix, config)[0]) > 65535:
        return "more than 65535 tiles of rows, the most a grid's second axis has"
    return None


def _reject_tensor_map(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return None
    width = config["width_bytes"]
    matrix = Matrix.of(problem).folded(width)
    if matrix.rows == 1 and matrix.cols * matrix.size > width:
        return f"{matrix.cols * matrix.size} contiguous bytes do not divide into lines of {width}"
    for stride in (matrix.src_stride, matrix.dst_stride):
        if stride * matrix.size % 16:
            return f"rows {stride * matrix.size} bytes apart: TMA needs a multiple of 16"
    if matrix.cols * matrix.size % 16:
        return f"rows of {matrix.cols * matrix.size} bytes: a TMA store writes whole units of 16"
    in_flight = config["tile_bytes"] * config["stages"] * config["per_sm"]
    if in_flight + 2048 * config["per_sm"] > gpu.shared_bytes:
        return f"{in_flight} bytes of tiles do not fit into the shared memory of an SM"
    if in_flight < MIN_BYTES_IN_FLIGHT:
        return f"{in_flight} bytes of tiles an SM are too few to cover the latency of memory"
    if in_flight > MAX_BYTES_IN_FLIGHT:
        return f"{in_flight} bytes of tiles an SM are more than the latency of memory asks for"
    return None


def _default_vectorized(problem: Problem, gpu: Gpu) -> Config:
    """Tiles of 16 KB, smaller ones where every SM would not get four."""
    total = problem["rows"] * problem["cols"] * itemsize(problem["dtype"])
    size = next((s for s in (16384, 8192) if total >= 4 * gpu.sms * s), 4096)
    config = Config(tile_bytes=size, warps=4)
    if VECTORIZED.illegal(config, problem, gpu):
        return Config(tile_bytes=32768, warps=4)
    return config


def _default_tensor_map(problem: Problem, gpu: Gpu) -> Config:
    """Two programs an SM with three tiles of 16 KB each; wide tiles where rows lie apart."""
    width = 128 if Matrix.of(problem).rows == 1 else 512
    wanted = Config(tile_bytes=16384, width_bytes=width, stages=3, per_sm=2)
    if TENSOR_MAP.why_not(wanted, problem, gpu) is None:
        return wanted
    return next(TENSOR_MAP.configs(problem, gpu), wanted)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time, longer where narrow accesses, few programs or few bytes in flight slow it."""
    size = itemsize(problem["dtype"])
    total = 2 * problem["rows"] * problem["cols"] * size
    if total == 0:
        return cost_model.LAUNCH_US
    matrix = Matrix.of(problem)
    access = 16
    in_flight = config["tile_bytes"] * config.get("stages", 4) * config.get("per_sm", 1)
    if "stages" not in config and matrix.rows > 1:
        access = matrix.alignment * size
    efficiency = min(1.0, 0.4 + access / 16) * min(1.0, 0.5 + in_flight / (96 << 10))
    return cost_model.copy_us(total, gpu, cost_model.BANDWIDTH_EFFICIENCY * efficiency)


VECTORIZED = Implementation(
    entry="tma_copy",
    language="triton",
    variant="vectorized",
    summary="16-byte loads and stores through registers, a tile a program; any strides",
    archs=("sm_80+",),
    space={"tile_bytes": (4096, 8192, 16384, 32768), "warps": (4, 8)},
    illegal=_reject_vectorized,
    default=_default_vectorized,
    program=_vectorized,
    estimate=_estimate,
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
    illegal=_reject_tensor_map,
    default=_default_tensor_map,
    program=_tensor_map,
    estimate=_estimate,
    techniques={"tma": "UTMALDG", "tma_store": "UTMASTG"},
    rank=2,
)

IMPLEMENTATIONS = (VECTORIZED, TENSOR_MAP)
