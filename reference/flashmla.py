"""`flashmla`: multi-head latent attention (DeepSeek) with absorbed weights, over a paged cache.

The cache keeps one row of 576 elements for each token: the normalized latent, of which the keys and
values of all heads are made, and the part of the key that RoPE rotates. The up-projections are
absorbed into queries and results (`kernelcat.layers.mla`), so that a row is the key of all heads
and its first 512 elements are their value:

    row = [norm(c) (512) | rope(k_pe) (64)],  q = [q_nope @ W_UK (512) | rope(q_pe) (64)]

Sequences, query tokens and pages are those of `paged_attn`: the last ``q_lens[s]`` tokens of
sequence s are queries, and each attends to its own token and the tokens before it. For one query
and one head:

    z = sm_scale * q . row            for each visible row
    p = softmax(z)
    out = sum of p * row[:512]
    lse = log(sum of exp(z)), natural

``sm_scale`` must be given: it is not 1 / sqrt(576), but that of the heads before absorption, times
YaRN's factor (`kernelcat.layers.mla.sm_scale`). A query without a visible row gets zeros and an lse
of -inf. Entries of the block table beyond a sequence's last page are never followed, and slots that
hold no token of a sequence are never read.

A cache of ``uint8`` has rows of 656 bytes: latents in float8 with scales, and bfloat16 for the
rotated part (`_mla_row`).

Sparse attention, where each query token lists the slots that it attends to, is the same function:
each query token is a sequence of its own over pages of one token, and the lists are the block table
(`kernelcat.layers.mla.sparse`).

Sources: DeepSeek-V2, section 2.1; DeepSeek's FlashMLA (rows of 656 bytes, sparse decoding).
"""

from __future__ import annotations

import itertools
from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Entry, Problem, Tensor, Tolerance, any_size, exact
from kernelcat.reference._arrays import library_of
from kernelcat.reference._kv_cache import DTYPES
from kernelcat.reference._mla_row import LATENT, PACKED, ROW, pack, unpack
from kernelcat.reference._peers import peer_in
from kernelcat.reference._random_sizes import (
    of_sequences,
    sequence_axes,
    with_chunk,
)
from kernelcat.reference._sequences import (
    ATTENTION_PRECONDITIONS,
    BATCH,
    INDICES,
    LENGTHS,
    TABLE_WIDTH,
    index_arrays,
    lengths,
    pairs_seen,
    queries_error,
    query_chunks,
    tables,
    tokens_read,
)

PACKED_TYPE = "uint8"
"""Element type of a cache with rows of 656 bytes."""
PAGE_SIZES = (1, 16, 64, 128)
DEEPSEEK_SCALE = 192**-0.5 * 1.3689**2
"""DeepSeek-V3's sm_scale: 1 / sqrt(128 + 64), times YaRN's factor squared."""
POISON = 0xFF
"""A byte that makes NaN of float8, float32 and bfloat16."""


def row_length(axes):
    """Elements of a row of the cache."""
    return PACKED if axes["kv_dtype"] == PACKED_TYPE else ROW


def kv_dtype_error(problem: Problem) -> str | None:
    """Why the cache cannot have its element type, or None."""
    kv_dtype, dtype = problem["kv_dtype"], problem["dtype"]
    if kv_dtype not in (dtype, PACKED_TYPE):
        return (
            f"kv_dtype={kv_dtype} is not supported: kv_dtype is dtype ({dtype}) or {PACKED_TYPE}, "
            f"rows of {PACKED} bytes"
        )
    return None


PAGE_SIZE = Axis.choice(
    "page_size", "tokens that a page of the cache holds", *PAGE_SIZES, default=64
)
KV_DTYPE = Axis.choice(
    "kv_dtype", f"element type of the cache; {PACKED_TYPE}: rows of {PACKED} bytes in float8",
    *DTYPES, PACKED_TYPE,
)  # fmt: skip
CACHE = ("pages", "page_size", Derived(f"{ROW} or {PACKED}", row_length))


def _make_inputs(problem, normal):
    """Slots and pages that no sequence may read are NaN, or ``POISON`` in a cache of bytes.

    Rows are small and queries large, so that a few keys have most of the weight and an error in one
    key shows, and results have the magnitude that the tolerance is for.
    """
    table, slots = tables(problem)
    q = 8.0 * normal((problem["tokens"], problem["heads"], ROW))
    xp, size = library_of(q), problem["page_size"]
    is_unread = xp.arange(size)[None, :] >= xp.asarray(slots, dtype="int32")[:, None]
    cache = xp.float32(0.1) * normal((problem["pages"], size, ROW))
    if problem["kv_dtype"] == PACKED_TYPE:
        cache = pack(cache).astype("float32")
    poison = xp.float32(POISON if problem["kv_dtype"] == PACKED_TYPE else "nan")
    return {
        "q": q,
        "kv_cache": xp.where(is_unread[..., None], poison, cache),
        **index_arrays(problem, table, lengths(problem), xp),
    }


