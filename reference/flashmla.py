"""`flashmla`: multi-head latent attention (DeepSeek) with absorbed weights, over a paged cache.

A token's row of the cache is its key for all heads, and the first 512 of its 576 elements are its
value: ``[norm(c) (512) | rope(k_pe) (64)]``. A query is ``[q_nope @ W_UK | rope(q_pe)]``.
Sequences, query tokens and pages are those of `paged_attn`: the last ``cu_q[s + 1] - cu_q[s]`` of
``kv_lens[s]`` cached tokens ask, and each sees itself and what came before it.

    p = softmax(sm_scale * q . row)   over the rows that a query token sees
    out = p @ row[:512],  lse = log of the softmax's denominator

``sm_scale`` has no default: it is not 1 / sqrt(576), but that of the heads before absorption, times
YaRN's factor. A query that sees nothing gets zeros and an lse of -inf. Table entries beyond a
sequence are never followed, and slots that hold none of its tokens never read.

Sparse attention, where each query token has a list of slots of its own, is this with sequences of
one token over pages of one: the lists are the block table (`kernelcat.mla.sparse`).

A cache of ``uint8`` has rows of 656 bytes: float8 latents, their scales, and bfloat16 for the
rotated part (`reference/_mla_row.py`).
"""

from __future__ import annotations

import itertools

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance, exact
from kernelcat.reference._arrays import library_of
from kernelcat.reference._mla_row import LATENT, PACKED, ROW, pack, unpack
from kernelcat.reference.paged_attn import (
    DTYPES,
    STARTS,
    lengths,
    pairs_seen,
    tables,
    tokens_read,
)

PACKED_TYPE = "uint8"
"""Of a cache in rows of 656 bytes."""
PAGE_SIZES = (1, 16, 64, 128)
SCORES = 1 << 26
"""Scores that the oracle has in memory at once."""
DEEPSEEK_SCALE = 192**-0.5 * 1.3689**2
"""DeepSeek-V3's: 1 / sqrt(128 + 64), times YaRN's factor squared."""
POISON = 0xFF
"""A byte that makes NaN of float8, float32 and bfloat16."""


def row_length(axes):
    """Elements of a cache's row."""
    return PACKED if axes["kv_dtype"] == PACKED_TYPE else ROW


def _make_inputs(problem, normal):
    """Slots that nobody may read are NaN, and so are pages that no table names.

    Rows are small and queries large, so that a few keys have most of the weight and each of them
    shows, and what comes out is of the size that the tolerance is for.
    """
    batch, size = problem["batch"], problem["page_size"]
    (table, slots), (q_lens, kv_lens) = tables(problem), lengths(problem)
    q = 8.0 * normal((problem["tokens"], problem["heads"], ROW))
    xp = library_of(q)
    unread = xp.arange(size)[None, :] >= xp.asarray(slots, dtype="int32")[:, None]
    cache = xp.float32(0.1) * normal((problem["pages"], size, ROW))
    if problem["kv_dtype"] == PACKED_TYPE:
        cache = pack(cache).astype("float32")
    poison = xp.float32(POISON if problem["kv_dtype"] == PACKED_TYPE else "nan")
    return {
        "q": q,
        "kv_cache": xp.where(unread[..., None], poison, cache),
        "block_table": xp.asarray(table, dtype="int32").reshape(batch, problem["table_width"]),
        "kv_lens": xp.asarray(kv_lens, dtype="int32"),
        "cu_q": xp.asarray([0, *itertools.accumulate(q_lens)], dtype="int32"),
    }


