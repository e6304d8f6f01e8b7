"""`kv_write`: RoPE of queries and keys, and keys and values into a paged cache, in one pass.

It stands between a layer's projections and `paged_attn`. `_new_tokens` says which slot each new
token has, `_rope` how elements are rotated, `_kv_cache` what caches and scales are. For each new
token at position ``at``, in slot ``slot`` of page ``page``:

    q_out = rope(q, at)
    k_cache[page, slot] = rope(k, at) / k_scale
    v_cache[page, slot] = v / v_scale

Values beyond float8_e4m3fn's 448 saturate. All other elements of the caches keep their bits.
Arithmetic is in float32 and rounded once. Block tables and positions must be valid, which only
`kernelcat.debug` checks, and no two new tokens may have the same slot, which nothing checks.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance, exact
from kernelcat.reference._arrays import library_of
from kernelcat.reference._kv_cache import (
    CACHE,
    DTYPES,
    FP8,
    HEAD_DIM,
    KV_HEADS,
    PAGE_SIZE,
    SCALE_AXES,
    SCALES,
    scale_rows,
)
from kernelcat.reference._kv_write_peers import flashinfer_write, torch_write
from kernelcat.reference._new_tokens import (
    PAGES,
    TOKENS,
    WRITE_PRECONDITIONS,
    draw_indices,
    positions,
    room_error,
    slots,
)
from kernelcat.reference._rope import COS_SIN, POSITIONS, STYLE_DOC, STYLES, draw_cos_sin, rotate
from kernelcat.reference._sequences import BATCH, INDICES, LENGTHS, TABLE_WIDTH


def _make_inputs(problem, normal):
    """Rows of cos_sin that nothing may read are NaN, and so are slots before they are written.

    Scales make some keys and values too large for float8_e4m3fn.
    """
    tokens, heads, kv_heads, dim = (
        problem[axis] for axis in ("tokens", "heads", "kv_heads", "head_dim")
    )
    q = normal((tokens, heads, dim))
    xp = library_of(q)
    inputs = {
        "q": q,
        "k": normal((tokens, kv_heads, dim)),
        "v": normal((tokens, kv_heads, dim)),
        **draw_indices(problem, xp),
    }
    at, page, slot = slots(problem, inputs)
    inputs["cos_sin"] = draw_cos_sin(problem, normal, at)
    for name in ("k", "v"):
        if problem["has_scales"]:
            scales = xp.exp(normal((scale_rows(problem.values), kv_heads)))
            inputs[f"{name}_scale"] = xp.float32(0.01) * scales
        cache = normal((problem["pages"], problem["page_size"], kv_heads, dim))
        cache[page, slot] = xp.nan
        inputs[f"{name}_cache"] = cache
    return inputs


def _oracle(problem, arrays):
    at, page, slot = slots(problem, arrays)
    q, k = (rotate(problem, arrays[name], arrays["cos_sin"], at) for name in ("q", "k"))
    outputs = {"q_out": q}
    for name, x in (("k", k), ("v", arrays["v"])):
        if problem["has_scales"]:
            x = x / arrays[f"{name}_scale"][page if problem["page_scales"] else 0 * page][..., None]
        if problem["kv_dtype"] == FP8:
            x = x.clip(-dtypes.E4M3_MAX, dtypes.E4M3_MAX)
        cache = outputs[f"{name}_cache"] = arrays[f"{name}_cache"].copy()
        cache[page, slot] = x
    return outputs


def _flops(problem: Problem) -> int:
    """Four multiplications and two additions for each pair."""
    pairs = problem["rotary_dim"] // 2
    return int(6 * pairs * problem["tokens"] * (problem["heads"] + problem["kv_heads"]))


def _bytes_moved(problem: Problem) -> int:
    """Queries, keys and values in and out, and the rows of cos_sin that new tokens need."""
    size, kv_size = (dtypes.itemsize(problem[axis]) for axis in ("dtype", "kv_dtype"))
    token = 2 * problem["heads"] * size + 2 * problem["kv_heads"] * (size + kv_size)
    rows = len(set(positions(problem)))
    return int(problem["tokens"] * token * problem["head_dim"] + 4 * problem["rotary_dim"] * rows)


def _constraint(problem):
    rotary_dim, kv_dtype, dtype = (problem[axis] for axis in ("rotary_dim", "kv_dtype", "dtype"))
    if rotary_dim % 2 or rotary_dim > problem["head_dim"]:
        return f"rotary_dim={rotary_dim} must be even, and at most head_dim={problem['head_dim']}"
    if kv_dtype not in (dtype, FP8):
        return f"kv_dtype={kv_dtype} is not supported: kv_dtype is dtype ({dtype}) or {FP8}"
    return room_error(problem)


def appended(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int = 64,
    q_len: int = 1,
    **more: int | str | bool,
) -> Problem:
    """The problem of ``batch`` sequences of ``context`` tokens, the last ``q_len`` of them new.

    ``more`` are further axes; the defaults are bfloat16 without scales. Only slots of new tokens
    are written, so the default context is short.
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


def _problems() -> dict[str, Problem]:
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


ENTRY = Entry(
    name="kv_write",
    summary="RoPE of queries and keys, and keys and values into a paged cache, in one pass.",
    axes=(
        BATCH,
        TOKENS,
        Axis.size("heads", "query heads; 0: there are no queries", 0, 16, exact),
        KV_HEADS,
        PAGES,
        TABLE_WIDTH,
        POSITIONS,
        Axis.size(
            "rotary_dim", "first elements of a head that RoPE rotates, even; 0: no RoPE", 0, 256,
            exact,
        ),
        HEAD_DIM,
        PAGE_SIZE,
        Axis.choice("dtype", "element type of q, k and v", *DTYPES, minor=True),
        Axis.choice("kv_dtype", "element type of the cache", *DTYPES, FP8),
        Axis.choice("style", STYLE_DOC, *STYLES, default="neox"),
        *SCALE_AXES,
        LENGTHS,
    ),
    inputs=(
        Tensor(
            "q", ("tokens", "heads", "head_dim"), "dtype",
            "queries of the new tokens, one sequence after another",
        ),
        Tensor("k", ("tokens", "kv_heads", "head_dim"), "dtype", "keys of the new tokens"),
        Tensor("v", ("tokens", "kv_heads", "head_dim"), "dtype", "values of the new tokens"),
        *INDICES,
        COS_SIN,
        *SCALES,
    ),
    outputs=(
        Tensor("q_out", ("tokens", "heads", "head_dim"), "dtype", "rotated queries"),
        Tensor(
            "k_cache", CACHE, "kv_dtype", "slots of new tokens get rotated keys / k_scale",
            tolerance="kv_dtype", updated=True,
        ),
        Tensor(
            "v_cache", CACHE, "kv_dtype", "slots of new tokens get values / v_scale",
            tolerance="kv_dtype", updated=True,
        ),
    ),
    preconditions=WRITE_PRECONDITIONS,
    oracle=_oracle,
    make_inputs=_make_inputs,
    # Half a step of the type, and the noise of float32 where scaled terms cancel.
    tolerance={
        "bfloat16": Tolerance(1e-4, 2**-8),
        "float16": Tolerance(1e-4, 2**-11),
        FP8: Tolerance(2**-10 + 1e-4, 2**-4),
    },
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    peers=(Peer("torch", torch_write), Peer("flashinfer", flashinfer_write)),
    constraint=_constraint,
)  # fmt: skip
