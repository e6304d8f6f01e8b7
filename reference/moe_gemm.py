"""`moe_gemm`: products of rows grouped by expert, each group with the weights of its expert.

For row r of expert e (`_assignments`), which stands for assignment ``order[r]``:

    z[r] = A[row of A] @ W[e]^T + bias[e]
    y[r] = activation(z[r])

Without ``combine`` the result is D[r] = y[r], zero in rows without an assignment. With ``gather``
the row of A is the token, order[r] // top_k, else it is r. With ``combine`` the result is

    D[t] = residual[t] + sum over slots s of gates[t, s] * y[position[t, s]]

where dropped assignments add nothing. Sums are float32 and D is rounded once; y may be rounded to
``dtype`` before it is summed into tokens.

So the first product of an MoE layer gathers and activates, and the second one combines. Formats of
weights and the activations are those of `_experts`; with ``act_dtype`` float8_e4m3fn, A is with
a float32 scale for each row and 128 columns, k-blocks first, as `fp8_quantize` stores them.
"""

from __future__ import annotations

import itertools
from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Entry, Problem, Tensor, Tolerance
from kernelcat.reference import _experts, _fp8
from kernelcat.reference._arrays import library_of
from kernelcat.reference._assignments import (
    MAP_PRECONDITIONS,
    OFFSETS,
    ORDER,
    POSITION,
    SKEW,
    SKEWS,
    TOKENS,
    TOP_K,
    active,
    draw_ids,
    index_maps,
    top_k_error,
)
from kernelcat.reference._experts import ACT_DTYPE, DTYPE, EXPERTS, FORMAT, FP8, PACKING
from kernelcat.reference._peers import peer_in
from kernelcat.reference._random_sizes import log_uniform, model_with, near


def _a_rows(axes):
    return axes["tokens"] if axes["gather"] else axes["tokens"] * axes["top_k"]


def _out_rows(axes):
    return axes["tokens"] if axes["combine"] else axes["tokens"] * axes["top_k"]


def out_cols(axes):
    """Columns of D."""
    return axes["N"] if axes["activation"] == "none" else axes["N"] // 2


