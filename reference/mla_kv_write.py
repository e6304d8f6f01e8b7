"""`mla_kv_write`: latents and rotated keys of new tokens into a paged latent cache, in one pass.

Sequences, tokens, pages, slots and RoPE are those of `kv_write`, the cache is that of `flashmla`: a
new token's row becomes ``[c (512) | rope(k_pe) (64)]``, in the cache's type or, for ``uint8``, as
656 bytes with float8 latents, whose scales are made here. Everything else in the cache stays as it
is. Arithmetic is in float32, rounded once; float8 bytes are those of `reference/_mla_row.py`, bit
for bit.

No two new tokens may have the same slot. Nothing but their table entries and rows of cos_sin is
read, and those are not checked.
"""

from __future__ import annotations

import itertools

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Entry, Problem, Tensor, Tolerance
from kernelcat.reference._arrays import library_of
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, ROW, pack
from kernelcat.reference.flashmla import PACKED_TYPE, PAGE_SIZES, POISON, row_length
from kernelcat.reference.kv_write import (
    STYLES,
    capacity,
    lengths,
    new_table,
    positions,
    room_of,
    rotated,
    slots_of,
)
from kernelcat.reference.paged_attn import DTYPES, STARTS


def _make_inputs(problem, normal):
    """What nobody may read is NaN: rows of cos_sin, and slots of new tokens before they come.

    Latents of some tokens are tiny, so that the least scale is met, others large.
    """
    tokens, is_packed = problem["tokens"], problem["kv_dtype"] == PACKED_TYPE
    c, k_pe = normal((tokens, LATENT)), normal((tokens, ROPE))
    xp = library_of(c)
    q_lens, kv_lens = lengths(problem)
    table = xp.asarray(new_table(problem), dtype="int32")
    inputs = {
        "c": c * xp.exp(3.0 * normal((tokens, 1))),
        "k_pe": k_pe,
        "block_table": table.reshape(problem["batch"], problem["table_width"]),
        "kv_lens": xp.asarray(kv_lens, dtype="int32"),
        "cu_q": xp.asarray([0, *itertools.accumulate(q_lens)], dtype="int32"),
    }
    at, page, slot = slots_of(problem, inputs)
    angles = 3.0 * normal((problem["positions"], problem["rotary_dim"] // 2))
    cos_sin = xp.concatenate((xp.cos(angles), xp.sin(angles)), axis=1)
    inputs["cos_sin"] = xp.full_like(cos_sin, xp.nan)
    if problem["rotary_dim"]:
        inputs["cos_sin"][at] = cos_sin[at]
    cache = normal((problem["pages"], problem["page_size"], ROW))
    if is_packed:
        cache = pack(cache).astype("float32")
    cache[page, slot] = xp.float32(POISON if is_packed else "nan")
    inputs["kv_cache"] = cache
    return inputs


def _oracle(problem, arrays):
    at, page, slot = slots_of(problem, arrays)
    k_pe = rotated(problem, arrays["k_pe"][:, None], arrays["cos_sin"], at)[:, 0]
    rows = library_of(k_pe).concatenate((arrays["c"], k_pe), axis=1)
    cache = arrays["kv_cache"].copy()
    cache[page, slot] = pack(rows) if problem["kv_dtype"] == PACKED_TYPE else rows
    return {"kv_cache": cache}


def _flops(problem: Problem) -> int:
    """Four products and two sums a pair."""
    return int(3 * problem["rotary_dim"] * problem["tokens"])


def _bytes_moved(problem: Problem) -> int:
    """Rows in and out, and those of cos_sin that new tokens need."""
    row = row_length(problem.values) * dtypes.itemsize(problem["kv_dtype"])
    token = ROW * dtypes.itemsize(problem["dtype"]) + row
    turning = 4 * problem["rotary_dim"] * len(set(positions(problem)))
    return int(problem["tokens"] * token + turning)


def _constraint(problem):
    if problem["kv_dtype"] not in (problem["dtype"], PACKED_TYPE):
        return f"kv_dtype is dtype ({problem['dtype']}) or {PACKED_TYPE}, rows of {PACKED} bytes"
    if problem["kv_dtype"] == PACKED_TYPE and problem["dtype"] != "bfloat16":
        return "rows of 656 bytes hold bfloat16"
    if problem["tokens"] > problem["batch"] * room_of(problem):
        return "more new tokens than the table, or cos_sin, has room for"
    if problem["tokens"] > capacity(problem):
        return f"{problem['tokens']} new tokens do not fit in {problem['pages']} pages"
    return None


def appended(batch: int, context: int = 64, q_len: int = 1, **more: int | str) -> Problem:
    """Sequences of one length, ``context`` tokens of which the last ``q_len`` are new."""
    axes = {
        "rotary_dim": ROPE, "page_size": 64, "dtype": "bfloat16", "kv_dtype": "bfloat16",
        "style": "interleaved", "lengths": "equal", **more,
    }  # fmt: skip
    width = -(-context // axes["page_size"])
    return Problem.of(
        "mla_kv_write", batch=batch, tokens=batch * q_len, table_width=width,
        pages=batch * width, positions=context, **axes,
    )  # fmt: skip


def _names() -> dict[str, Problem]:
    prefill = {"context": 2048, "q_len": 2048}
    return {
        "decode-1": appended(1),
        "decode-128": appended(128),
        "decode-128-fp8": appended(128, kv_dtype=PACKED_TYPE),
        "prefill-8192": appended(4, **prefill),
        "prefill-8192-fp8": appended(4, **prefill, kv_dtype=PACKED_TYPE),
    }


ENTRY = Entry(
    name="mla_kv_write",
    summary="RoPE, and new rows into a paged latent cache, quantized or not, in one pass.",
    axes=(
        Axis.size("batch", "sequences", 0, 6),
        Axis.size("tokens", "new tokens of all sequences", 0, 40),
        Axis.size("pages", "pages of the cache", 1, 60),
        Axis.size("table_width", "pages of the longest sequence", 0, 12),
        Axis.size("positions", "rows of cos_sin", 0, 300),
        Axis.choice("rotary_dim", "elements of k_pe that turn: all or none", 0, ROPE, default=ROPE),
        Axis.choice("page_size", "tokens of a page", *PAGE_SIZES, default=64),
        Axis.choice("dtype", "element type of c and k_pe", *DTYPES, minor=True),
        Axis.choice("kv_dtype", "element type of the cache", *DTYPES, PACKED_TYPE),
        Axis.choice("style", "which elements are a pair", *STYLES, default="interleaved"),
        Axis.choice(
            "lengths", "of the inputs that are drawn", "equal", "ragged",
            default="equal", minor=True,
        ),
    ),
    inputs=(
        Tensor("c", ("tokens", LATENT), "dtype", "latents, normalized"),
        Tensor("k_pe", ("tokens", ROPE), "dtype", "what turns of the keys"),
        Tensor("block_table", ("batch", "table_width"), "int32", "pages of each sequence"),
        Tensor("kv_lens", ("batch",), "int32", "tokens of each sequence, new ones included"),
        Tensor("cu_q", (STARTS,), "int32", "where each sequence's new tokens begin, and their end"),
        Tensor("cos_sin", ("positions", "rotary_dim"), "float32", "cosines, then sines"),
    ),
    outputs=(
        Tensor(
            "kv_cache", ("pages", "page_size", Derived(f"{ROW} or {PACKED}", row_length)),
            "kv_dtype", "latents, and rotated parts of keys", tolerance="kv_dtype", updated=True,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    # Half a step of the type, and float32's noise where terms cancel; bytes are those of the oracle
    # but for that noise.
    tolerance={
        "bfloat16": Tolerance(1e-4, 2**-8),
        "float16": Tolerance(1e-4, 2**-11),
        PACKED_TYPE: Tolerance(1.0, 0.0),
    },
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_names(),
    constraint=_constraint,
)  # fmt: skip
