"""What the kernels of `paged_attn` are compiled for and given, in the order of attention.cuh."""

from __future__ import annotations

from kernelcat.implementation import Float32, Int32, Param, Pointer
from kernelcat.reference.paged_attn import row_bytes, sm_scale
from kernelcat.spec import Problem

TENSORS = (
    *("q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q"),
    *("sinks", "k_scale", "v_scale", "k_block_scale", "v_block_scale", "out", "lse"),
)
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
