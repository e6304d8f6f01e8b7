"""`paged_attn`: attention of new tokens over a paged cache of keys and values.

Sequence s has ``kv_lens[s]`` tokens in the cache; the last ``q_lens[s] = cu_q[s + 1] - cu_q[s]`` of
them ask, and each sees itself and what came before it (decode, speculative verification, chunked
and full prefill are one thing). Token t of sequence s lies in page ``block_table[s, t //
page_size]``, slot ``t % page_size``; sequences may share pages.

    z = sm_scale * q . k              (times k_scale)
    z = softcap * tanh(z / softcap)   (where softcap > 0)
    p = softmax over the visible keys, and over the sink if there is one
    out = p @ v                       (times v_scale),  lse = log of the softmax's denominator

With ``window`` a query sees the last ``window`` tokens, itself included. A sink is one more logit,
neither scaled nor capped, whose value is zero. A query that sees nothing gets zeros and an lse of
-inf (or its sink). Table entries beyond a sequence are never followed, and slots that hold none of
its tokens never read. Query heads ``h * group .. (h + 1) * group - 1`` share key-value head h.

A cache of ``float4_e2m1fn_x2`` is in NVFP4: pairs of E2M1 values in a byte, the first in its low
half, and a float8_e4m3fn scale, not negative, for 16 values of a head. What NVFP4 calls the global
scale is k_scale and v_scale: ``k = e2m1 * k_block_scale * k_scale``.
"""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance, exact
from kernelcat.reference._arrays import library_of

DTYPES = ("bfloat16", "float16")
FP8, NVFP4 = "float8_e4m3fn", "float4_e2m1fn_x2"
KV_DTYPES = (*DTYPES, FP8, NVFP4)
SCALED = 16
"""Values that share a block scale."""
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128)
SCORES = 1 << 26
"""Scores that the oracle has in memory at once."""
GARBAGE = -(1 << 30)
"""What the table holds where nothing may be followed."""
LOWEST = -1e30
"""A logit that counts for nothing."""


