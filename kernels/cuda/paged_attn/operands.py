"""What the kernels of `paged_attn` are compiled for and given, in the order of attention.cuh."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.implementation import Float32, Int32, Param, Pointer, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.reference.paged_attn import row_bytes, sm_scale

TENSORS = (
    *("q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q"),
    *("sinks", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "out", "lse"),
)
CACHES = ("k_cache", "v_cache")
REGISTERS = 1 << 16
"""Of an SM."""
IN_FLIGHT = 64 << 10
"""Bytes that an SM must have in flight for the whole of the bandwidth."""
SIZES = ("batch", "heads", "kv_heads", "table_width", "window")


def kind(problem: Problem) -> str:
    """The template argument that holds all but sizes and numbers."""
    scales = "kNone"
    if problem["has_scales"]:
        scales = "kPage" if problem["page_scales"] else "kHead"
    flags = (problem["window"] > 0, problem["softcap"] != 0, problem["has_sinks"])
    arguments = (
        *(f"kernelcat::{problem[name]}" for name in ("dtype", "kv_dtype")),
        *map(str, (problem["head_dim"], problem["page_size"])),
        *(str(flag).lower() for flag in flags),
        f"kernelcat::Scales::{scales}",
    )
    return f"kernelcat::AttentionKind<{', '.join(arguments)}>"


def params(problem: Problem, *workspaces: str) -> tuple[Param, ...]:
    """Tensors, workspaces, sizes and numbers."""
    return (
        *map(Pointer, (*TENSORS, *workspaces)),
        *(Int32(problem[name]) for name in SIZES),
        Float32(sm_scale(problem)),
        Float32(float(problem["softcap"])),
    )


def num_rows(problem: Problem) -> int:
    """Query tokens times heads: rows of the result."""
    return int(problem["tokens"] * problem["heads"])


def q_len(problem: Problem) -> int:
    """Query tokens of a sequence, in the mean."""
    return -(-problem["tokens"] // max(problem["batch"], 1))


def context(problem: Problem) -> int:
    """Cached tokens of a sequence whose table is full."""
    return int(problem["table_width"] * problem["page_size"])


def span(problem: Problem, queries: int) -> int:
    """Cached tokens that some of ``queries`` neighbouring ones sees, in the mean."""
    seen = max(context(problem) - (q_len(problem) - queries) // 2, 1)
    return min(seen, problem["window"] + queries - 1) if problem["window"] else seen


def token_bytes(problem: Problem) -> int:
    """Bytes of a token's keys and values, of one head, block scales included."""
    return 2 * row_bytes(problem)


def group(problem: Problem) -> int:
    """Query heads that share a key-value head."""
    return int(problem["heads"] // problem["kv_heads"])


def slots(problem: Problem) -> int:
    """Tokens that the cache has room for."""
    return int(problem["pages"] * problem["page_size"])


def why_no_boxes(problem: Problem, box_tokens: int) -> str | None:
    """Why TMA cannot load ``box_tokens`` of a page at a time."""
    size = problem["page_size"]
    if size < 16:
        return f"pages of {size} tokens are too small for TMA"
    if box_tokens < 8:
        return f"a box of tokens would be less than the swizzle's 8 rows, in pages of {size}"
    if slots(problem) >= 1 << 31:
        return "more slots than TMA's 32-bit coordinates reach"
    return None


def cache_map(name: str, problem: Problem, box_tokens: int, heads: int = 1) -> TensorMap:
    """(slots, kv_heads / heads, heads * head_dim): boxes of tokens of a page, 128 bytes a row."""
    dim, size = heads * problem["head_dim"], dtypes.itemsize(problem["kv_dtype"])
    span, groups = min(dim * size, 128), problem["kv_heads"] // heads
    return TensorMap(
        name,
        problem["kv_dtype"],
        (dim, groups, slots(problem)),
        (dim * size, groups * dim * size),
        (span // size, 1, box_tokens),
        swizzle=span,
    )
