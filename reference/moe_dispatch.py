"""`moe_dispatch`: tokens to the ranks of their experts, and the index maps of grouped products.

Which tokens come to a rank, and in which rows, is defined in `_exchange`. Rank r gets, for the
token in row i, token t of rank s:

    rows[r, i] = x[s, t]            in float8, scale[r, :, i] and rows[r, i] as `_fp8` quantizes
    gates[r, i] = weights[s, t]     of all its experts, those of other ranks too
    row_of[r, s, t] = i

Rows from the last one on keep what they held. `source_offsets`, `offsets`, `order` and `position`
describe what has come: rank r may call `moe_gemm` or `moe_mlp`'s kernels on ``ranks * tokens``
tokens with its part of them, where experts are counted from its first one. `moe_combine` brings
the results back. No count goes by way of the host, and a graph may be replayed with other tokens.

Sources: DeepEP (DeepSeek-AI, 2025) and pplx-kernels (one-sided exchange, counts on the device);
DeepSeek-AI, "DeepSeek-V3 technical report", 2024 (float8 on the wire).
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Derived, Entry, Problem, Tensor
from kernelcat.reference import _fp8
from kernelcat.reference._arrays import library_of
from kernelcat.reference._assignments import index_maps
from kernelcat.reference._exchange import (
    DTYPES,
    EXPERT_IDS,
    ROUTING,
    ROW_OF,
    ROWS,
    draw_expert_ids,
    error,
    holders,
    mean_rows,
    rows_of,
)

FP8 = _fp8.FP8


def _num_scales(axes):
    return -(-axes["hidden"] // _fp8.BLOCK)


SCALES = Derived("ceil(hidden/128)", _num_scales)
SOURCES = Derived("ranks+1", lambda axes: axes["ranks"] + 1)
EXPERT_STARTS = Derived("local_experts+1", lambda axes: axes["local_experts"] + 1)
ASSIGNMENTS = Derived(
    "ranks*tokens*top_k", lambda axes: axes["ranks"] * axes["tokens"] * axes["top_k"]
)


def _wire(problem, x):
    """``x`` (n, hidden) as it travels, and its scales (n, blocks) or None."""
    if problem["act_dtype"] != FP8:
        return x, None
    return _fp8.quantize(dtypes.decode(x, problem["dtype"]), 1)


def _oracle(problem, arrays):
    ids, local = arrays["expert_ids"], problem["local_experts"]
    xp, holder = library_of(ids), holders(problem, ids)
    flat_ids = ids.reshape(-1, problem["top_k"])
    weights = arrays["weights"].reshape(flat_ids.shape)
    wire, scales = _wire(problem, arrays["x"].reshape(-1, problem["hidden"]))
    row_of, counts = rows_of(problem, ids)
    names = ("rows", "gates", "scale") if scales is not None else ("rows", "gates")
    out = {name: arrays[name].copy() for name in names}
    maps = []
    for rank, count in enumerate(counts):
        comes = row_of[rank].reshape(-1) >= 0
        out["rows"][rank, :count] = wire[comes]
        out["gates"][rank, :count] = weights[comes]
        if scales is not None:
            out["scale"][rank, :, :count] = scales[comes].T
        is_here = holder.reshape(flat_ids.shape)[comes] == rank
        local_ids = xp.full_like(flat_ids, -1)
        local_ids[:count] = xp.where(is_here, flat_ids[comes] - rank * local, -1)
        starts = xp.zeros(problem["ranks"] + 1, dtype="int32")
        starts[1:] = xp.cumsum((row_of[rank] >= 0).sum(axis=1))
        maps.append({"source_offsets": starts, **index_maps(local_ids, local)})
    stacked = {name: xp.stack([each[name] for each in maps]) for name in maps[0]}
    return out | stacked | {"row_of": xp.stack(row_of)}


def _make_inputs(problem, normal):
    ranks, tokens, hidden = (problem[axis] for axis in ("ranks", "tokens", "hidden"))
    ids = draw_expert_ids(problem, normal)
    xp, num_rows = library_of(ids), ranks * tokens
    x = normal((ranks, tokens, hidden))
    weights = xp.exp(normal(ids.shape))
    return {
        "x": x,
        "expert_ids": ids,
        "weights": weights / weights.sum(axis=2, keepdims=True),
        "rows": xp.broadcast_to(normal((ranks, num_rows, 1)), (ranks, num_rows, hidden)),
        "gates": normal((ranks, num_rows, problem["top_k"])),
        "scale": normal((ranks, _num_scales(problem.values), num_rows)),
    }


def row_bytes(problem: Problem) -> int:
    """Bytes of a row with its scales."""
    hidden = problem["hidden"]
    scales = 4 * _num_scales(problem.values) if problem["act_dtype"] == FP8 else 0
    return int(hidden * dtypes.itemsize(problem["act_dtype"]) + scales)


def _bytes_moved(problem: Problem) -> int:
    """Bytes that one rank moves: it reads x, ids and weights, and writes what comes, and maps."""
    tokens, top_k = problem["tokens"], problem["top_k"]
    read = tokens * (problem["hidden"] * dtypes.itemsize(problem["dtype"]) + 8 * top_k)
    maps = 4 * problem["ranks"] * tokens * (2 * top_k + 1) + 4 * problem["local_experts"]
    return int(read + mean_rows(problem) * (row_bytes(problem) + 4 * top_k) + maps)


def _constraint(problem: Problem) -> str | None:
    dtype = problem["dtype"]
    if problem["act_dtype"] not in (dtype, FP8):
        return f"act_dtype={problem['act_dtype']} must be dtype ({dtype}) or {FP8}"
    return error(problem)


def dispatched(tokens: int, hidden: int, experts: int, top_k: int, **axes) -> Problem:
    """The problem of ``experts`` experts on two ranks; ``axes`` replaces any other choice."""
    others = {
        "ranks": 2, "dtype": "bfloat16", "act_dtype": "bfloat16", "skew": "uniform",
        "batch": "full", **axes,
    }  # fmt: skip
    local = experts // others["ranks"]
    return Problem.of(
        "moe_dispatch", tokens=tokens, hidden=hidden, local_experts=local, top_k=top_k, **others
    )


MODELS = {"gptoss": (2880, 32, 4), "dsv3": (7168, 256, 8)}
"""gpt-oss-20b and DeepSeek-V3: hidden size, experts, experts of a token."""
BATCHES = (1, 64, 128, 1024, 8192)


def _problems() -> dict[str, Problem]:
    named = {f"{name}-{tokens}": dispatched(tokens, *sizes)
             for name, sizes in MODELS.items() for tokens in BATCHES}  # fmt: skip
    float8 = {f"dsv3-{tokens}-fp8": dispatched(tokens, *MODELS["dsv3"], act_dtype=FP8)
              for tokens in BATCHES}  # fmt: skip
    return named | float8


ENTRY = Entry(
    name="moe_dispatch",
    summary="Tokens to the ranks that hold their experts, with index maps for grouped products.",
    axes=(
        *ROUTING,
        Axis.choice("dtype", "element type of x", *DTYPES),
        Axis.choice("act_dtype", "element type of rows, on the wire too", *DTYPES, FP8),
    ),
    inputs=(
        Tensor("x", ("ranks", "tokens", "hidden"), "dtype", "activations; finite for float8"),
        EXPERT_IDS,
        Tensor("weights", ("ranks", "tokens", "top_k"), "float32", "weights of a token's experts"),
    ),
    outputs=(
        Tensor(
            "rows", ("ranks", ROWS, "hidden"), "act_dtype", "activations that have come",
            updated=True,
        ),
        Tensor("gates", ("ranks", ROWS, "top_k"), "float32", "weights by row", updated=True),
        ROW_OF,
        Tensor(
            "source_offsets", ("ranks", SOURCES), "int32",
            "rows source_offsets[r, s] to source_offsets[r, s + 1] - 1 of rank r come from rank s",
        ),
        Tensor(
            "offsets", ("ranks", EXPERT_STARTS), "int32",
            "expert e of rank r serves the assignments offsets[r, e] to offsets[r, e + 1] - 1",
        ),
        Tensor(
            "order", ("ranks", ASSIGNMENTS), "int32",
            "assignments (row * top_k + slot) sorted by expert; -1 after the last",
        ),
        Tensor(
            "position", ("ranks", ROWS, "top_k"), "int32",
            "where in order an assignment stands; -1 for experts of other ranks, and other rows",
        ),
        Tensor(
            "scale", ("ranks", SCALES, ROWS), "float32",
            "scales of rows in float8, a row for each 128 columns", flag="act_dtype", when=FP8,
            updated=True,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["tokens"] * problem["hidden"],
    bytes_moved=_bytes_moved,
    problems=_problems(),
    constraint=_constraint,
    ranks="ranks",
)  # fmt: skip
