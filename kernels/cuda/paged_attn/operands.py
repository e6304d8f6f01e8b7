"""What the kernels of `paged_attn` are compiled for and given, in the order of attention.cuh."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.implementation import Float32, Int32, Param, Pointer, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.paged_cache import context, num_slots, scales
from kernelcat.reference.paged_attn import row_bytes, sm_scale

TENSORS = (
    *("q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q"),
    *("sinks", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "out", "lse"),
)
CACHES = ("k_cache", "v_cache")
SM_REGISTERS = 1 << 16
"""Registers of an SM."""
MAX_REGISTERS = 255
"""Registers of a thread, at most."""
BYTES_IN_FLIGHT = 64 << 10
"""Bytes that an SM must have in flight to use the whole bandwidth."""
SIZES = ("batch", "heads", "kv_heads", "table_width", "window")


def kind(problem: Problem) -> str:
    """The template argument AttentionKind: everything but sizes and numbers."""
    flags = (problem["window"] > 0, problem["softcap"] != 0, problem["has_sinks"])
    arguments = (
        *(f"kernelcat::{problem[name]}" for name in ("dtype", "kv_dtype")),
        *map(str, (problem["head_dim"], problem["page_size"])),
        *(str(flag).lower() for flag in flags),
        scales(problem),
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


def q_len(problem: Problem) -> int:
    """Query tokens of a sequence, on average."""
    return -(-problem["tokens"] // max(problem["batch"], 1))


def span(problem: Problem, queries: int) -> int:
    """Cached tokens that at least one of ``queries`` neighbouring queries sees, on average."""
    visible = max(context(problem) - (q_len(problem) - queries) // 2, 1)
    return min(visible, problem["window"] + queries - 1) if problem["window"] else visible


def token_bytes(problem: Problem) -> int:
    """Bytes of a token's keys and values, of one head, block scales included."""
    return 2 * row_bytes(problem)


def group(problem: Problem) -> int:
    """Query heads that share a key-value head."""
    axes = problem.values  # a choice asks for it a hundred times
    return int(axes["heads"] // axes["kv_heads"])


def why_no_boxes(problem: Problem, box_tokens: int) -> str | None:
    """Why TMA cannot load boxes of ``box_tokens`` tokens of a page."""
    size = problem["page_size"]
    if size < 16:
        return f"page_size={size} must be at least 16 for TMA"
    if box_tokens < 8:
        return f"boxes of {box_tokens} tokens must have at least the 8 rows of a swizzle atom"
    if num_slots(problem) >= 1 << 31:
        return f"{num_slots(problem)} slots are more than TMA's 32-bit coordinates reach"
    return None


def cache_map(name: str, problem: Problem, box_tokens: int, heads: int = 1) -> TensorMap:
    """Over (slots, kv_heads / heads, heads * head_dim): boxes of tokens of one page, rows of up to
    128 bytes."""
    dim, size = heads * problem["head_dim"], dtypes.itemsize(problem["kv_dtype"])
    row_span, groups = min(dim * size, 128), problem["kv_heads"] // heads
    return TensorMap(
        name,
        problem["kv_dtype"],
        (dim, groups, num_slots(problem)),
        (dim * size, groups * dim * size),
        (row_span // size, 1, box_tokens),
        swizzle=row_span,
    )
