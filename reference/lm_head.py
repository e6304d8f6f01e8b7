"""`lm_head`: the largest logits of a language model's head, without storing all logits.

    logits = x @ w^T, in float32
    ids[t] = the first top_k tokens by falling logits[t], those of equal logits by rising id
    values[t] = their logits

A greedy decode step needs one token, speculative decoding and beam search a few. Logits themselves
are stored where ``has_logits``, as float32 or rounded to the type of x.

Drawn elements are small multiples of a power of two, so that float32 sums of products are exact in
any order. All outputs are therefore judged bit by bit, and many logits are equal.
"""

from __future__ import annotations

from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor, exact
from kernelcat.errors import Unsupported
from kernelcat.reference._arrays import library_of
from kernelcat.reference._models import SHARDS
from kernelcat.reference._peers import import_torch
from kernelcat.reference._random_sizes import log_uniform, model_with

DTYPES = ("bfloat16", "float16")
MAX_TOP_K = 16
MAX_STEPS = 3
"""Drawn elements are whole steps from -MAX_STEPS to MAX_STEPS."""
X_STEP, W_STEP = 2.0**-2, 2.0**-6


def _steps(normal, shape):
    """Whole numbers of at most MAX_STEPS."""
    drawn = normal(shape)
    return library_of(drawn).rint(drawn).clip(-MAX_STEPS, MAX_STEPS)


def _make_inputs(problem, normal):
    hidden = problem["hidden"]
    return {
        "x": X_STEP * _steps(normal, (problem["tokens"], hidden)),
        "w": W_STEP * _steps(normal, (problem["vocab"], hidden)),
    }


def _oracle(problem, arrays):
    x, w = (dtypes.decode(arrays[name], problem["dtype"]) for name in ("x", "w"))
    xp = library_of(x)
    logits = x @ w.T + xp.float32(0)  # no sum is -0
    ids = xp.argsort(-logits, axis=1, kind="stable")[:, : problem["top_k"]]
    return {
        "values": xp.take_along_axis(logits, ids, 1),
        "ids": ids.astype("int32"),
        "logits": dtypes.encode(logits, problem["logits_dtype"]),
    }


def _flops(problem: Problem) -> int:
    return int(2 * problem["tokens"] * problem["vocab"] * problem["hidden"])


def _bytes_moved(problem: Problem) -> int:
    """Weights and x once, results, and logits where they are stored; nothing without tokens."""
    tokens, vocab, hidden = (problem[axis] for axis in ("tokens", "vocab", "hidden"))
    if not tokens:
        return 0
    logits = tokens * vocab * dtypes.itemsize(problem["logits_dtype"]) * problem["has_logits"]
    read = (vocab + tokens) * hidden * dtypes.itemsize(problem["dtype"])
    return int(read + 8 * tokens * problem["top_k"] + logits)


def _constraint(problem):
    top_k, vocab, logits_dtype = (problem[name] for name in ("top_k", "vocab", "logits_dtype"))
    if top_k > min(vocab, MAX_TOP_K):
        return f"top_k={top_k} must be at most vocab={vocab}, and at most {MAX_TOP_K}"
    if not problem["has_logits"] and logits_dtype != "float32":
        return f"logits_dtype={logits_dtype} needs has_logits"
    if logits_dtype not in ("float32", problem["dtype"]):
        return f"logits_dtype={logits_dtype} must be float32 or dtype ({problem['dtype']})"
    return None


def _torch():
    """A matrix product with float32 results, and ``torch.topk`` or ``torch.max``."""
    torch = import_torch("torch")

    def make(problem, arrays):
        if not problem["tokens"] or problem["logits_dtype"] != "float32":
            raise Unsupported("torch is raced with float32 logits of at least one token")
        x, w, values, ids = (arrays[name] for name in ("x", "w", "values", "ids"))
        logits = arrays.get("logits", x.new_empty(len(x), len(w), dtype=torch.float32))

        def run():
            torch.mm(x, w.t(), out_dtype=torch.float32, out=logits)
            found = logits.topk(problem["top_k"], -1)
            values.copy_(found.values)
            ids.copy_(found.indices)

        return run

    return make


def _problem(tokens: int, vocab: int, hidden: int, top_k: int = 1) -> Problem:
    return Problem.of(
        "lm_head", tokens=tokens, vocab=vocab, hidden=hidden, top_k=top_k, dtype="bfloat16",
        has_logits=False, logits_dtype="float32",
    )  # fmt: skip


TARGETS = (
    (1, 201088, 2880, 1),
    (8, 201088, 2880, 1),
    (8, 201088, 2880, 16),
    (64, 201088, 2880, 1),
    (128, 201088, 2880, 1),
    (256, 201088, 2880, 1),
    (1, 151936, 4096, 1),
    (1, 129280, 7168, 1),
    (8, 129280, 7168, 1),
)
"""Tokens, vocab, hidden and top_k: gpt-oss, Qwen3 and DeepSeek-V3."""


def _random_problem(dice: Random) -> Problem:
    """A model's head, whole or a GPU's share of it."""
    model, top_k = model_with(dice), dice.choice((1, 1, 1, dice.randint(2, MAX_TOP_K)))
    vocab = model.vocab // dice.choice(SHARDS)
    return _problem(log_uniform(dice, 1, 256), vocab, model.hidden, top_k)


ENTRY = Entry(
    name="lm_head",
    summary="The largest logits of x @ w^T and their tokens, without storing all logits.",
    axes=(
        Axis.size("tokens", "rows of x", 0, 64, varies=True),
        Axis.size("vocab", "rows of w", 16, 2000),
        Axis.size("hidden", "columns of x and w", 0, 600),
        Axis.size("top_k", f"tokens found for each row, at most {MAX_TOP_K}", 1, MAX_TOP_K, exact),
        Axis.choice("dtype", "element type of x and w", *DTYPES, minor=True),
        Axis.flag("has_logits", "all logits are stored too"),
        Axis.choice(
            "logits_dtype", "element type of logits", "float32", *DTYPES, default="float32",
            minor=True,
        ),
    ),
    inputs=(
        Tensor("x", ("tokens", "hidden"), "dtype", "hidden states"),
        Tensor("w", ("vocab", "hidden"), "dtype", "weights of the head"),
    ),
    outputs=(
        Tensor("values", ("tokens", "top_k"), "float32", "largest logits, falling"),
        Tensor(
            "ids", ("tokens", "top_k"), "int32", "their tokens; of equal logits the lower id first",
            optional_for_peers=True,
        ),
        Tensor("logits", ("tokens", "vocab"), "logits_dtype", "all logits", flag="has_logits"),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems={
        f"{tokens}x{vocab}x{hidden}" + f"-top{top_k}" * (top_k > 1): _problem(
            tokens, vocab, hidden, top_k
        )
        for tokens, vocab, hidden, top_k in TARGETS
    },
    random_problem=_random_problem,
    peers=(Peer("torch", _torch),),
    constraint=_constraint,
)  # fmt: skip