def _attend(q, rows, first_token, sm_scale):
    """Attention of q (queries, heads, 576) to at least one row, rows (tokens, 576).

    Query i is token ``first_token + i``; a negative number is a query before the first row, which
    has no visible row. Returns out (queries, heads, 512) and lse (queries, heads).
    """
    xp = library_of(q)
    queries, heads, dim = q.shape
    z = (q.reshape(-1, dim) @ rows.T).reshape(queries, heads, len(rows)) * xp.float32(sm_scale)
    distance = xp.arange(len(rows))[None, :] - xp.arange(queries)[:, None]
    z = xp.where((distance > first_token)[:, None], xp.float32("-inf"), z)
    row_max = xp.maximum(z.max(2), xp.float32(-1e30))
    p = xp.exp(z - row_max[..., None])
    row_sum = p.sum(2)
    out = (p.reshape(-1, len(rows)) @ rows[:, :LATENT]).reshape(queries, heads, LATENT)
    has_keys = row_sum > 0
    divisor = xp.where(has_keys, row_sum, xp.float32(1))
    return out / divisor[..., None], xp.where(
        has_keys, xp.log(divisor) + row_max, xp.float32("-inf")
    )


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
        for chunk in query_chunks(start, end, problem["heads"] * kv_len):
            first_token = kv_len - (end - chunk.start)
            out[chunk], lse[chunk] = _attend(q[chunk], rows, first_token, problem["sm_scale"])
    return {"out": out, "lse": lse}


def _flops(problem: Problem) -> int:
    """A multiplication and an addition for q . row and for p * row[:512] of each visible pair."""
    return int(2 * problem["heads"] * (ROW + LATENT) * pairs_seen(problem))


def _bytes_moved(problem: Problem) -> int:
    """Visible rows, queries, results and their log-sum-exps."""
    row = row_length(problem.values) * dtypes.itemsize(problem["kv_dtype"])
    size = dtypes.itemsize(problem["dtype"])
    queries = problem["tokens"] * problem["heads"] * (size * (ROW + LATENT) + 4)
    return int(tokens_read(problem) * row + queries)


def _constraint(problem):
    if reason := kv_dtype_error(problem):
        return reason
    if problem["sm_scale"] <= 0:
        return f"sm_scale must be positive, not {problem['sm_scale']}"
    return queries_error(problem)


def latent(
    batch: int, q_len: int, heads: int, context: int, page_size: int = 64, **more: int | float | str
) -> Problem:
    """The problem of ``batch`` sequences of ``context`` tokens, the last ``q_len`` of them queries.

    ``more`` are further axes; the defaults are bfloat16 and DeepSeek-V3's scale.
    """
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
    """The problem of query tokens that list ``topk`` slots each.

    The cache has ``SPREAD`` times as many slots as all lists together.
    """
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
"""Batch, query tokens, heads, context. DeepSeek-V3 has 128 heads; 64 and 16 are what one GPU has
under tensor parallelism."""

SPARSE = ((1, 128, 2048), (128, 128, 2048), (128, 64, 2048))
"""Query tokens, heads, slots that each query token lists: DeepSeek-V3.2's decode."""
SPREAD = 4

RAGGED = (64, 2, 128, 16384)
"""A shape that is decoded with sequences of any length up to the context."""

CHUNKS = ((1, 3000, 128, 3000), (1, 2048, 32, 8192))
"""Shapes of one sequence, a part of whose prompt is computed at once."""
SKEWED = (
    (32, 1, 64, 16384),
    (200, 1, 16, 600),
    (256, 1, 128, 4096),
)
"""Shapes that are decoded with log-uniform lengths: one sequence fills its row of the table."""
MIXED = ((64, 512, 128, 8192), (16, 1024, 32, 4096))
"""Shapes with log-uniform lengths, where one sequence has all these query tokens, and the others
one each: an engine's step that computes part of a prompt while it decodes."""


def uneven(batch: int, q_len: int, heads: int, context: int) -> Problem:
    """The problem of sequences of log-uniform lengths, the first with ``q_len`` query tokens."""
    return with_chunk(latent(batch, 1, heads, context, lengths="skewed"), q_len)


