"""`paged_attn`: attention of new tokens over a paged cache of keys and values.

The last ``q_lens[s]`` tokens of sequence s are the queries; `_sequences` says where they and the
cached tokens are. Each query attends to its own token and the tokens before it, so decode (one
query), speculative verification and chunked or full prefill are one definition. Several sequences
may share pages. Query heads ``h * group`` to ``(h + 1) * group - 1`` use key-value head h, where
group is heads / kv_heads. For one query and one head:

    z = sm_scale * q . k              for each visible key
    z = softcap * tanh(z / softcap)   where softcap > 0
    p = softmax(z), with the head's sink as one more logit where there are sinks
    out = sum of p * v
    lse = log(sum of exp(z)), natural, the sink included

k and v are the cached values times their scales (`_kv_cache`). ``sm_scale`` 0 stands for
1 / sqrt(head_dim). With ``window`` a query attends to at most the last ``window`` tokens, its own
included. A sink is neither scaled nor capped, and its value is zero.

A query without a visible key gets zeros, and an lse of -inf or its sink. Entries of the block table
beyond a sequence's last page are never followed, and slots that hold no token of a sequence are
never read: both may hold anything, NaN too.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import ceil
from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Problem, Tensor, Tolerance, any_size, exact
from kernelcat.reference._arrays import library_of
from kernelcat.reference._kv_cache import (
    BLOCKS,
    CACHE,
    DTYPES,
    FP8,
    HEAD_DIM,
    HEAD_DIMS,
    KV_HEADS,
    NVFP4,
    PAGE_SIZE,
    PAGE_SIZES,
    SCALE_AXES,
    SCALED,
    SCALES,
    quantize_blocks,
    row_bytes,
    scale_rows,
)
from kernelcat.reference._peers import peer_in
from kernelcat.reference._random_sizes import (
    attention_heads,
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
    query_groups,
    tables,
    tokens_read,
)

KV_DTYPES = (*DTYPES, FP8, NVFP4)
NEGLIGIBLE = -1e30
"""A logit whose weight is zero beside any other; -inf would make NaN of a row without keys."""


def _make_inputs(problem, normal):
    """Slots and pages that no sequence may read are NaN.

    NVFP4 has no NaN, so there the block scales are NaN. Queries are large, so that a few keys have
    most of the weight and an error in one key shows.
    """
    tokens, heads, kv_heads, dim = (
        problem[axis] for axis in ("tokens", "heads", "kv_heads", "head_dim")
    )
    table, slots = tables(problem)
    q = 2.5 * normal((tokens, heads, dim))
    xp = library_of(q)
    used = xp.asarray(slots, dtype="int32")[:, None]
    is_unread = (xp.arange(problem["page_size"])[None, :] >= used)[:, :, None, None]
    cache = (problem["pages"], problem["page_size"], kv_heads, dim)
    inputs = {"q": q, **index_arrays(problem, table, lengths(problem), xp)}
    for name in ("k", "v"):
        values, nan = normal(cache), xp.float32("nan")
        if problem["kv_dtype"] == NVFP4:
            values, scales = quantize_blocks(values)
            inputs[f"{name}_block_scale"] = xp.where(is_unread, nan, scales)
        else:
            values = xp.where(is_unread, nan, values)
        inputs[f"{name}_cache"] = values
    if problem["has_sinks"]:
        inputs["sinks"] = normal((heads,))
    if problem["has_scales"]:
        for name in ("k_scale", "v_scale"):
            inputs[name] = xp.exp(0.3 * normal((scale_rows(problem.values), kv_heads)))
    return inputs


def sm_scale(problem: Problem) -> float:
    """Factor of the scores: 1 / sqrt(head_dim) where the problem's ``sm_scale`` is 0."""
    return float(problem["sm_scale"]) or problem["head_dim"] ** -0.5


