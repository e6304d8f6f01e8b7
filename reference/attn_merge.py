"""`attn_merge`: attention over all keys, from attention over parts of them.

Each part has its result and the log of its softmax's denominator, as `paged_attn` gives them; a
cascade (a shared prefix, then what is each sequence's own) and context parallelism make parts.

    lse = log(sum of exp(lses)),  out = sum of exp(lses - lse) * outs

A part with an lse of -inf saw no key and does not count, whatever its result holds. Where no part
saw any, out is zero and lse -inf.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference._arrays import library_of
from kernelcat.reference.paged_attn import DTYPES, HEAD_DIMS

UNSEEN = 5
"""One in so many parts of the inputs saw no key."""


def _make_inputs(problem, normal):
    shape = tuple(problem[axis] for axis in ("parts", "tokens", "heads"))
    outs, lses = normal((*shape, problem["head_dim"])), 2.0 * normal(shape)
    xp = library_of(outs)
    unseen = xp.arange(lses.size).reshape(shape) * 7919 % UNSEEN == 0
    return {
        "outs": xp.where(unseen[..., None], xp.float32("nan"), outs),
        "lses": xp.where(unseen, xp.float32("-inf"), lses),
    }


def _oracle(problem, arrays):
    outs, lses = arrays["outs"], arrays["lses"]
    xp = library_of(outs)
    seen = lses > xp.float32("-inf")
    most = xp.where(seen, lses, xp.float32(-1e30)).max(0)
    weights = xp.where(seen, xp.exp(lses - most), 0.0)
    total = weights.sum(0)
    values = xp.where(seen[..., None], outs, 0.0)
    out = (weights[..., None] * values).sum(0) / xp.where(total > 0, total, 1.0)[..., None]
    lse = xp.where(total > 0, xp.log(xp.where(total > 0, total, 1.0)) + most, xp.float32("-inf"))
    return {"out": out, "lse": lse}


def _bytes_moved(problem: Problem) -> int:
    """Results of parts that saw no key count too: lengths decide how many there are."""
    row = problem["head_dim"] * dtypes.itemsize(problem["dtype"]) + 4
    return int((problem["parts"] + 1) * problem["tokens"] * problem["heads"] * row)


def merged(parts: int, tokens: int, heads: int, head_dim: int, dtype: str = "bfloat16") -> Problem:
    return Problem.of(
        "attn_merge", parts=parts, tokens=tokens, heads=heads, head_dim=head_dim, dtype=dtype
    )


def _torch():
    """The definition in torch's operators, fused by ``torch.compile``."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer torch needs torch: pip install torch") from error

    @torch.compile(fullgraph=True, dynamic=False)
    def run(outs, lses, out, lse):
        total = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - total).nan_to_num(0.0)[..., None]
        out.copy_((weights * outs.float().nan_to_num(0.0)).sum(0))
        lse.copy_(total)

    def make(problem, arrays):
        if problem["tokens"] * problem["heads"] == 0:
            raise Unsupported("torch is raced where there is something to do")
        return lambda: run(*(arrays[name] for name in ("outs", "lses", "out", "lse")))

    return make


ROW = ("tokens", "heads", "head_dim")

ENTRY = Entry(
    name="attn_merge",
    summary="Attention over all keys from attention over parts of them, by their log-sum-exps.",
    axes=(
        Axis.size("parts", "parts of the keys", 1, 9),
        Axis.size("tokens", "query tokens", 0, 40),
        Axis.size("heads", "query heads", 0, 16),
        Axis.choice("head_dim", "elements of a head", *HEAD_DIMS),
        Axis.choice("dtype", "element type of outs and out", *DTYPES, minor=True),
    ),
    inputs=(
        Tensor("outs", ("parts", *ROW), "dtype", "the result of each part"),
        Tensor("lses", ("parts", *ROW[:2]), "float32", "log of each softmax's denominator"),
    ),
    outputs=(
        Tensor("out", ROW, "dtype", "the result"),
        Tensor(
            "lse", ROW[:2], "float32", "log of the softmax's denominator",
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