def _problems() -> dict[str, Problem]:
    def name(shape: tuple[int, ...]) -> str:
        batch, q_len, heads, context = shape
        return f"{batch}x{q_len}-{heads}-{context}"

    problems = {name(shape): latent(*shape) for shape in SHAPES}
    problems[f"ragged-{name(RAGGED)}"] = latent(*RAGGED, lengths="ragged")
    problems |= {f"chunk-{name(shape)}": latent(*shape) for shape in CHUNKS}
    problems |= {f"skewed-{name(shape)}": uneven(*shape) for shape in SKEWED}
    problems |= {f"mixed-{name(shape)}": uneven(*shape) for shape in MIXED}
    for shape in SHAPES:
        problems[f"{name(shape)}-fp8"] = latent(*shape, kv_dtype=PACKED_TYPE)
    for tokens, heads, topk in SPARSE:
        sparse_name = f"sparse-{name((tokens, 1, heads, topk))}"
        problems[sparse_name] = sparse(tokens, heads, topk)
        problems[f"{sparse_name}-fp8"] = sparse(tokens, heads, topk, kv_dtype=PACKED_TYPE)
    problems["sparse-ragged-128x1-128-2048"] = sparse(128, 128, 2048, lengths="ragged")
    return problems


RANDOM_HEADS = (128, 64, 32, 16, 20)
"""Heads of random problems: DeepSeek-V3's on one to eight GPUs, and those of a smaller model."""


def _random_problem(dice: Random) -> Problem:
    """What FlashInfer computes too: a cache of bfloat16, dense attention."""
    while True:
        heads, axes = dice.choice(RANDOM_HEADS), sequence_axes(dice, (64, 64, 64, 16))
        problem = of_sequences(latent(1, 1, heads, 1), axes, 2 * ROW, _flops)
        if problem is not None:
            return problem


def _unusual_problem(dice: Random) -> Problem:
    """Any heads and pages, caches of bfloat16 and of float8; dense attention."""
    while True:
        heads, kv_dtype = dice.randint(1, 128), dice.choice(("bfloat16", "bfloat16", PACKED_TYPE))
        shape = latent(1, 1, heads, 1, kv_dtype=kv_dtype)
        problem = of_sequences(shape, sequence_axes(dice, PAGE_SIZES), 2 * ROW, _flops)
        if problem is not None:
            return problem


ENTRY = Entry(
    name="flashmla",
    summary="Multi-head latent attention with absorbed weights over a paged cache (DeepSeek).",
    axes=(
        BATCH,
        Axis.size("tokens", "query tokens of all sequences together", 0, 16, varies=True),
        Axis.size("heads", "query heads", 1, 40, exact),
        Axis.size("pages", "pages of the cache", 1, 40, any_size, varies=True),
        TABLE_WIDTH,
        Axis.size(
            "max_q", "upper bound of the query tokens of one sequence", 1, 4, default=1, varies=True
        ),
        PAGE_SIZE,
        Axis.choice("dtype", "element type of q and out", *DTYPES, minor=True),
        KV_DTYPE,
        Axis.number("sm_scale", "factor of q . row, positive", 0.05, DEEPSEEK_SCALE, default=None),
        LENGTHS,
    ),
    inputs=(
        Tensor(
            "q", ("tokens", "heads", ROW), "dtype",
            "queries, one sequence after another: [q_nope @ W_UK (512) | rope(q_pe) (64)]",
        ),
        Tensor(
            "kv_cache", CACHE, "kv_dtype",
            "rows [latent (512) | rotated part of the key (64)], those of query tokens included",
        ),
        *INDICES,
    ),
    outputs=(
        Tensor(
            "out", ("tokens", "heads", LATENT), "dtype",
            "softmax-weighted sum of the visible latents; zeros where no row is visible",
        ),
        Tensor(
            "lse", ("tokens", "heads"), "float32",
            "natural log of the softmax denominator; -inf where no row is visible",
            tolerance=Tolerance(2e-4, 1e-5),
            optional_for_peers=True,
        ),
    ),
    preconditions=ATTENTION_PRECONDITIONS,
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, Tolerance(8e-4, 2.01 / 128)),  # those of FlashMLA's tests
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    unusual_problem=_unusual_problem,
    peers=tuple(peer_in("_flashmla_peers", name) for name in ("flash_mla", "flashinfer")),
    without_peer={
        "sparse-*-fp8":
        "FlashMLA's sparse decoding takes tokens of pages of 64; no peer makes them",
        "*-fp8":
        "neither FlashMLA's dense decoding nor FlashInfer's wrapper reads rows of 656 bytes",
    },
    constraint=_constraint,
)  # fmt: skip
