"""`kv_write`: from projections to a paged cache, in one pass: RoPE, then append, quantized or not.

Sequences, tokens and pages are those of `paged_attn`, which comes next: token i of a sequence's
``q_len`` new ones is at position ``at = kv_lens[s] - q_len + i``, and its slot is ``at %
page_size`` of page ``block_table[s, at // page_size]``. Each pair (x, y) of the first
``rotary_dim`` elements of a query or key is turned by its token's angle; the rest stays:

    (x, y) -> (x * cos - y * sin, y * cos + x * sin)

Style "neox" pairs elements i and i + rotary_dim / 2, "interleaved" 2 i and 2 i + 1. Slots of new
tokens get keys / k_scale and values / v_scale, float8_e4m3fn with its bound of 448; everything
else in the caches stays as it is. Arithmetic is in float32, rounded once.

No two new tokens may have the same slot. Nothing but their table entries and rows of cos_sin is
read, and those are not checked.
"""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance, exact
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference._arrays import library_of
from kernelcat.reference.paged_attn import (
    CACHE,
    DTYPES,
    FP8,
    GARBAGE,
    HEAD_DIMS,
    PAGE_SIZES,
    SCALE_ROWS,
    STARTS,
    dealt,
    scale_rows,
)

STYLES = ("neox", "interleaved")


def room_of(problem: Problem) -> int:
    """Tokens that a sequence may have: its table and cos_sin have a place for each."""
    room = int(problem["table_width"] * problem["page_size"])
    return min(room, problem["positions"]) if problem["rotary_dim"] else room


def capacity(problem: Problem) -> int:
    """New tokens that fit if no page is shared: whole pages first, then last ones cut short."""
    whole, rest = divmod(room_of(problem), problem["page_size"])
    full = min(problem["pages"], problem["batch"] * whole)
    return full * problem["page_size"] + min(problem["pages"] - full, problem["batch"]) * rest