A_ROWS = Derived("tokens or tokens*top_k", _a_rows)
OUT_ROWS = Derived("tokens*top_k or tokens", _out_rows)
OUT_COLS = Derived("N or N/2", out_cols)
K_BLOCKS = Derived("ceil(K/128)", lambda axes: -(-axes["K"] // _fp8.BLOCK))


def _oracle(problem, arrays):
    n, k, offsets, order = problem["N"], problem["K"], arrays["offsets"], arrays["order"]
    xp = library_of(order)
    a = arrays["a"]
    if problem["act_dtype"] == FP8:
        a = a * _fp8.expand(arrays["a_scale"].T, 1, a.shape)
    y = xp.zeros((order.size, out_cols(problem)), dtype=a.dtype)
    bounds = [int(offset) for offset in offsets]
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first == last:
            continue
        rows = order[first:last] // problem["top_k"] if problem["gather"] else slice(first, last)
        z = a[rows] @ _experts.weights(problem, arrays, "", expert, n, k).astype(a.dtype).T
        if problem["bias"]:
            z = z + arrays["bias"][expert]
        y[first:last] = _experts.activate(problem["activation"], z)
    return {"d": _combined(problem, arrays, y) if problem["combine"] else y}


def _combined(problem, arrays, y):
    """Weighted sums (tokens, columns) of ``y`` (tokens * top_k, columns), plus the residual."""
    xp, position = library_of(y), arrays["position"]
    d = arrays["residual"].copy() if problem["residual"] else xp.zeros_like(y[: len(position)])
    for slot in range(problem["top_k"]):
        row, gate = position[:, slot], arrays["gates"][:, slot]
        served = row >= 0
        d[served] += gate[served][:, None] * y[row[served]]
    return d


def _make_inputs(problem, normal):
    """Activations of rows that no assignment reads are NaN; gates of a token add up to 1."""
    n, k, rows = problem["N"], problem["K"], _a_rows(problem.values)
    ids = draw_ids(problem, normal)
    xp = library_of(ids)
    inputs = index_maps(ids, problem["experts"])
    a = normal((rows, k))
    if problem["act_dtype"] == FP8:
        spread = normal((K_BLOCKS.of(problem.values), rows))
        inputs["a_scale"] = (1 + 0.5 * spread / (1 + abs(spread))).astype("float32")
    if not problem["gather"]:
        a[int(inputs["offsets"][-1]) :] = xp.nan
    inputs["a"] = a
    if problem["combine"]:
        gates = xp.exp(normal(ids.shape))
        inputs["gates"] = gates / gates.sum(axis=1, keepdims=True)
    if problem["residual"]:
        inputs["residual"] = normal((problem["tokens"], out_cols(problem)))
    return inputs | _experts.draw(problem, "", n, k, normal)


def _flops(problem: Problem) -> int:
    return int(2 * problem["tokens"] * problem["top_k"] * problem["N"] * problem["K"])


def _bytes_moved(problem: Problem) -> int:
    """Each active expert's weights once, A once and D once, and the index maps."""
    axes, n, k = problem.values, problem["N"], problem["K"]
    size = dtypes.itemsize(problem["dtype"])
    w = active(problem) * (_experts.weight_bytes(axes, n, k) + size * n * problem["bias"])
    a = _a_rows(axes) * k * (1 if problem["act_dtype"] == FP8 else size)
    d = _out_rows(axes) * out_cols(axes) * size * (2 if problem["residual"] else 1)
    return int(w + a + d + 4 * problem["tokens"] * problem["top_k"])


def _constraint(problem: Problem) -> str | None:
    if problem["residual"] and not problem["combine"]:
        return "a residual needs combine: rows of D are tokens only there"
    if problem["activation"] != "none" and problem["N"] % 2:
        return f"N={problem['N']} must be even for {problem['activation']}, which pairs rows of w"
    return top_k_error(problem) or _experts.error(problem, problem["N"], problem["K"])


def product(tokens: int, top_k: int, experts: int, n: int, k: int, **axes) -> Problem:
    """A grouped product of bfloat16 weights and activations; ``axes`` replaces any other choice."""
    others = {
        "dtype": "bfloat16", "format": "bfloat16", "act_dtype": "bfloat16", "packing": "rows",
        "gather": False, "combine": False, "bias": False, "residual": False,
        "activation": "none", "skew": "uniform", **axes,
    }  # fmt: skip
    return Problem.of("moe_gemm", tokens=tokens, top_k=top_k, experts=experts, N=n, K=k, **others)


def _problems() -> dict[str, Problem]:
    """First and second products of gpt-oss-20b, DeepSeek-V3 and Qwen3-30B-A3B.

    MXFP4 weights by float8 rows, which Blackwell's tensor cores multiply, are in rows, not in tiles
    for registers, and at one number of tokens.
    """
    fp8 = {"format": "fp8", "act_dtype": FP8}
    mxfp4 = {"format": "mxfp4", "packing": "tiles", "bias": True}
    mxfp4_fp8 = {"format": "mxfp4", "act_dtype": FP8, "bias": True}
    models = (
        (
            "gptoss", (4, 32, 5760, 2880), "swiglu_oai",
            {"": {"bias": True}, "-mxfp4": mxfp4, "-mxfp4-fp8": mxfp4_fp8},
        ),
        ("dsv3", (8, 256, 4096, 7168), "swiglu", {"-fp8": fp8}),
        ("qwen3", (8, 128, 1536, 2048), "swiglu", {"": {}, "-fp8": fp8}),
    )  # fmt: skip
    problems = {}
    for model, (top_k, experts, n, k), activation, formats in models:
        for suffix, axes in formats.items():
            for tokens in (1024,) if axes is mxfp4_fp8 else (64, 1024, 8192):
                problems[f"{model}-up-{tokens}{suffix}"] = product(
                    tokens, top_k, experts, n, k, gather=True, activation=activation, **axes
                )
                problems[f"{model}-down-{tokens}{suffix}"] = product(
                    tokens, top_k, experts, k, n // 2, combine=True, **axes
                )
    return problems


MAX_WEIGHT_BYTES = 3 * 10**9
"""Bytes of all experts of a random problem; larger layers are divided among GPUs, by experts."""


def _random_problem(dice: Random) -> Problem:
    """The first or the second product of a layer in bfloat16, which QuACK computes too."""
    model = model_with(dice, "experts")
    hidden, inter = (near(dice, n, 64) for n in (model.hidden, model.expert_inter))
    experts, tokens = model.experts, log_uniform(dice, 1, 8192)
    while 4 * experts * hidden * inter > MAX_WEIGHT_BYTES:
        experts //= 2
    sizes = tokens, min(model.top_k, experts), experts
    skew = dice.choice(SKEWS)
    if dice.random() < 0.5:
        return product(*sizes, 2 * inter, hidden, gather=True, activation="swiglu", skew=skew)
    return product(*sizes, hidden, inter, combine=True, skew=skew)


W, W_OPTIONAL = _experts.tensors(
    "", lambda axes: axes["N"], lambda axes: axes["K"], ("N", lambda size, axes: size)
)

ENTRY = Entry(
    name="moe_gemm",
    summary="Products of rows grouped by expert; gather, bias, SwiGLU and weighted sum are fused.",
    axes=(
        TOKENS,
        TOP_K,
        EXPERTS,
        Axis.size("N", "rows of an expert's weights", 0, 272),
        Axis.size("K", "columns of A and of weights", 0, 416, step=16),
        DTYPE,
        FORMAT,
        ACT_DTYPE,
        PACKING,
        Axis.flag("gather", "rows of A are tokens; else they are grouped by expert"),
        Axis.flag("combine", "rows of D are tokens, sums weighted by gates"),
        Axis.flag("bias", "whether a bias is added before the activation", minor=True),
        Axis.flag("residual", "whether a residual is added to the weighted sums", minor=True),
        Axis.choice(
            "activation", "function of the product plus bias; both SwiGLU halve the columns",
            *_experts.ACTIVATIONS, default="none",
        ),
        SKEW,
    ),
    inputs=(
        Tensor("a", (A_ROWS, "K"), "act_dtype", "activations"),
        W,
        OFFSETS,
        ORDER,
        *W_OPTIONAL,
        Tensor(
            "a_scale", (K_BLOCKS, A_ROWS), "float32",
            "a_scale[j, m] multiplies A[m, 128 j : 128 (j + 1)]", flag="act_dtype", when=FP8,
        ),
        Tensor(
            POSITION.name, POSITION.shape, POSITION.dtype, POSITION.doc, flag="combine"
        ),
        Tensor("gates", ("tokens", "top_k"), "float32", "weights of the sum", flag="combine"),
        Tensor("residual", ("tokens", OUT_COLS), "dtype", "added to the sums", flag="residual"),
    ),
    outputs=(Tensor("d", (OUT_ROWS, OUT_COLS), "dtype", "the result D"),),
    preconditions=MAP_PRECONDITIONS,
    oracle=_oracle,
    make_inputs=_make_inputs,
    # The tolerances of gemm; float8's, like fp8_gemm's, covers the sums of Hopper's tensor cores.
    # Rows may be rounded before they are summed into tokens, so bfloat16 has half as much again.
    tolerance={"bfloat16": Tolerance(3 * 2**-8, 2**-7), "float16": Tolerance(2**-8, 2**-9)},
    product_axis="act_dtype",
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    peers=(peer_in("_quack_moe", "quack", "moe_gemm"),),
    without_peer={
        "*-mxfp4": "QuACK is raced with weights and activations in 16 bits",
        "*-fp8": "QuACK is raced with weights and activations in 16 bits",
    },
    constraint=_constraint,
)  # fmt: skip
