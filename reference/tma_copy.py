"""`tma_copy`: dst = src, the copy of a matrix or of a sub-tile of one, at memory bandwidth.

src and dst are (rows, cols) with contiguous columns; their rows are ``src_stride`` and
``dst_stride`` elements apart. Elements between the rows are neither read into dst nor written.
"""

from __future__ import annotations

from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor, exact
from kernelcat.dtypes import itemsize
from kernelcat.errors import Unsupported
from kernelcat.reference._peers import import_torch

DTYPES = ("bfloat16", "float16", "float32", "uint8")


def _bytes_moved(problem: Problem) -> int:
    return 2 * problem["rows"] * problem["cols"] * itemsize(problem["dtype"])


def _constraint(problem: Problem) -> str | None:
    if problem["rows"] > 1:
        for stride in ("src_stride", "dst_stride"):
            if problem[stride] < problem["cols"]:
                return f"{stride}={problem[stride]} must be at least cols={problem['cols']}"
    return None


LIMIT = 1 << 40
"""Sizes are less than this: all kernels of this entry take them in 64 bits."""


def _problem(rows: int, cols: int, stride: int | None = None, dtype: str = "bfloat16") -> Problem:
    """The copy between two matrices whose rows are ``stride`` elements apart (``cols`` if None)."""
    stride = stride or cols
    return Problem.of(
        "tma_copy", rows=rows, cols=cols, src_stride=stride, dst_stride=stride, dtype=dtype
    )


def _torch():
    """``dst.copy_(src)``."""
    import_torch("torch")

    def make(problem, arrays):
        if problem["rows"] * problem["cols"] == 0:
            raise Unsupported("torch is not raced where rows or cols is 0")
        src, dst = arrays["src"], arrays["dst"]
        return lambda: dst.copy_(src)

    return make


ENTRY = Entry(
    name="tma_copy",
    summary="Copy a matrix or a strided sub-tile at memory bandwidth.",
    axes=(
        Axis.size("rows", "rows to copy", 0, 300, limit=LIMIT),
        Axis.size("cols", "elements of a row", 0, 3000, limit=LIMIT),
        Axis.size(
            "src_stride", "elements from one row of src to the next", 0, 4096, exact, limit=LIMIT
        ),
        Axis.size(
            "dst_stride", "elements from one row of dst to the next", 0, 4096, exact, limit=LIMIT
        ),
        Axis.choice("dtype", "element type of src and dst", *DTYPES),
    ),
    inputs=(Tensor("src", ("rows", "cols"), "dtype", "matrix to copy", strides=("src_stride", 1)),),
    outputs=(Tensor("dst", ("rows", "cols"), "dtype", "the copy", strides=("dst_stride", 1)),),
    oracle=lambda problem, arrays: {"dst": arrays["src"]},
    make_inputs=lambda problem, normal: {"src": normal((problem["rows"], problem["cols"])) * 50},
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: 0,
    bytes_moved=_bytes_moved,
    constraint=_constraint,
    problems={
        "64KB": _problem(1, 1 << 15),
        "1MB": _problem(1, 1 << 19),
        "16MB": _problem(1, 1 << 23),
        "64MB": _problem(1, 1 << 25),
        "256MB": _problem(1, 1 << 27),
        "1GB": _problem(1, 1 << 29),
        "8GB": _problem(1, 1 << 32),
        "tile-64MB": _problem(4096, 8192, 16384),
        "tile-512MB": _problem(16384, 16384, 32768),
        "tile-odd-64MB": _problem(8191, 4093, 4104),
    },
    peers=(Peer("torch", _torch),),
)
