"""`mla_kv_write`: RoPE of keys, and rows of new tokens into a paged latent cache, in one pass.

It stands between a layer's projections and `flashmla`, whose cache it fills. `_new_tokens` says
which slot each new token has and `_rope` how k_pe is rotated. For each new token at position
``at``, in slot ``slot`` of page ``page``:

    kv_cache[page, slot] = [c (512) | rope(k_pe, at) (64)]

in the cache's type or, for ``uint8``, as the 656 bytes of `_mla_row`, whose scales are computed
here; float8 codes and scales equal those of `_mla_row` bit by bit. All other elements of the cache
keep their bits. Arithmetic is in float32 and rounded once. Block tables and positions must be
valid, which only `kernelcat.debug` checks, and no two new tokens may have the same slot, which
nothing checks.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Problem, Tensor, Tolerance
from kernelcat.reference._arrays import library_of
from kernelcat.reference._kv_cache import DTYPES
from kernelcat.reference._mla_row import LATENT, ROPE, ROW, pack
from kernelcat.reference._new_tokens import (
    PAGES,
    TOKENS,
    WRITE_PRECONDITIONS,
    draw_indices,
    positions,
    room_error,
    slots,
)
from kernelcat.reference._peers import peer_in
from kernelcat.reference._rope import COS_SIN, POSITIONS, STYLE_DOC, STYLES, draw_cos_sin, rotate
from kernelcat.reference._sequences import BATCH, INDICES, LENGTHS, TABLE_WIDTH
from kernelcat.reference.flashmla import (
    CACHE,
    KV_DTYPE,
    PACKED_TYPE,
    PAGE_SIZE,
    POISON,
    kv_dtype_error,
    row_length,
)


def _make_inputs(problem, normal):
    """Rows of cos_sin that nothing may read are NaN, and so are slots before they are written.

    Some tokens have tiny latents, which get the smallest scale, and others large ones.
    """
    tokens, is_packed = problem["tokens"], problem["kv_dtype"] == PACKED_TYPE
    c, k_pe = normal((tokens, LATENT)), normal((tokens, ROPE))
    xp = library_of(c)
    inputs = {
        "c": c * xp.exp(3.0 * normal((tokens, 1))),
        "k_pe": k_pe,
        **draw_indices(problem, xp),
    }
    at, page, slot = slots(problem, inputs)
    inputs["cos_sin"] = draw_cos_sin(problem, normal, at)
    cache = normal((problem["pages"], problem["page_size"], ROW))
    if is_packed:
        cache = pack(cache).astype("float32")
    cache[page, slot] = xp.float32(POISON if is_packed else "nan")
    inputs["kv_cache"] = cache
    return inputs


def _oracle(problem, arrays):
    at, page, slot = slots(problem, arrays)
    k_pe = rotate(problem, arrays["k_pe"][:, None], arrays["cos_sin"], at)[:, 0]
    rows = library_of(k_pe).concatenate((arrays["c"], k_pe), axis=1)
    cache = arrays["kv_cache"].copy()
    cache[page, slot] = pack(rows) if problem["kv_dtype"] == PACKED_TYPE else rows
    return {"kv_cache": cache}


def _flops(problem: Problem) -> int:
    """Four multiplications and two additions for each pair."""
    return int(3 * problem["rotary_dim"] * problem["tokens"])


def _bytes_moved(problem: Problem) -> int:
    """Rows in and out, and the rows of cos_sin that new tokens need."""
    row = row_length(problem.values) * dtypes.itemsize(problem["kv_dtype"])
    token = ROW * dtypes.itemsize(problem["dtype"]) + row
    cos_sin = 4 * problem["rotary_dim"] * len(set(positions(problem)))
    return int(problem["tokens"] * token + cos_sin)


def _constraint(problem):
    if reason := kv_dtype_error(problem):
        return reason
    if problem["kv_dtype"] == PACKED_TYPE and problem["dtype"] != "bfloat16":
        return f"dtype={problem['dtype']} must be bfloat16: rows of 656 bytes hold bfloat16"
    return room_error(problem)


def appended(batch: int, context: int = 64, q_len: int = 1, **more: int | str) -> Problem:
    """The problem of ``batch`` sequences of ``context`` tokens, the last ``q_len`` of them new.

    ``more`` are further axes; the defaults are those of DeepSeek-V3 in bfloat16.
    """
    axes = {
        "rotary_dim": ROPE, "page_size": 64, "dtype": "bfloat16", "kv_dtype": "bfloat16",
        "style": "interleaved", "lengths": "equal", **more,
    }  # fmt: skip
    width = -(-context // axes["page_size"])
    return Problem.of(
        "mla_kv_write", batch=batch, tokens=batch * q_len, table_width=width,
        pages=batch * width, positions=context, **axes,
    )  # fmt: skip


def _problems() -> dict[str, Problem]:
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
        BATCH,
        TOKENS,
        PAGES,
        TABLE_WIDTH,
        POSITIONS,
        Axis.choice("rotary_dim", "elements of k_pe that RoPE rotates", 0, ROPE, default=ROPE),
        PAGE_SIZE,
        Axis.choice("dtype", "element type of c and k_pe", *DTYPES, minor=True),
        KV_DTYPE,
        Axis.choice("style", STYLE_DOC, *STYLES, default="interleaved"),
        LENGTHS,
    ),
    inputs=(
        Tensor("c", ("tokens", LATENT), "dtype", "normalized latents of the new tokens"),
        Tensor("k_pe", ("tokens", ROPE), "dtype", "parts of the keys that RoPE rotates"),
        *INDICES,
        COS_SIN,
    ),
    outputs=(
        Tensor(
            "kv_cache", CACHE, "kv_dtype",
            "slots of new tokens get rows [c (512) | rotated k_pe (64)]",
            tolerance="kv_dtype", updated=True,
        ),
    ),
    preconditions=WRITE_PRECONDITIONS,
    oracle=_oracle,
    make_inputs=_make_inputs,
    # Half a step of the type, and the noise of float32 where terms cancel. Packed bytes may differ
    # by one where this noise decides.
    tolerance={
        "bfloat16": Tolerance(1e-4, 2**-8),
        "float16": Tolerance(1e-4, 2**-11),
        PACKED_TYPE: Tolerance(1.0, 0.0),
    },
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    peers=(
        peer_in("_mla_kv_write_peers", "torch", "torch_write"),
        peer_in("_mla_kv_write_peers", "flashinfer", "flashinfer_write"),
    ),
    constraint=_constraint,
)  # fmt: skip