def most_visible(problem: Problem, block_m: int | None = None) -> int:
    """Tokens that some query sees of a sequence whose row of the table is full.

    With ``block_m``: that some row tile of so many rows sees, as of :func:`tiles_seen`.
    """
    room, queries = int(problem["table_width"] * problem["page_size"]), int(problem["max_q"])
    if not problem["window"]:
        return room
    if block_m is not None:
        queries = min(queries, ceil(block_m * problem["kv_heads"] / problem["heads"]))
    return min(room, problem["window"] + queries - 1)


def is_cut(problem: Problem) -> bool:
    """Whether the longest sequence has tokens that are older than its window."""
    return 0 < problem["window"] < problem["table_width"] * problem["page_size"]


@lru_cache(64)  # estimates of all configurations ask for a few heights of a tile
def tiles_seen(problem: Problem, block_m: int) -> tuple[int, float]:
    """Row tiles of one key-value head, and the cached tokens that all of them see together.

    A row is a query token and one of the query heads that share a key-value head; a tile has
    ``block_m`` rows of a sequence. Sequences are assumed as in :func:`query_groups`, so that a call
    and its drawn inputs have the same estimate. For cost models.
    """
    group, window = problem["heads"] // problem["kv_heads"], problem["window"]
    count, tokens = 0, 0.0
    for sequences, queries, cached in query_groups(problem):
        tiles, in_tile = ceil(queries * group / block_m), min(block_m / group, queries)
        seen = max(cached - (queries - in_tile) / 2, 1.0)  # of a tile in the middle
        if window:
            seen = min(seen, window + in_tile - 1)
        count += sequences * tiles
        tokens += sequences * tiles * seen
    return count, tokens


def _attend(problem, q, k, v, sinks, first_token):
    """Attention of q (kv_heads, group, queries, dim) to k and v (kv_heads, tokens, dim).

    Query i is token ``first_token + i`` of its sequence. ``sinks`` is (kv_heads, group), with
    ``NEGLIGIBLE`` for none. Returns out, of q's shape, and lse (kv_heads, group, queries).
    """
    xp = library_of(q)
    heads, group, queries, dim = q.shape
    z = q.reshape(heads, -1, dim) @ k.transpose(0, 2, 1) * sm_scale(problem)
    if problem["softcap"]:
        z = problem["softcap"] * xp.tanh(z / problem["softcap"])
    z = z.reshape(heads, group, queries, k.shape[1])
    distance = xp.arange(k.shape[1])[None, :] - xp.arange(queries)[:, None]
    is_hidden = distance > first_token
    if problem["window"]:
        is_hidden |= distance <= first_token - problem["window"]
    z = xp.where(is_hidden, xp.float32("-inf"), z)
    sinks = xp.broadcast_to(sinks[..., None, None], (*z.shape[:3], 1))
    z = xp.concatenate((z, sinks), axis=3)
    row_max = z.max(3)
    p = xp.exp(z - row_max[..., None])
    row_sum = p.sum(3)
    rows = (heads, group * queries, k.shape[1])
    out = (p[..., :-1].reshape(rows) @ v).reshape(q.shape) / row_sum[..., None]
    has_logits = row_max > NEGLIGIBLE
    return out, xp.where(has_logits, xp.log(row_sum) + row_max, xp.float32("-inf"))


def _cached(problem, arrays, pages, kv_len):
    """Keys and values (kv_heads, kv_len, head_dim), scaled, of a sequence with these ``pages``."""
    xp = library_of(pages)
    for name in ("k", "v"):
        values = arrays[f"{name}_cache"][pages]  # (pages, page_size, kv_heads, head_dim)
        if problem["kv_dtype"] == NVFP4:
            values = values * arrays[f"{name}_block_scale"][pages].repeat(SCALED, axis=-1)
        if problem["has_scales"]:
            rows = pages if problem["page_scales"] else xp.zeros_like(pages)
            values = values * arrays[f"{name}_scale"][rows][:, None, :, None]
        tokens = values.reshape(-1, problem["kv_heads"], problem["head_dim"])
        yield tokens[:kv_len].transpose(1, 0, 2)


