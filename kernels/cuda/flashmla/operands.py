"""Template arguments and parameters of the kernels of `flashmla`, in the order of latent.cuh."""

from __future__ import annotations

from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.implementation import Float32, Int32, Param, Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.latent_cache import cached_type
from kernelcat.kernels.cuda.flashmla.lengths import lengths_of
from kernelcat.reference._sequences import query_groups
from kernelcat.reference.flashmla import row_length

TENSORS = ("q", "kv_cache", "block_table", "kv_lens", "cu_q", "out", "lse")
SIZES = ("batch", "heads", "table_width")


def types(problem: Problem) -> tuple[str, str]:
    """Template arguments: the type of q and out, and that of the cache."""
    return f"kernelcat::{problem['dtype']}", cached_type(problem)


def params(problem: Problem, *workspaces: str) -> tuple[Param, ...]:
    """Tensors, workspaces, sizes and the scale."""
    return (
        *map(Pointer, (*TENSORS, *workspaces)),
        *(Int32(problem[name]) for name in SIZES),
        Float32(float(problem["sm_scale"])),
    )


def max_rows(problem: Problem) -> int:
    """Rows (query tokens times heads) of the sequence with the most query tokens."""
    return int(problem["max_q"] * problem["heads"])


def row_bytes(problem: Problem) -> int:
    """Bytes of a token in the cache."""
    return int(row_length(problem.values) * dtypes.itemsize(problem["kv_dtype"]))


def num_row_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of ``block_m`` rows of all sequences, if all have the mean number of query tokens."""
    q_len = ceil(problem["tokens"] / max(problem["batch"], 1))
    return int(problem["batch"] * ceil(q_len * problem["heads"] / block_m))


def num_items(problem: Problem, tile_rows: int, block_n: int, *, causal: bool = False) -> int:
    """Pairs of a tile of ``tile_rows`` rows and one of ``block_n`` tokens, of all sequences.

    ``causal``: row tiles end at the last token that they see.
    """
    lengths, items = lengths_of(problem), 0.0
    for group in query_groups(problem):
        row_tiles = ceil(group.queries * problem["heads"] / tile_rows)
        hidden = group.queries / 2 if causal and group.queries > block_n else 0
        items += group.sequences * row_tiles * lengths.tiles(group.tokens - hidden, block_n)
    return ceil(items)
