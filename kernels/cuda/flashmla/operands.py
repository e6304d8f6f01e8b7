"""What the kernels of `flashmla` are compiled for and given, in the order of latent.cuh."""

from __future__ import annotations

from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.implementation import Float32, Int32, Param, Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.reference.flashmla import PACKED_TYPE, row_length

TENSORS = ("q", "kv_cache", "block_table", "kv_lens", "cu_q", "out", "lse")
SIZES = ("batch", "heads", "table_width")


def types(problem: Problem) -> tuple[str, str]:
    """Template arguments: the type of q and out, and that of the cache."""
    packed = problem["kv_dtype"] == PACKED_TYPE
    cached = "PackedRow" if packed else problem["kv_dtype"]
    return f"kernelcat::{problem['dtype']}", f"kernelcat::{cached}"


def params(problem: Problem, *workspaces: str) -> tuple[Param, ...]:
    """Tensors, workspaces, sizes and the scale."""
    return (
        *map(Pointer, (*TENSORS, *workspaces)),
        *(Int32(problem[name]) for name in SIZES),
        Float32(float(problem["sm_scale"])),
    )


def num_rows(problem: Problem) -> int:
    """Query tokens times heads: rows of the result."""
    return int(problem["tokens"] * problem["heads"])


def rows(problem: Problem) -> int:
    """Rows of the sequence with the most query tokens."""
    return int(problem["max_q"] * problem["heads"])


def context(problem: Problem) -> int:
    """Cached tokens of a sequence whose table is full."""
    return int(problem["table_width"] * problem["page_size"])


def row_bytes(problem: Problem) -> int:
    """Bytes of a token in the cache."""
    return int(row_length(problem.values) * dtypes.itemsize(problem["kv_dtype"]))


def slots(problem: Problem) -> int:
    """Tokens that the cache has room for."""
    return int(problem["pages"] * problem["page_size"])


def row_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of ``block_m`` rows, of all sequences, in the mean."""
    q_len = ceil(problem["tokens"] / max(problem["batch"], 1))
    return int(problem["batch"] * ceil(q_len * problem["heads"] / block_m))