def _oracle(problem, arrays):
    size, dim, kv_heads = problem["page_size"], problem["head_dim"], problem["kv_heads"]
    heads = problem["heads"]
    q = arrays["q"].reshape(problem["tokens"], kv_heads, heads // kv_heads, dim)
    xp = library_of(q)
    out, lse = xp.zeros_like(q), xp.zeros_like(q[..., 0])
    sinks = xp.full(q.shape[1:3], NEGLIGIBLE, dtype="float32")
    if problem["has_sinks"]:
        sinks = arrays["sinks"].reshape(sinks.shape)
    bounds = itertools.pairwise(arrays["cu_q"].tolist())
    lens = arrays["kv_lens"].tolist()
    for s, ((start, end), kv_len) in enumerate(zip(bounds, lens, strict=True)):
        k, v = _cached(problem, arrays, arrays["block_table"][s, : -(-kv_len // size)], kv_len)
        for chunk in query_chunks(start, end, heads * kv_len):
            queries, first_token = q[chunk].transpose(1, 2, 0, 3), kv_len - (end - chunk.start)
            chunk_out, chunk_lse = _attend(problem, queries, k, v, sinks, first_token)
            out[chunk], lse[chunk] = chunk_out.transpose(2, 0, 1, 3), chunk_lse.transpose(2, 0, 1)
    return {"out": out.reshape(-1, heads, dim), "lse": lse.reshape(-1, heads)}


def _flops(problem: Problem) -> int:
    """A multiplication and an addition for q . k and for p * v of each visible pair."""
    return int(4 * problem["heads"] * problem["head_dim"] * pairs_seen(problem))


@lru_cache(16)  # estimates of all configurations ask for the same problem
def _bytes_moved(problem: Problem) -> int:
    """Visible keys and values, queries, results and their log-sum-exps."""
    query_bytes = problem["head_dim"] * dtypes.itemsize(problem["dtype"])
    cached = 2 * tokens_read(problem) * problem["kv_heads"] * row_bytes(problem)
    return int(cached + problem["tokens"] * problem["heads"] * (2 * query_bytes + 4))


def _constraint(problem):
    kv_dtype = problem["kv_dtype"]
    if not problem["kv_heads"] or problem["heads"] % problem["kv_heads"]:
        return f"heads={problem['heads']} must be a multiple of kv_heads={problem['kv_heads']}"
    if kv_dtype not in (problem["dtype"], FP8, NVFP4):
        return (
            f"kv_dtype={kv_dtype} is not supported: kv_dtype is dtype ({problem['dtype']}), "
            f"{FP8} or {NVFP4}"
        )
    if problem["sm_scale"] < 0 or problem["softcap"] < 0:
        return "sm_scale and softcap must not be negative"
    return queries_error(problem)


def attention(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    page_size: int,
    q_len: int = 1,
    **more: int | float | str | bool,
) -> Problem:
    """The problem of ``batch`` sequences of ``context`` tokens, the last ``q_len`` of them queries.

    ``more`` are further axes; the defaults are bfloat16 without options.
    """
    width = -(-context // page_size)
    axes = {
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "window": 0, "softcap": 0.0, "sm_scale": 0.0,
        "has_sinks": False, "has_scales": False, "page_scales": False, "lengths": "equal", **more,
    }  # fmt: skip
    return Problem.of(
        "paged_attn", batch=batch, tokens=batch * q_len, max_q=q_len, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, table_width=width,
        pages=batch * width, **axes,
    )  # fmt: skip


DECODE = (
    (128, 32, 8, 128, 4096, 16),
    (128, 32, 8, 128, 2048, 64),
    (128, 64, 8, 128, 2048, 64),
    (16, 32, 8, 128, 32768, 16),
    (1, 32, 8, 128, 131072, 16),
    (64, 64, 8, 64, 4096, 16),
    (64, 64, 8, 64, 1024, 16),
    (1, 64, 8, 64, 8192, 16),
)
"""Llama and gpt-oss: batch, heads, kv_heads, head_dim, context, page_size."""

QUANTIZED = {
    FP8: (DECODE[0], DECODE[2], DECODE[5]),
    NVFP4: (DECODE[0], DECODE[5]),
}
"""Shapes that are also decoded from quantized caches with one k_scale and v_scale for each head."""

SINKS = (
    ((1, 64, 8, 64, 3008, 16), 0),
    ((1, 64, 8, 64, 3008, 16), 128),
    ((64, 64, 8, 64, 1024, 16), 128),
)
"""Layers of gpt-oss at small batches, with sinks: a shape, and the window of every other layer."""

RAGGED = (64, 32, 8, 128, 16384, 16)
"""A shape that is decoded with sequences of any length up to the context."""

SKEWED = (
    (4, 64, 8, 128, 131072, 16),
    (64, 32, 8, 128, 16384, 16),
    (128, 32, 1, 128, 4096, 64),
    (64, 16, 8, 256, 4096, 16),
)
"""Shapes that are decoded with log-uniform lengths: one sequence fills its row of the table."""
MIXED = ((32, 32, 8, 128, 8192, 16), 512)
"""A shape with log-uniform lengths, and the query tokens of one sequence; the others have one
each: an engine's step that computes part of a prompt while it decodes."""

PREFILL = ((1, 32, 8, 128, 16384, 64), (4, 32, 8, 128, 4096, 64), (2, 64, 8, 64, 8192, 64))


def uneven(*shape: int, q_len: int = 1) -> Problem:
    """The problem of sequences of log-uniform lengths, the first with ``q_len`` query tokens."""
    return with_chunk(attention(*shape, lengths="skewed"), q_len)


def _name(kind: str, shape: tuple[int, ...]) -> str:
    batch, heads, kv_heads, dim, context, page = shape
    return f"{kind}-{batch}x{context}-{heads}/{kv_heads}x{dim}-p{page}"


def _problems() -> dict[str, Problem]:
    problems = {_name("decode", shape): attention(*shape) for shape in DECODE}
    for shape in PREFILL:
        problems[_name("prefill", shape)] = attention(*shape, q_len=shape[4])
    problems[_name("ragged", RAGGED)] = attention(*RAGGED, lengths="ragged")
    for shape in SKEWED:
        problems[_name("skewed", shape)] = uneven(*shape)
    problems[_name("mixed", MIXED[0])] = uneven(*MIXED[0], q_len=MIXED[1])
    for kv_dtype, suffix in ((FP8, "e4m3"), (NVFP4, "nvfp4")):
        for shape in QUANTIZED[kv_dtype]:
            quantized = attention(*shape, kv_dtype=kv_dtype, has_scales=True)
            problems[f"{_name('decode', shape)}-{suffix}"] = quantized
    for shape, window in SINKS:
        suffix = f"window{window}-sinks" if window else "sinks"
        with_sinks = attention(*shape, window=window, has_sinks=True)
        problems[f"{_name('decode', shape)}-{suffix}"] = with_sinks
    return problems


def _random_problem(dice: Random) -> Problem:
    """What FlashInfer computes too: bfloat16 without sinks; some have a window or a cap."""
    while True:
        (heads, kv_heads, dim), axes = attention_heads(dice), sequence_axes(dice, (16, 16, 32, 64))
        options = dice.choices(
            ({}, {"window": dice.choice((128, 1024, 4096))}, {"softcap": 50.0}), (8, 1, 1)
        )[0]
        problem = _with_sequences(attention(1, heads, kv_heads, dim, 1, 1, **options), axes)
        if problem is not None:
            return problem


def _unusual_problem(dice: Random) -> Problem:
    """Any heads, pages, element types of the cache and options."""
    while True:
        kv_heads, kv_dtype = 2 ** dice.randint(0, 5), dice.choice(("bfloat16", FP8, NVFP4))
        shape = attention(
            1, kv_heads * dice.randint(1, 16), kv_heads, dice.choice(HEAD_DIMS), 1, 1,
            kv_dtype=kv_dtype, has_scales=kv_dtype != "bfloat16", has_sinks=dice.random() < 0.25,
            window=dice.choice((0, 0, 128, 1024)), softcap=dice.choice((0.0, 0.0, 30.0)),
        )  # fmt: skip
        problem = _with_sequences(shape, sequence_axes(dice, PAGE_SIZES))
        if problem is not None:
            return problem


def _with_sequences(shape: Problem, sequences: dict[str, int | str]) -> Problem | None:
    return of_sequences(shape, sequences, 2 * shape["kv_heads"] * row_bytes(shape), _flops)


ENTRY = Entry(
    name="paged_attn",
    summary="Attention of new tokens over a paged cache of keys and values, and its log-sum-exp.",
    axes=(
        BATCH,
        Axis.size("tokens", "query tokens of all sequences together", 0, 40, varies=True),
        Axis.size("heads", "query heads, a multiple of kv_heads", 1, 16, exact),
        KV_HEADS,
        Axis.size("pages", "pages of the cache", 1, 40, any_size, varies=True),
        TABLE_WIDTH,
        Axis.size(
            "max_q", "upper bound of the query tokens of one sequence", 1, 24, default=1,
            varies=True,
        ),
        Axis.size(
            "window", "tokens that a query attends to, its own included; 0: all before it", 0,
            40, default=0,
        ),
        HEAD_DIM,
        PAGE_SIZE,
        Axis.choice("dtype", "element type of q and out", *DTYPES, minor=True),
        Axis.choice("kv_dtype", "element type of the cache; float4_e2m1fn_x2 is NVFP4", *KV_DTYPES),
        Axis.number("sm_scale", "factor of q . k; 0: 1 / sqrt(head_dim)", 0.0, 0.2),
        Axis.number("softcap", "scores become softcap * tanh(z / softcap); 0: no cap", 0.0, 2.5),
        Axis.flag("has_sinks", "whether sinks are given", minor=True),
        *SCALE_AXES,
        LENGTHS,
    ),
    inputs=(
        Tensor(
            "q", ("tokens", "heads", "head_dim"), "dtype", "queries, one sequence after another"
        ),
        Tensor("k_cache", CACHE, "kv_dtype", "cached keys, those of the query tokens included"),
        Tensor("v_cache", CACHE, "kv_dtype", "cached values, those of the query tokens included"),
        *INDICES,
        Tensor(
            "sinks", ("heads",), "float32",
            "one more logit for each head in the softmax, without a value", flag="has_sinks",
        ),
        *SCALES,
        Tensor(
            "k_block_scale", BLOCKS, FP8, "NVFP4: multiplies 16 elements of a key",
            flag="kv_dtype", when=NVFP4,
        ),
        Tensor(
            "v_block_scale", BLOCKS, FP8, "NVFP4: multiplies 16 elements of a value",
            flag="kv_dtype", when=NVFP4,
        ),
    ),
    outputs=(
        Tensor(
            "out", ("tokens", "heads", "head_dim"), "dtype",
            "softmax-weighted sum of the visible values; zeros where no key is visible",
        ),
        Tensor(
            "lse", ("tokens", "heads"), "float32",
            "natural log of the softmax denominator; -inf where no key is visible, without sinks",
            tolerance=Tolerance(2e-4, 1e-5),
            optional_for_peers=True,
        ),
    ),
    preconditions=ATTENTION_PRECONDITIONS,
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(1e-2, 2**-7), "float16": Tolerance(2e-3, 2**-9)},
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    unusual_problem=_unusual_problem,
    peers=tuple(peer_in("_paged_attn_peers", n) for n in ("sdpa", "flash_attn_4", "flashinfer")),
    without_peer={
        "*-e4m3": "peers are raced over a cache of q's type",
        "*-nvfp4": "peers are raced over a cache of q's type",
        "*-sinks":
        "torch and FlashInfer are raced without sinks, FlashAttention-4 has them in bfloat16",
    },
    constraint=_constraint,
)  # fmt: skip
