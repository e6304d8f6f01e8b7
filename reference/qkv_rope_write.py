"""`qkv_rope_write`: RMSNorm, projections to queries, keys and values, RoPE, and the cache write.

It is the first half of a decoder layer's attention, for batches so small that the weights are most
of what has to be read. For each new token, row x of the residual stream becomes

    a = x / sqrt(mean(x^2) + eps) * norm_weight, rounded to dtype
    q = wq a + bq    k = wk a + bk    v = wv a + bv      each head has head_dim rows of its weights

and q, k and v go on as `kv_write` says: RoPE of queries and keys, and keys and values into a paged
cache. Sums are in float32 and are not rounded before the rotation. The weights may be views of one
array, as checkpoints with a fused projection have them. YaRN is in the table cos_sin: its angles
and its factor belong to the positions, not to the kernel.

Sources: the fusion is that of decoders written as few launches, among them Hazy Research's
low-latency Llama megakernel (2025).
"""

from __future__ import annotations

from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance, exact
from kernelcat.reference import kv_write
from kernelcat.reference._arrays import library_of
from kernelcat.reference._kv_cache import DTYPES, FP8, SCALES
from kernelcat.reference._kv_write_peers import torch_projected_write
from kernelcat.reference._random_sizes import attention_heads, log_uniform, model_with
from kernelcat.reference._rope import COS_SIN
from kernelcat.reference._sequences import INDICES

PROJECTIONS = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
"""Result -> the axis with the number of its heads."""


def _written(problem: Problem) -> Problem:
    """The problem of `kv_write` that remains after the projections."""
    axes = {axis.name: problem[axis.name] for axis in kv_write.ENTRY.axes}
    return Problem.of("kv_write", **axes)


def _make_inputs(problem, normal):
    """Scales near 1: a peer that rounds q, k and v before the rotation stays within tolerance."""
    inputs = kv_write.ENTRY.make_inputs(_written(problem), normal)
    tokens, hidden, dim = (problem[axis] for axis in ("tokens", "hidden", "head_dim"))
    xp = library_of(inputs["k_cache"])
    for name, axis in PROJECTIONS.items():
        del inputs[name]
        weights = normal((problem[axis], dim, hidden)) * xp.float32(0.5 * max(hidden, 1) ** -0.5)
        inputs[f"w{name}"] = weights
        if problem["bias"]:
            inputs[f"b{name}"] = 0.25 * normal((problem[axis], dim))
        if problem["has_scales"] and name != "q":
            near_one = 1 + 0.2 * normal(inputs[f"{name}_scale"].shape)
            inputs[f"{name}_scale"] = xp.clip(near_one, 0.5, 2)
    inputs["x"] = normal((tokens, hidden)) * 2.0 ** (3 * xp.tanh(normal((tokens, 1))))
    inputs["norm_weight"] = 1 + 0.2 * normal((hidden,))
    return inputs


def _oracle(problem, arrays):
    x, dtype = arrays["x"], problem["dtype"]
    xp = library_of(x)
    mean = (x * x).sum(axis=1, keepdims=True) / xp.float32(max(problem["hidden"], 1))
    a = x / xp.sqrt(mean + xp.float32(problem["eps"])) * arrays["norm_weight"]
    a = dtypes.decode(dtypes.encode(a, dtype), dtype)
    heads = {}
    for name, axis in PROJECTIONS.items():
        rows = problem[axis] * problem["head_dim"]
        weights = arrays[f"w{name}"].reshape(rows, problem["hidden"])
        z = (a @ weights.T).reshape(problem["tokens"], problem[axis], problem["head_dim"])
        heads[name] = z + arrays[f"b{name}"] if problem["bias"] else z
    return kv_write.ENTRY.oracle(_written(problem), {**arrays, **heads})


def _weight_rows(problem: Problem) -> int:
    """Rows of all weights."""
    return int((problem["heads"] + 2 * problem["kv_heads"]) * problem["head_dim"])


def _flops(problem: Problem) -> int:
    products = 2 * problem["tokens"] * _weight_rows(problem) * problem["hidden"]
    return products + kv_write.ENTRY.flops(_written(problem))