@lru_cache(64)
def lengths(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(q_lens, kv_lens)`` that a problem's inputs have; they follow from the problem alone.

    ``equal``: every table is full and queries are dealt out evenly. ``ragged``: anything that the
    table has room for, empty sequences and the borders of pages among it.
    """
    room = problem["table_width"] * problem["page_size"]
    return dealt(problem, room, min(problem["max_q"], room))


def dealt(problem: Problem, room: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """:func:`lengths` of sequences of ``room`` tokens at most, of which ``most`` are new."""
    batch, tokens, size = problem["batch"], problem["tokens"], problem["page_size"]
    if batch == 0:
        return (), ()
    if problem["lengths"] == "equal":
        return tuple(tokens // batch + (s < tokens % batch) for s in range(batch)), (room,) * batch
    dice = random.Random(problem.key)
    q_lens = [0] * batch
    for _ in range(tokens):
        q_lens[dice.choice([s for s in range(batch) if q_lens[s] < most])] += 1
    kv_lens = []
    for q_len in q_lens:
        border = dice.randint(0, problem["table_width"]) * size + dice.choice((-1, 0, 1))
        length = dice.choice((border, dice.randint(0, room), room if q_len else 0))
        kv_lens.append(min(max(length, q_len), room))
    return tuple(q_lens), tuple(kv_lens)


def _window(problem: Problem) -> int:
    """Tokens that a query sees; 0 (all of them) too where the entry has no window."""
    return int(problem.values.get("window", 0))


def pairs_seen(problem: Problem) -> int:
    """Query tokens times the tokens that each sees."""
    total = 0
    for q_len, kv_len in zip(*lengths(problem), strict=True):
        before, most = kv_len - q_len, _window(problem) or kv_len
        growing = min(max(most - before, 0), q_len)  # queries that see one token more each
        total += growing * before + growing * (growing + 1) // 2 + (q_len - growing) * most
    return total


def tokens_read(problem: Problem) -> int:
    """Cached tokens that some query sees."""
    total = 0
    for q_len, kv_len in zip(*lengths(problem), strict=True):
        first = max(0, kv_len - q_len + 1 - _window(problem)) if _window(problem) else 0
        total += kv_len - first if q_len else 0
    return min(total, problem["pages"] * problem["page_size"])


def tables(problem: Problem) -> tuple[list[list[int]], list[int]]:
    """The block table, and how many slots of each page are read. Few pages are shared."""
    size, table, slots = problem["page_size"], [], [0] * problem["pages"]
    order = list(range(problem["pages"]))
    random.Random(problem.key).shuffle(order)
    pages = itertools.cycle(order)
    for kv_len in lengths(problem)[1]:
        row = [GARBAGE] * problem["table_width"]
        for i in range(-(-kv_len // size)):
            row[i] = next(pages)
            slots[row[i]] = max(slots[row[i]], min(size, kv_len - i * size))
        table.append(row)
    return table, slots


def _make_inputs(problem, normal):
    """Slots that nobody may read are NaN, and so are pages that no table names.

    NVFP4 has no NaN: there it is the block scales. Queries are large, so that a few keys have most
    of the weight and each of them shows.
    """
    batch, tokens, heads, kv_heads, dim = (
        problem[axis] for axis in ("batch", "tokens", "heads", "kv_heads", "head_dim")
    )
    (table, slots), (q_lens, kv_lens) = tables(problem), lengths(problem)
    q = 2.5 * normal((tokens, heads, dim))
    xp = library_of(q)
    used = xp.asarray(slots, dtype="int32")[:, None]
    unread = (xp.arange(problem["page_size"])[None, :] >= used)[:, :, None, None]
    cache = (problem["pages"], problem["page_size"], kv_heads, dim)
    starts = [0, *itertools.accumulate(q_lens)]
    inputs = {
        "q": q,
        "block_table": xp.asarray(table, dtype="int32").reshape(batch, problem["table_width"]),
        "kv_lens": xp.asarray(kv_lens, dtype="int32"),
        "cu_q": xp.asarray(starts, dtype="int32"),
    }
    for name in ("k", "v"):
        values, nan = normal(cache), xp.float32("nan")
        if problem["kv_dtype"] == NVFP4:
            values, scales = _in_blocks(values)
            inputs[f"{name}_block_scale"] = xp.where(unread, nan, scales)
        else:
            values = xp.where(unread, nan, values)
        inputs[f"{name}_cache"] = values
    if problem["has_sinks"]:
        inputs["sinks"] = normal((heads,))
    if problem["has_scales"]:
        for name in ("k_scale", "v_scale"):
            inputs[name] = xp.exp(0.3 * normal((scale_rows(problem.values), kv_heads)))
    return inputs


def _in_blocks(values):
    """Blocks of ``values`` with the largest at E2M1's, and the scales that this takes."""
    blocks = values.reshape(*values.shape[:-1], -1, SCALED)
    scales = abs(blocks).max(-1) / dtypes.E2M1_MAX
    scales = dtypes.decode(dtypes.encode(scales, FP8), FP8)
    return (blocks / scales[..., None]).reshape(values.shape), scales


def scale_rows(axes):
    """Rows of k_scale and v_scale."""
    return axes["pages"] if axes["page_scales"] else 1


def cache_row(axes):
    """Elements that hold a head's values: NVFP4 has two in each."""
    return axes["head_dim"] // 2 if axes["kv_dtype"] == NVFP4 else axes["head_dim"]


def row_bytes(problem: Problem) -> int:
    """Bytes that a key or value of a head takes in the cache, block scales included."""
    row = cache_row(problem.values) * dtypes.itemsize(problem["kv_dtype"])
    return int(row + problem["head_dim"] // SCALED * (problem["kv_dtype"] == NVFP4))


def sm_scale(problem: Problem) -> float:
    """What scores are multiplied by: 1 / sqrt(head_dim) where the problem says 0."""
    return float(problem["sm_scale"]) or problem["head_dim"] ** -0.5


def _attend(problem, q, k, v, sinks, first_token):
    """(kv_heads, group, queries, dim) over (kv_heads, tokens, dim): out and lse.

    Query i is token ``first_token + i`` of its sequence. The sink, (kv_heads, group), is a token
    more that has no value.
    """
    xp = library_of(q)
    heads, group, queries, dim = q.shape
    z = q.reshape(heads, -1, dim) @ k.transpose(0, 2, 1) * sm_scale(problem)
    if problem["softcap"]:
        z = problem["softcap"] * xp.tanh(z / problem["softcap"])
    z = z.reshape(heads, group, queries, k.shape[1])
    ahead = xp.arange(k.shape[1])[None, :] - xp.arange(queries)[:, None]
    hidden = ahead > first_token
    if problem["window"]:
        hidden |= ahead <= first_token - problem["window"]
    z = xp.where(hidden, xp.float32("-inf"), z)
    sinks = xp.broadcast_to(sinks[..., None, None], (*z.shape[:3], 1))
    z = xp.concatenate((z, sinks), axis=3)
    most = z.max(3)
    p = xp.exp(z - most[..., None])
    total = p.sum(3)
    rows = (heads, group * queries, k.shape[1])
    out = (p[..., :-1].reshape(rows) @ v).reshape(q.shape) / total[..., None]
    return out, xp.where(most > LOWEST, xp.log(total) + most, xp.float32("-inf"))


def _oracle(problem, arrays):
    size, dim, kv_heads = problem["page_size"], problem["head_dim"], problem["kv_heads"]
    heads = problem["heads"]
    q = arrays["q"].reshape(problem["tokens"], kv_heads, heads // kv_heads, dim)
    xp = library_of(q)
    out, lse = xp.zeros_like(q), xp.zeros_like(q[..., 0])
    sinks = xp.full(q.shape[1:3], LOWEST, dtype="float32")
    if problem["has_sinks"]:
        sinks = arrays["sinks"].reshape(sinks.shape)
    bounds = itertools.pairwise(arrays["cu_q"].tolist())
    for s, ((start, end), kv_len) in enumerate(
        zip(bounds, arrays["kv_lens"].tolist(), strict=True)
    ):
        pages = arrays["block_table"][s, : -(-kv_len // size)]
        cached = []
        for name in ("k", "v"):
            values = arrays[f"{name}_cache"][pages]  # (pages, slots, heads, dim)
            if problem["kv_dtype"] == NVFP4:
                scales = arrays[f"{name}_block_scale"][pages]
                values = values * scales.repeat(SCALED, axis=-1)
            if problem["has_scales"]:
                rows = pages if problem["page_scales"] else xp.zeros_like(pages)
                values = values * arrays[f"{name}_scale"][rows][:, None, :, None]
            cached.append(values.reshape(-1, kv_heads, dim)[:kv_len].transpose(1, 0, 2))
        step = max(1, SCORES // max(heads * kv_len, 1))
        for first in range(start, end, step):
            part = slice(first, min(first + step, end))
            asked = q[part].transpose(1, 2, 0, 3)
            found = _attend(problem, asked, *cached, sinks, kv_len - (end - first))
            out[part], lse[part] = found[0].transpose(2, 0, 1, 3), found[1].transpose(2, 0, 1)
    return {"out": out.reshape(-1, heads, dim), "lse": lse.reshape(-1, heads)}


def _flops(problem: Problem) -> int:
    return int(4 * problem["heads"] * problem["head_dim"] * pairs_seen(problem))


def _bytes_moved(problem: Problem) -> int:
    query_bytes = problem["head_dim"] * dtypes.itemsize(problem["dtype"])
    cached = 2 * tokens_read(problem) * problem["kv_heads"] * row_bytes(problem)
    return int(cached + problem["tokens"] * problem["heads"] * (2 * query_bytes + 4))


def _constraint(problem):
    room = problem["table_width"] * problem["page_size"]
    if not problem["kv_heads"] or problem["heads"] % problem["kv_heads"]:
        return f"heads={problem['heads']} must be a multiple of kv_heads={problem['kv_heads']}"
    if problem["kv_dtype"] not in (problem["dtype"], FP8, NVFP4):
        return f"kv_dtype is dtype ({problem['dtype']}), {FP8} or {NVFP4}"
    if problem["sm_scale"] < 0 or problem["softcap"] < 0:
        return "sm_scale and softcap must not be negative"
    if problem["tokens"] > problem["batch"] * min(problem["max_q"], room):
        return "more query tokens than batch * max_q, or than the table has room for"
    if not problem["pages"] and room * problem["batch"]:
        return "the cache has no page"
    return None


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
    """Sequences of one length, ``context`` tokens of which the last ``q_len`` ask."""
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
"""Llama and gpt-oss shapes: batch, heads, kv_heads, head_dim, context, page_size."""

QUANTIZED = {
    FP8: (DECODE[0], DECODE[2], DECODE[5]),
    NVFP4: (DECODE[0], DECODE[5]),
}
"""Shapes that are decoded from caches of these types, too, with a scale a head."""

RAGGED = (64, 32, 8, 128, 16384, 16)
"""A shape that is decoded with sequences of any length, up to the context."""

PREFILL = ((1, 32, 8, 128, 16384, 64), (4, 32, 8, 128, 4096, 64), (2, 64, 8, 64, 8192, 64))


def _named(kind: str, shape: tuple[int, ...]) -> str:
    batch, heads, kv_heads, dim, context, page = shape
    return f"{kind}-{batch}x{context}-{heads}/{kv_heads}x{dim}-p{page}"


def _names() -> dict[str, Problem]:
    found = {_named("decode", shape): attention(*shape) for shape in DECODE}
    for shape in PREFILL:
        found[_named("prefill", shape)] = attention(*shape, q_len=shape[4])
    found[_named("ragged", RAGGED)] = attention(*RAGGED, lengths="ragged")
    for kv_dtype, suffix in ((FP8, "e4m3"), (NVFP4, "nvfp4")):
        for shape in QUANTIZED[kv_dtype]:
            quantized = attention(*shape, kv_dtype=kv_dtype, has_scales=True)
            found[f"{_named('decode', shape)}-{suffix}"] = quantized
    return found


def _peer(name: str) -> Peer:
    """A peer from its own module, which is imported when it is raced."""

    def load():
        from kernelcat.reference import _paged_attn_peers

        return getattr(_paged_attn_peers, name)()

    return Peer(name, load)


SCALE_ROWS = Derived("1 or pages", scale_rows)
STARTS = Derived("batch + 1", lambda axes: axes["batch"] + 1)
SLOTS = ("pages", "page_size", "kv_heads")
CACHE = (*SLOTS, Derived("head_dim or head_dim/2", cache_row))
BLOCKS = (*SLOTS, Derived(f"head_dim/{SCALED}", lambda axes: axes["head_dim"] // SCALED))

ENTRY = Entry(
    name="paged_attn",
    summary="Attention of new tokens over a paged cache of keys and values, and its log-sum-exp.",
    axes=(
        Axis.size("batch", "sequences", 0, 6),
        Axis.size("tokens", "query tokens of all sequences", 0, 40),
        Axis.size("heads", "query heads", 1, 16, exact),
        Axis.size("kv_heads", "key-value heads", 1, 4, exact),
        Axis.size("pages", "pages of the cache", 1, 40),
        Axis.size("table_width", "pages of the longest sequence", 0, 12),
        Axis.size("max_q", "query tokens of any sequence, at most", 1, 24, default=1),
        Axis.size("window", "tokens a query sees, itself included; 0: all", 0, 40, default=0),
        Axis.choice("head_dim", "elements of a head", *HEAD_DIMS),
        Axis.choice("page_size", "tokens of a page", *PAGE_SIZES),
        Axis.choice("dtype", "element type of q and out", *DTYPES, minor=True),
        Axis.choice("kv_dtype", "element type of the cache", *KV_DTYPES),
        Axis.number("sm_scale", "factor of the scores; 0: 1 / sqrt(head_dim)", 0.0, 0.2),
        Axis.number("softcap", "bound of the scores; 0: none", 0.0, 2.5),
        Axis.flag("has_sinks", "whether there are sinks", minor=True),
        Axis.flag("has_scales", "whether keys and values have scales", minor=True),
        Axis.flag("page_scales", "whether each page has scales of its own", minor=True),
        Axis.choice(
            "lengths", "of the inputs that are drawn", "equal", "ragged",
            default="equal", minor=True,
        ),
    ),
    inputs=(
        Tensor("q", ("tokens", "heads", "head_dim"), "dtype", "queries, sequence after sequence"),
        Tensor("k_cache", CACHE, "kv_dtype", "keys"),
        Tensor("v_cache", CACHE, "kv_dtype", "values"),
        Tensor("block_table", ("batch", "table_width"), "int32", "pages of each sequence"),
        Tensor("kv_lens", ("batch",), "int32", "cached tokens of each sequence, queries included"),
        Tensor("cu_q", (STARTS,), "int32", "where each sequence's queries begin, and their end"),
        Tensor("sinks", ("heads",), "float32", "a logit more for each head", flag="has_sinks"),
        Tensor("k_scale", (SCALE_ROWS, "kv_heads"), "float32", "of keys", flag="has_scales"),
        Tensor("v_scale", (SCALE_ROWS, "kv_heads"), "float32", "of values", flag="has_scales"),
        Tensor("k_block_scale", BLOCKS, FP8, "of keys in NVFP4", flag="kv_dtype", when=NVFP4),
        Tensor("v_block_scale", BLOCKS, FP8, "of values in NVFP4", flag="kv_dtype", when=NVFP4),
    ),
    outputs=(
        Tensor("out", ("tokens", "heads", "head_dim"), "dtype", "the result"),
        Tensor(
            "lse", ("tokens", "heads"), "float32", "log of the softmax's denominator",
            tolerance=Tolerance(2e-4, 1e-5),
            optional_for_peers=True,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(1e-2, 2**-7), "float16": Tolerance(2e-3, 2**-9)},
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(_peer("sdpa"), _peer("flash_attn_4"), _peer("flashinfer")),
    constraint=_constraint,
)  # fmt: skip
