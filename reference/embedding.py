"""`embedding`: rows of a table by token ids.

    out[t] = scale * table[ids[t]]    if 0 <= ids[t] < vocab
    out[t] = scale * 0                otherwise; the table is not read

An engine gives the tokens that pad a batch an id of -1. The product is computed in float32 and
rounded once, so results equal the oracle's bit by bit. Gemma multiplies by sqrt(hidden), most other
models by 1.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor
from kernelcat.errors import Unsupported
from kernelcat.reference._arrays import library_of
from kernelcat.reference._peers import import_torch
from kernelcat.reference._random_sizes import log_uniform, model_with

DTYPES = ("bfloat16", "float16")
ID_TYPES = ("int32", "int64")
INVALID = {"int32": (-1, 2**31 - 1, -(2**31)), "int64": (-1, 2**32, 2**32 - 1, -(2**63))}
"""Type of ids -> ids outside of every table; the low 32 bits of some are ids inside."""
INVALID_PERIOD = 9
"""One drawn id in nine lies outside of the table."""
STRIDE = 7919
"""Distance of neighbouring drawn ids; a prime, so that ids repeat only where the table is small."""


@lru_cache(16)
def _ids(problem: Problem) -> tuple[int, ...]:
    """Drawn ids: rows far from each other, ids outside of the table, and the row after the last."""
    vocab = problem["vocab"]
    outside = (vocab, *INVALID[problem["id_dtype"]])
    return tuple(
        outside[t // INVALID_PERIOD % len(outside)]
        if t % INVALID_PERIOD == INVALID_PERIOD - 1
        else t * STRIDE % vocab
        for t in range(problem["tokens"])
    )


def _make_inputs(problem, normal):
    """Rows that no id names are NaN."""
    table = normal((problem["vocab"], problem["hidden"]))
    xp = library_of(table)
    ids = xp.asarray(_ids(problem), dtype=problem["id_dtype"])
    is_used = xp.zeros(problem["vocab"], dtype=bool)
    is_used[ids[_is_inside(problem, ids)]] = True
    return {"ids": ids, "table": xp.where(is_used[:, None], table, xp.float32("nan"))}


def _is_inside(problem, ids):
    return (ids >= 0) & (ids < problem["vocab"])


def _oracle(problem, arrays):
    ids, table, dtype = arrays["ids"], arrays["table"], problem["dtype"]
    xp = library_of(ids)
    inside = _is_inside(problem, ids)
    rows = dtypes.decode(table[xp.where(inside, ids, 0)], dtype)
    rows = xp.where(inside[:, None], rows, xp.float32(0))
    return {"out": dtypes.encode(rows * xp.float32(problem["scale"]), dtype)}


@lru_cache(16)  # each configuration of a choice asks
def _bytes_moved(problem: Problem) -> int:
    """Ids, the rows that ids name, each once, and out."""
    rows = len({i for i in _ids(problem) if 0 <= i < problem["vocab"]})
    row_bytes = problem["hidden"] * dtypes.itemsize(problem["dtype"])
    id_bytes = problem["tokens"] * dtypes.itemsize(problem["id_dtype"])
    return int(id_bytes + (rows + problem["tokens"]) * row_bytes)


def _torch():
    """``torch.embedding`` of ids that are clamped into the table; padded rows are then zeroed."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(ids, table, out, scale):
        inside = (ids >= 0) & (ids < table.shape[0])
        rows = torch.embedding(table, torch.where(inside, ids, 0)).float() * scale
        out.copy_(torch.where(inside[:, None], rows, 0.0))

    def make(problem, arrays):
        if problem["tokens"] * problem["hidden"] == 0:
            raise Unsupported("torch is not raced where tokens or hidden is 0")
        scale = problem["scale"]
        return lambda: run(arrays["ids"], arrays["table"], arrays["out"], scale)

    return make


def _problem(tokens: int, vocab: int, hidden: int, scale: float = 1.0) -> Problem:
    return Problem.of(
        "embedding", tokens=tokens, vocab=vocab, hidden=hidden, dtype="bfloat16", id_dtype="int32",
        scale=scale,
    )  # fmt: skip


TARGETS = (
    (1, 201088, 2880),
    (64, 201088, 2880),
    (8192, 201088, 2880),
    (64, 129280, 7168),
    (8192, 129280, 7168),
)
"""Tokens, vocab and hidden: gpt-oss and DeepSeek-V3."""


def _random_problem(dice: Random) -> Problem:
    """A model's table."""
    model = model_with(dice)
    return _problem(log_uniform(dice, 1, 16384), model.vocab, model.hidden)


ENTRY = Entry(
    name="embedding",
    summary="Rows of a table by token ids, times a scale; ids outside of the table give zeros.",
    axes=(
        Axis.size("tokens", "tokens", 0, 300, varies=True),
        Axis.size("vocab", "rows of the table", 1, 2000),
        Axis.size("hidden", "columns of the table", 0, 1500),
        Axis.choice("dtype", "element type of table and out", *DTYPES, minor=True),
        Axis.choice("id_dtype", "element type of ids", *ID_TYPES, minor=True),
        Axis.number("scale", "factor of all rows", 1.0, 53.665631, -0.3, default=1.0),
    ),
    inputs=(
        Tensor("ids", ("tokens",), "id_dtype", "row of each token; outside of the table: zeros"),
        Tensor("table", ("vocab", "hidden"), "dtype", "embeddings of all tokens"),
    ),
    outputs=(Tensor("out", ("tokens", "hidden"), "dtype", "embeddings of the tokens"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["tokens"] * problem["hidden"],
    bytes_moved=_bytes_moved,
    problems={f"{t}x{vocab}x{h}": _problem(t, vocab, h) for t, vocab, h in TARGETS},
    random_problem=_random_problem,
    peers=(Peer("torch", _torch),),
)  # fmt: skip