def _bytes_moved(problem: Problem) -> int:
    """Weights, biases and x once, and what `kv_write` moves, without q, k and v as its inputs."""
    size, rows, tokens = dtypes.itemsize(problem["dtype"]), _weight_rows(problem), problem["tokens"]
    if not tokens:
        return 0
    weights = rows * (problem["hidden"] + problem["bias"]) + (tokens + 1) * problem["hidden"]
    return size * (weights - tokens * rows) + kv_write.ENTRY.bytes_moved(_written(problem))


def projected(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    *,
    bias: bool = False,
    eps: float = 1e-5,
    **more: int | str | bool,
) -> Problem:
    """The problem of one new token for each of ``batch`` sequences; ``more`` as in `kv_write`."""
    axes = kv_write.appended(batch, heads, kv_heads, head_dim, **more).values
    return Problem.of("qkv_rope_write", **axes, hidden=hidden, bias=bias, eps=eps)


MODELS = {
    "gptoss": ((64, 8, 64, 2880), {"bias": True}),
    "qwen3-30b": ((32, 4, 128, 2048), {}),
    "llama-8b": ((32, 8, 128, 4096), {}),
    "smollm2": ((9, 3, 64, 576), {}),
}
"""Query heads, key-value heads, elements of a head, hidden size; and other axes."""


def _problems() -> dict[str, Problem]:
    named = {
        f"{model}-{batch}": projected(batch, *sizes, **axes)
        for model, (sizes, axes) in MODELS.items()
        for batch in (1, 8, 64)
    }
    sizes, axes = MODELS["gptoss"]
    return named | {
        "gptoss-8-fp8": projected(8, *sizes, **axes, kv_dtype=FP8, has_scales=True),
    }


def _random_problem(dice: Random) -> Problem:
    """A decode step of a model's heads, or a GPU's share; hidden is that of any model."""
    batch, (heads, kv_heads, dim) = log_uniform(dice, 1, 128), attention_heads(dice)
    hidden = model_with(dice).hidden
    return projected(batch, heads, kv_heads, dim, hidden, bias=dice.random() < 0.3)


ENTRY = Entry(
    name="qkv_rope_write",
    summary="RMSNorm, projections to queries, keys and values, RoPE and the cache write, fused.",
    axes=(
        *(axis for axis in kv_write.ENTRY.axes if axis.name != "dtype"),
        Axis.choice("dtype", "element type of x, the weights and q_out", *DTYPES, minor=True),
        Axis.size("hidden", "columns of x and of the weights", 0, 600, exact),
        Axis.flag("bias", "whether bq, bk and bv are given"),
        Axis.number("eps", "added to the mean square", 1e-5, 1e-6, default=1e-5),
    ),
    inputs=(
        Tensor(
            "x", ("tokens", "hidden"), "dtype",
            "residual stream of the new tokens, one sequence after another",
        ),
        Tensor("norm_weight", ("hidden",), "dtype", "factor of each column after RMSNorm"),
        *(
            Tensor(f"w{name}", (axis, "head_dim", "hidden"), "dtype", f"weights of {name}")
            for name, axis in PROJECTIONS.items()
        ),
        *INDICES,
        COS_SIN,
        *(
            Tensor(f"b{name}", (axis, "head_dim"), "dtype", f"bias of {name}", flag="bias")
            for name, axis in PROJECTIONS.items()
        ),
        *SCALES,
    ),
    outputs=kv_write.ENTRY.outputs,
    preconditions=kv_write.ENTRY.preconditions,
    oracle=_oracle,
    make_inputs=_make_inputs,
    # a may be rounded to either neighbour, and peers round q, k and v before the rotation.
    tolerance={
        "bfloat16": Tolerance(2**-5, 2**-7),
        "float16": Tolerance(2**-8, 2**-10),
        FP8: Tolerance(2**-5, 2**-3),
    },
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    peers=(Peer("torch", torch_projected_write),),
    constraint=lambda problem: kv_write.ENTRY.constraint(_written(problem)),
)  # fmt: skip
