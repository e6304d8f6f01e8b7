"""`attn_merge`: attention over all keys, from attention over parts of the keys.

Part p has the result outs[p] (tokens, heads, head_dim) and lses[p] (tokens, heads), the natural
logarithm of its softmax's denominator, as `paged_attn` returns them. Parts come from cascade
attention (a prefix that sequences share, then what each has alone), from splits of long contexts
and from context parallelism.

    lse = log(sum over p of exp(lses[p]))
    out = sum over p of exp(lses[p] - lse) * outs[p]

A part with an lse of -inf has no visible key and is left out, whatever its result holds (NaN too).
Where all parts are left out, out is zero and lse -inf.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import Unsupported
from kernelcat.reference._arrays import library_of
from kernelcat.reference._kv_cache import DTYPES, HEAD_DIMS
from kernelcat.reference._peers import import_torch

EMPTY_PERIOD = 5
"""One part in five of the drawn inputs has no visible key."""


def _make_inputs(problem, normal):
    """Parts without a visible key have NaN for a result."""
    shape = tuple(problem[axis] for axis in ("parts", "tokens", "heads"))
    outs, lses = normal((*shape, problem["head_dim"])), 2.0 * normal(shape)
    xp = library_of(outs)
    is_empty = xp.arange(lses.size).reshape(shape) * 7919 % EMPTY_PERIOD == 0
    return {
        "outs": xp.where(is_empty[..., None], xp.float32("nan"), outs),
        "lses": xp.where(is_empty, xp.float32("-inf"), lses),
    }


def _oracle(problem, arrays):
    outs, lses = arrays["outs"], arrays["lses"]
    xp = library_of(outs)
    has_keys = lses > xp.float32("-inf")
    max_lse = xp.where(has_keys, lses, xp.float32(-1e30)).max(0)
    weights = xp.where(has_keys, xp.exp(lses - max_lse), 0.0)
    total = weights.sum(0)
    divisor = xp.where(total > 0, total, 1.0)
    values = xp.where(has_keys[..., None], outs, 0.0)
    out = (weights[..., None] * values).sum(0) / divisor[..., None]
    lse = xp.where(total > 0, xp.log(divisor) + max_lse, xp.float32("-inf"))
    return {"out": out, "lse": lse}


def _bytes_moved(problem: Problem) -> int:
    """Every part is counted, since how many parts have no visible key depends on the data."""
    row = problem["head_dim"] * dtypes.itemsize(problem["dtype"]) + 4
    return int((problem["parts"] + 1) * problem["tokens"] * problem["heads"] * row)


def merged(parts: int, tokens: int, heads: int, head_dim: int, dtype: str = "bfloat16") -> Problem:
    """The problem of merging ``parts`` results (tokens, heads, head_dim)."""
    return Problem.of(
        "attn_merge", parts=parts, tokens=tokens, heads=heads, head_dim=head_dim, dtype=dtype
    )


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(outs, lses, out, lse):
        total = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - total).nan_to_num(0.0)[..., None]
        out.copy_((weights * outs.float().nan_to_num(0.0)).sum(0))
        lse.copy_(total)

    def make(problem, arrays):
        if problem["tokens"] * problem["heads"] == 0:
            raise Unsupported("torch is not raced where tokens or heads is 0")
        return lambda: run(*(arrays[name] for name in ("outs", "lses", "out", "lse")))

    return make


ROW = ("tokens", "heads", "head_dim")

ENTRY = Entry(
    name="attn_merge",
    summary="Attention over all keys from attention over parts of them, by their log-sum-exps.",
    axes=(
        Axis.size("parts", "parts of the keys", 1, 9),
        Axis.size("tokens", "query tokens", 0, 40, varies=True),
        Axis.size("heads", "query heads", 0, 16),
        Axis.choice("head_dim", "elements of a head", *HEAD_DIMS),
        Axis.choice("dtype", "element type of outs and out", *DTYPES, minor=True),
    ),
    inputs=(
        Tensor("outs", ("parts", *ROW), "dtype", "attention over the keys of each part"),
        Tensor(
            "lses", ("parts", *ROW[:2]), "float32",
            "natural log of each part's softmax denominator; -inf: the part has no visible key",
        ),
    ),
    outputs=(
        Tensor("out", ROW, "dtype", "attention over all keys"),
        Tensor(
            "lse", ROW[:2], "float32", "natural log of the softmax denominator over all keys",
            tolerance=Tolerance(2e-5, 1e-5),
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(1e-4, 2**-8), "float16": Tolerance(1e-4, 2**-10)},
    flops=lambda problem: 2 * problem["parts"] * problem["tokens"] * problem["heads"]
    * problem["head_dim"],
    bytes_moved=_bytes_moved,
    problems={
        f"{parts}x{tokens}-{heads}x{dim}": merged(parts, tokens, heads, dim)
        for parts, tokens, heads, dim in (
            (2, 128, 32, 128), (2, 4096, 32, 128), (2, 64, 64, 64), (8, 1024, 32, 128),
            (16, 16, 128, 256),
        )
    },
    peers=(Peer("torch", _torch),),
)  # fmt: skip