@lru_cache(64)
def lengths(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(q_lens, kv_lens)`` of the inputs that are drawn: those of `paged_attn`, if pages suffice.

    Else new sequences are filled one after another, which takes the fewest pages.
    """
    room, size = room_of(problem), problem["page_size"]
    drawn = dealt(problem, room, room)
    if sum(map(len, _new_pages(problem, *drawn))) <= problem["pages"]:
        return drawn
    lens, left = [0] * problem["batch"], problem["tokens"]
    for most in (room // size * size, room):
        for s in range(problem["batch"]):
            more = min(most - lens[s], left)
            lens[s], left = lens[s] + more, left - more
    return tuple(lens), tuple(lens)


def _new_pages(problem, q_lens, kv_lens):
    """Of each sequence, which places in its table have a new token."""
    size = problem["page_size"]
    return [
        range((kv_len - q_len) // size, -(-kv_len // size) if q_len else 0)
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]


def new_table(problem: Problem) -> list[list[int]]:
    """The block table: another page for each place that has a new token, garbage elsewhere."""
    order = list(range(problem["pages"]))
    random.Random(problem.key).shuffle(order)
    pages, table = iter(order), []
    for places in _new_pages(problem, *lengths(problem)):
        row = [GARBAGE] * problem["table_width"]
        for i in places:
            row[i] = next(pages)
        table.append(row)
    return table


def positions(problem: Problem) -> list[int]:
    """Of each token that is drawn."""
    q_and_kv = zip(*lengths(problem), strict=True)
    return [at for q_len, kv_len in q_and_kv for at in range(kv_len - q_len, kv_len)]


def slots_of(problem, arrays):
    """Position, page and slot of each token."""
    cu_q, xp = arrays["cu_q"], library_of(arrays["cu_q"])
    token = xp.arange(problem["tokens"], dtype="int32")
    s = xp.searchsorted(cu_q, token, side="right") - 1
    at = arrays["kv_lens"][s] - cu_q[s + 1] + token
    return at, arrays["block_table"][s, at // problem["page_size"]], at % problem["page_size"]


def _make_inputs(problem, normal):
    """What nobody may read is NaN: rows of cos_sin, and slots of new tokens before they come.

    Scales make some keys and values too large for float8_e4m3fn.
    """
    batch, tokens, heads, kv_heads, dim = (
        problem[axis] for axis in ("batch", "tokens", "heads", "kv_heads", "head_dim")
    )
    q = normal((tokens, heads, dim))
    xp = library_of(q)
    q_lens, kv_lens = lengths(problem)
    table = xp.asarray(new_table(problem), dtype="int32").reshape(batch, problem["table_width"])
    inputs = {
        "q": q,
        "k": normal((tokens, kv_heads, dim)),
        "v": normal((tokens, kv_heads, dim)),
        "block_table": table,
        "kv_lens": xp.asarray(kv_lens, dtype="int32"),
        "cu_q": xp.asarray([0, *itertools.accumulate(q_lens)], dtype="int32"),
    }
    at, page, slot = slots_of(problem, inputs)
    angles = 3.0 * normal((problem["positions"], problem["rotary_dim"] // 2))
    cos_sin = xp.concatenate((xp.cos(angles), xp.sin(angles)), axis=1)
    inputs["cos_sin"] = xp.full_like(cos_sin, xp.nan)
    if problem["rotary_dim"]:
        inputs["cos_sin"][at] = cos_sin[at]
    for name in ("k", "v"):
        if problem["has_scales"]:
            scales = xp.exp(normal((scale_rows(problem.values), kv_heads)))
            inputs[f"{name}_scale"] = xp.float32(0.01) * scales
        cache = normal((problem["pages"], problem["page_size"], kv_heads, dim))
        cache[page, slot] = xp.nan
        inputs[f"{name}_cache"] = cache
    return inputs


def rotated(problem, x, cos_sin, at):
    """x (tokens, heads, head_dim) turned by rows ``at`` of cos_sin."""
    rotary_dim, half = problem["rotary_dim"], problem["rotary_dim"] // 2
    if not rotary_dim:
        return x
    first, second = slice(0, half), slice(half, rotary_dim)
    if problem["style"] == "interleaved":
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    cos, sin = cos_sin[at, None, :half], cos_sin[at, None, half:]
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


def _oracle(problem, arrays):
    at, page, slot = slots_of(problem, arrays)
    q, k = (rotated(problem, arrays[name], arrays["cos_sin"], at) for name in ("q", "k"))
    out = {"q_out": q}
    for name, x in (("k", k), ("v", arrays["v"])):
        if problem["has_scales"]:
            x = x / arrays[f"{name}_scale"][page if problem["page_scales"] else 0 * page][..., None]
        if problem["kv_dtype"] == FP8:
            x = x.clip(-dtypes.E4M3_MAX, dtypes.E4M3_MAX)
        out[f"{name}_cache"] = arrays[f"{name}_cache"].copy()
        out[f"{name}_cache"][page, slot] = x
    return out


def _flops(problem: Problem) -> int:
    """Four products and two sums a pair."""
    pairs = problem["rotary_dim"] // 2
    return int(6 * pairs * problem["tokens"] * (problem["heads"] + problem["kv_heads"]))


def _bytes_moved(problem: Problem) -> int:
    """Queries, keys and values in and out, and the rows of cos_sin that new tokens need."""
    size, kv_size = (dtypes.itemsize(problem[axis]) for axis in ("dtype", "kv_dtype"))
    token = 2 * problem["heads"] * size + 2 * problem["kv_heads"] * (size + kv_size)
    rows = len(set(positions(problem)))
    return int(problem["tokens"] * token * problem["head_dim"] + 4 * problem["rotary_dim"] * rows)


def _constraint(problem):
    if problem["rotary_dim"] % 2 or problem["rotary_dim"] > problem["head_dim"]:
        return f"rotary_dim={problem['rotary_dim']} must be even, and at most head_dim"
    if problem["kv_dtype"] not in (problem["dtype"], FP8):
        return f"kv_dtype is dtype ({problem['dtype']}) or {FP8}"
    if problem["tokens"] > problem["batch"] * room_of(problem):
        return "more new tokens than the table, or cos_sin, has room for"
    if problem["tokens"] > capacity(problem):
        return f"{problem['tokens']} new tokens do not fit in {problem['pages']} pages"
    return None


def appended(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int = 64,
    q_len: int = 1,
    **more: int | str | bool,
) -> Problem:
    """Sequences of one length, ``context`` tokens of which the last ``q_len`` are new.

    Of the cache only slots of new tokens matter, so that a short context is as good as a long one.
    """
    axes = {
        "rotary_dim": head_dim, "page_size": 16, "dtype": "bfloat16", "kv_dtype": "bfloat16",
        "style": "neox", "has_scales": False, "page_scales": False, "lengths": "equal", **more,
    }  # fmt: skip
    width = -(-context // axes["page_size"])
    return Problem.of(
        "kv_write", batch=batch, tokens=batch * q_len, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, table_width=width, pages=batch * width, positions=context, **axes,
    )  # fmt: skip


def _names() -> dict[str, Problem]:
    """Shapes of Llama and gpt-oss."""
    quantized = {"kv_dtype": FP8, "has_scales": True}
    prefill = {"context": 2048, "q_len": 2048}
    return {
        "decode-1-32/8x128": appended(1, 32, 8, 128),
        "decode-128-32/8x128": appended(128, 32, 8, 128),
        "decode-128-32/8x128-fp8": appended(128, 32, 8, 128, **quantized),
        "decode-64-64/8x64": appended(64, 64, 8, 64),
        "prefill-8192-32/8x128": appended(4, 32, 8, 128, **prefill),
        "prefill-8192-32/8x128-fp8": appended(4, 32, 8, 128, **prefill, **quantized),
    }


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer torch needs torch: pip install torch") from error

    def rotated(x, cos, sin, interleaved):
        half = cos.shape[-1]
        turning, rest = x.float().split((2 * half, x.shape[-1] - 2 * half), -1)
        if interleaved:
            first, second = turning[..., ::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, -1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return torch.cat((turned, rest), -1)

    @torch.compile(fullgraph=True, dynamic=False)
    def run(arrays, interleaved, page_scales):
        cu_q, k_cache = arrays["cu_q"], arrays["k_cache"]
        token = torch.arange(len(arrays["q"]), dtype=torch.int32, device=cu_q.device)
        s = torch.searchsorted(cu_q, token, right=True) - 1
        at = (arrays["kv_lens"][s] - cu_q[s + 1] + token).long()
        size = k_cache.shape[1]
        page = arrays["block_table"][s, at // size].long()
        cos, sin = arrays["cos_sin"][at][:, None].chunk(2, -1)
        arrays["q_out"].copy_(rotated(arrays["q"], cos, sin, interleaved))
        k = rotated(arrays["k"], cos, sin, interleaved)
        for name, x in (("k", k), ("v", arrays["v"].float())):
            cache = arrays[f"{name}_cache"]
            if f"{name}_scale" in arrays:
                scale = arrays[f"{name}_scale"]
                x = x / (scale[page] if page_scales else scale)[..., None]
            if cache.dtype == torch.float8_e4m3fn:  # torch puts no float8, but bytes
                x = x.clamp(-dtypes.E4M3_MAX, dtypes.E4M3_MAX).to(cache.dtype).view(torch.uint8)
                cache = cache.view(torch.uint8)
            cache[page, at % size] = x.to(cache.dtype)

    def make(problem, arrays):
        if not problem["tokens"] or not problem["rotary_dim"]:
            raise Unsupported("torch is raced where there is something to rotate")
        interleaved, page_scales = problem["style"] == "interleaved", problem["page_scales"]
        return lambda: run(arrays, interleaved, page_scales)

    return make


def _flashinfer():
    """FlashInfer's RoPE, then its append; what the host tells them is made ahead of time."""
    try:
        import flashinfer
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "the peer flashinfer needs: pip install flashinfer-python"
        ) from error
    rope = flashinfer.rope._apply_rope_pos_ids_cos_sin_cache  # the public ones allocate

    def make(problem, arrays):
        if problem["kv_dtype"] != problem["dtype"] or problem["has_scales"]:
            raise Unsupported("FlashInfer is raced without scales, over a cache of k's type")
        if not problem["tokens"] * problem["heads"] * problem["rotary_dim"]:
            raise Unsupported("FlashInfer is raced where there is something to rotate")
        (q_lens, kv_lens), size = lengths(problem), problem["page_size"]

        def device_tensor(numbers):
            return torch.tensor(numbers, dtype=torch.int32, device=arrays["q"].device)

        counts = [-(-kv_len // size) for kv_len in kv_lens]
        pages = torch.cat([arrays["block_table"][s, :count] for s, count in enumerate(counts)])
        starts = device_tensor([0, *itertools.accumulate(counts)])
        last = device_tensor([(kv_len - 1) % size + 1 for kv_len in kv_lens])
        sequences = device_tensor([s for s, q_len in enumerate(q_lens) for _ in range(q_len)])
        at = device_tensor(positions(problem))
        k, caches = torch.empty_like(arrays["k"]), (arrays["k_cache"], arrays["v_cache"])

        def run():
            angles = (arrays["cos_sin"], at, problem["style"] == "interleaved")
            rope(arrays["q"], arrays["k"], arrays["q_out"], k, *angles)
            flashinfer.append_paged_kv_cache(
                k, arrays["v"], sequences, at, caches, pages, starts, last
            )

        return run

    return make


ENTRY = Entry(
    name="kv_write",
    summary="RoPE of queries and keys, and keys and values into a paged cache, in one pass.",
    axes=(
        Axis.size("batch", "sequences", 0, 6),
        Axis.size("tokens", "new tokens of all sequences", 0, 40),
        Axis.size("heads", "query heads; 0: no queries", 0, 16, exact),
        Axis.size("kv_heads", "key-value heads", 1, 4, exact),
        Axis.size("pages", "pages of the cache", 1, 60),
        Axis.size("table_width", "pages of the longest sequence", 0, 12),
        Axis.size("positions", "rows of cos_sin", 0, 300),
        Axis.size("rotary_dim", "elements of a head that turn, even; 0: no RoPE", 0, 256, exact),
        Axis.choice("head_dim", "elements of a head", *HEAD_DIMS),
        Axis.choice("page_size", "tokens of a page", *PAGE_SIZES),
        Axis.choice("dtype", "element type of q, k and v", *DTYPES, minor=True),
        Axis.choice("kv_dtype", "element type of the cache", *DTYPES, FP8),
        Axis.choice("style", "which elements are a pair", *STYLES, default="neox"),
        Axis.flag("has_scales", "whether keys and values have scales", minor=True),
        Axis.flag("page_scales", "whether each page has scales of its own", minor=True),
        Axis.choice(
            "lengths", "of the inputs that are drawn", "equal", "ragged",
            default="equal", minor=True,
        ),
    ),
    inputs=(
        Tensor("q", ("tokens", "heads", "head_dim"), "dtype", "queries, sequence after sequence"),
        Tensor("k", ("tokens", "kv_heads", "head_dim"), "dtype", "their keys"),
        Tensor("v", ("tokens", "kv_heads", "head_dim"), "dtype", "their values"),
        Tensor("block_table", ("batch", "table_width"), "int32", "pages of each sequence"),
        Tensor("kv_lens", ("batch",), "int32", "tokens of each sequence, new ones included"),
        Tensor("cu_q", (STARTS,), "int32", "where each sequence's new tokens begin, and their end"),
        Tensor("cos_sin", ("positions", "rotary_dim"), "float32", "cosines, then sines"),
        Tensor("k_scale", (SCALE_ROWS, "kv_heads"), "float32", "of keys", flag="has_scales"),
        Tensor("v_scale", (SCALE_ROWS, "kv_heads"), "float32", "of values", flag="has_scales"),
    ),
    outputs=(
        Tensor("q_out", ("tokens", "heads", "head_dim"), "dtype", "queries, turned"),
        Tensor("k_cache", CACHE, "kv_dtype", "keys", tolerance="kv_dtype", updated=True),
        Tensor("v_cache", CACHE, "kv_dtype", "values", tolerance="kv_dtype", updated=True),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    # Half a step of the type, and float32's noise where scaled terms cancel.
    tolerance={
        "bfloat16": Tolerance(1e-4, 2**-8),
        "float16": Tolerance(1e-4, 2**-11),
        FP8: Tolerance(2**-10 + 1e-4, 2**-4),
    },
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(Peer("torch", _torch), Peer("flashinfer", _flashinfer)),
    constraint=_constraint,
)  # fmt: skip
