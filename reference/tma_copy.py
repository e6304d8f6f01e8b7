"""`tma_copy`: copy a matrix or a sub-tile of one, as fast as the memory system allows."""

from __future__ import annotations

from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor, exact
from kernelcat.dtypes import itemsize
from kernelcat.errors import Unsupported

DTYPES = ("bfloat16", "float16", "float32", "uint8")


def _bytes_moved(problem: Problem) -> int:
    return 2 * problem["rows"] * problem["cols"] * itemsize(problem["dtype"])


def _constraint(problem: Problem) -> str | None:
    if problem["rows"] > 1:
        for stride in ("src_stride", "dst_stride"):
            if problem[stride] < problem["cols"]:
                return f"{stride}={problem[stride]} must be at least cols={problem['cols']}"
    return None


def _problem(rows: int, cols: int, stride: int | None = None, dtype: str = "bfloat16") -> Problem:
    """Rows of ``cols`` elements, out of and into matrices whose rows are ``stride`` apart."""
    stride = stride or cols
    return Problem.of(
        "tma_copy", rows=rows, cols=cols, src_stride=stride, dst_stride=stride, dtype=dtype
    )


def _torch_copy():
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        from kernelcat.errors import MissingDependency

        raise MissingDependency("the peer torch needs torch: pip install torch") from error

    def make(problem, arrays):
        if problem["rows"] * problem["cols"] == 0:
            raise Unsupported("nothing to copy")
        src, dst = arrays["src"], arrays["dst"]
        return lambda: dst.copy_(src)

    return make


ENTRY = Entry(
    name="tma_copy",
    summary="Copy a matrix or a strided sub-tile at memory bandwidth.",
    axes=(
        Axis.size("rows", "rows copied", 0, 300),
        Axis.size("cols", "elements a row", 0, 3000),
        Axis.size("src_stride", "elements between rows of src", 0, 4096, bucket=exact),
        Axis.size("dst_stride", "elements between rows of dst", 0, 4096, bucket=exact),
        Axis.choice("dtype", "element type", *DTYPES),
    ),
    inputs=(Tensor("src", ("rows", "cols"), "dtype", "what is copied", strides=("src_stride", 1)),),
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
    peers=(Peer("torch", _torch_copy),),
)