def attend(q, rows, first_token, sm_scale):
    """(queries, heads, 576) over (tokens, 576): out (queries, heads, 512) and lse.

    Query i is token ``first_token + i``, and may come before the first row, of which there is
    at least one.
    """
    xp = library_of(q)
    queries, heads, dim = q.shape
    z = (q.reshape(-1, dim) @ rows.T).reshape(queries, heads, len(rows)) * xp.float32(sm_scale)
    ahead = xp.arange(len(rows))[None, :] - xp.arange(queries)[:, None]
    z = xp.where((ahead > first_token)[:, None], xp.float32("-inf"), z)
    most = xp.maximum(z.max(2), xp.float32(-1e30))
    p = xp.exp(z - most[..., None])
    total = p.sum(2)
    out = (p.reshape(-1, len(rows)) @ rows[:, :LATENT]).reshape(queries, heads, LATENT)
    seen = total > 0
    safe = xp.where(seen, total, xp.float32(1))
    return out / safe[..., None], xp.where(seen, xp.log(safe) + most, xp.float32("-inf"))


def _oracle(problem, arrays):
    size, q = problem["page_size"], arrays["q"]
    xp = library_of(q)
    out = xp.zeros((*q.shape[:2], LATENT), "float32")
    lse = xp.full(q.shape[:2], -xp.inf, "float32")
    bounds = itertools.pairwise(arrays["cu_q"].tolist())
    lens = arrays["kv_lens"].tolist()
    for s, ((start, end), kv_len) in enumerate(zip(bounds, lens, strict=True)):
        if not kv_len:
            continue
        pages = arrays["block_table"][s, : -(-kv_len // size)]
        rows = arrays["kv_cache"][pages].reshape(-1, row_length(problem.values))[:kv_len]
        if problem["kv_dtype"] == PACKED_TYPE:
            rows = unpack(rows.astype("uint8"))
        step = max(1, SCORES // max(problem["heads"] * kv_len, 1))
        for first in range(start, end, step):
            part = slice(first, min(first + step, end))
            before = kv_len - (end - first)
            out[part], lse[part] = attend(q[part], rows, before, problem["sm_scale"])
    return {"out": out, "lse": lse}


def _flops(problem: Problem) -> int:
    """Products with keys and with values."""
    return int(2 * problem["heads"] * (ROW + LATENT) * pairs_seen(problem))


def _bytes_moved(problem: Problem) -> int:
    row = row_length(problem.values) * dtypes.itemsize(problem["kv_dtype"])
    size = dtypes.itemsize(problem["dtype"])
    asked = problem["tokens"] * problem["heads"] * (size * (ROW + LATENT) + 4)
    return int(tokens_read(problem) * row + asked)


def _constraint(problem):
    room = problem["table_width"] * problem["page_size"]
    if problem["kv_dtype"] not in (problem["dtype"], PACKED_TYPE):
        return f"kv_dtype is dtype ({problem['dtype']}) or {PACKED_TYPE}, rows of {PACKED} bytes"
    if problem["sm_scale"] <= 0:
        return "sm_scale must be positive"
    if problem["tokens"] > problem["batch"] * min(problem["max_q"], room):
        return "more query tokens than batch * max_q, or than the table has room for"
    if not problem["pages"] and room * problem["batch"]:
        return "the cache has no page"
    return None


def latent(
    batch: int, q_len: int, heads: int, context: int, page_size: int = 64, **more: int | float | str
) -> Problem:
    """Sequences of one length, ``context`` tokens of which the last ``q_len`` ask."""
    width = -(-context // page_size)
    axes = {
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "sm_scale": DEEPSEEK_SCALE,
        "lengths": "equal", "pages": batch * width, **more,
    }  # fmt: skip
    return Problem.of(
        "flashmla", batch=batch, tokens=batch * q_len, max_q=q_len, heads=heads,
        page_size=page_size, table_width=width, **axes,
    )  # fmt: skip


def sparse(tokens: int, heads: int, topk: int, **more: int | float | str) -> Problem:
    """Query tokens that list ``topk`` slots each, of a cache that is ``SPREAD`` times larger."""
    return latent(tokens, 1, heads, topk, 1, pages=SPREAD * tokens * topk, **more)


SHAPES = (
    (1, 1, 128, 4096),
    (1, 1, 128, 32768),
    (16, 1, 128, 4096),
    (64, 1, 128, 1024),
    (64, 1, 128, 4096),
    (128, 1, 128, 4096),
    (128, 2, 128, 4096),
    (32, 1, 128, 32768),
    (128, 1, 64, 4096),
    (128, 1, 16, 4096),
)
"""Batch, query tokens, heads, context; fewer heads are those of a tensor-parallel rank."""

SPARSE = ((1, 128, 2048), (128, 128, 2048), (128, 64, 2048))
"""Query tokens, heads, slots that each lists: DeepSeek-V3.2's decode."""
SPREAD = 4

RAGGED = (64, 2, 128, 16384)
"""Of sequences of any length, up to the context."""


def _names() -> dict[str, Problem]:
    def name(shape: tuple[int, ...]) -> str:
        batch, q_len, heads, context = shape
        return f"{batch}x{q_len}-{heads}-{context}"

    found = {name(shape): latent(*shape) for shape in SHAPES}
    found[f"ragged-{name(RAGGED)}"] = latent(*RAGGED, lengths="ragged")
    for shape in SHAPES:
        found[f"{name(shape)}-fp8"] = latent(*shape, kv_dtype=PACKED_TYPE)
    for tokens, heads, topk in SPARSE:
        listed = f"sparse-{name((tokens, 1, heads, topk))}"
        found[listed] = sparse(tokens, heads, topk)
        found[f"{listed}-fp8"] = sparse(tokens, heads, topk, kv_dtype=PACKED_TYPE)
    found["sparse-ragged-128x1-128-2048"] = sparse(128, 128, 2048, lengths="ragged")
    return found


def _peer(name: str) -> Peer:
    """A peer from its own module, which is imported when it is raced."""

    def load():
        from kernelcat.reference import _flashmla_peers

        return getattr(_flashmla_peers, name)()

    return Peer(name, load)


ENTRY = Entry(
    name="flashmla",
    summary="Multi-head latent attention with absorbed weights over a paged cache (DeepSeek).",
    axes=(
        Axis.size("batch", "sequences", 0, 6),
        Axis.size("tokens", "query tokens of all sequences", 0, 16),
        Axis.size("heads", "query heads", 1, 40, exact),
        Axis.size("pages", "pages of the cache", 1, 40),
        Axis.size("table_width", "pages of the longest sequence", 0, 12),
        Axis.size("max_q", "query tokens of any sequence, at most", 1, 4, default=1),
        Axis.choice("page_size", "tokens of a page", *PAGE_SIZES, default=64),
        Axis.choice("dtype", "element type of q and out", *DTYPES, minor=True),
        Axis.choice("kv_dtype", "element type of the cache", *DTYPES, PACKED_TYPE),
        Axis.number("sm_scale", "factor of the scores", 0.05, DEEPSEEK_SCALE, default=None),
        Axis.choice(
            "lengths", "of the inputs that are drawn", "equal", "ragged",
            default="equal", minor=True,
        ),
    ),
    inputs=(
        Tensor("q", ("tokens", "heads", ROW), "dtype", "queries, sequence after sequence"),
        Tensor(
            "kv_cache", ("pages", "page_size", Derived(f"{ROW} or {PACKED}", row_length)),
            "kv_dtype", "latents, and rotated parts of keys",
        ),
        Tensor("block_table", ("batch", "table_width"), "int32", "pages of each sequence"),
        Tensor("kv_lens", ("batch",), "int32", "cached tokens of each sequence, queries included"),
        Tensor("cu_q", (STARTS,), "int32", "where each sequence's queries begin, and their end"),
    ),
    outputs=(
        Tensor("out", ("tokens", "heads", LATENT), "dtype", "the result, in latent space"),
        Tensor(
            "lse", ("tokens", "heads"), "float32", "log of the softmax's denominator",
            tolerance=Tolerance(2e-4, 1e-5),
            optional_for_peers=True,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, Tolerance(8e-4, 2.01 / 128)),  # those of FlashMLA's tests
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(_peer("flash_mla"), _peer("flashinfer")),
    constraint=_constraint,
)  # fmt: skip
