"""Random sizes as programs have them: for the problems on which dispatch is judged.

Sizes that a program's load decides (tokens, rows, lengths) are log-uniform. Sizes that a model
decides are those of `_models`, whole or divided among GPUs, and in ``AROUND`` of the problems sizes
around them. Nothing here is part of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kernelcat.catalog.spec import Problem
from kernelcat.reference._models import MODELS, SHARDS, Model, projections
from kernelcat.reference._sequences import lengths

AROUND = 0.3
"""Share of the problems whose sizes are near those of a model, not equal to them."""
MAX_CACHE_BYTES = 4 * 10**9
"""Bytes of the cache of a random attention problem: a race holds a few copies of it."""
MAX_FLOPS = 4 * 10**12
"""Operations of a random problem of attention, and of an unusual one: about 10 ms of an H200."""
LENGTHS = ("equal", "ragged", "skewed", "skewed")
SPARE_PAGES = 0.1
"""Share of a random problem's pages that its sequences may leave unused; one page always may be."""
TRIES = 100
"""Numbers of pages that are tried for a random problem; the last one stays if none fits."""


def log_uniform(dice: Random, low: int, high: int, step: int = 1) -> int:
    """A multiple of ``step`` from ``low`` to ``high``; each doubling is equally likely."""
    size = round(low * (high / low) ** dice.random() / step) * step
    return min(max(size, -(-low // step) * step), high // step * step)


def any_size(dice: Random, high: int, step: int = 1) -> int:
    """A log-uniform multiple of ``step`` up to ``high``, most often one of 8 or of 64 steps."""
    step *= dice.choice((1, 2, 8, 8, 64))
    return log_uniform(dice, step, high, step)


def model_with(dice: Random, *fields: str) -> Model:
    """A published model of which no field in ``fields`` is 0."""
    return dice.choice([m for m in MODELS.values() if all(getattr(m, f) for f in fields)])


def weight_sizes(dice: Random, step: int) -> tuple[int, int]:
    """N and K of the weights of a layer or of its share: multiples of ``step``."""
    n, k, divided = dice.choice(projections(dice.choice(list(MODELS.values()))))
    shards = dice.choice(SHARDS)
    n, k = (n // shards, k) if divided == "N" else (n, k // shards)
    return near(dice, n, step), near(dice, k, step)


def near(dice: Random, size: int, step: int) -> int:
    """``size``, or in ``AROUND`` of all draws a size from its half to its double.

    The result is rounded to a multiple of ``step``, and at least ``step``.
    """
    if dice.random() < AROUND:
        size = log_uniform(dice, max(1, size // 2), 2 * size)
    return max(step, round(size / step) * step)


def attention_heads(dice: Random) -> tuple[int, int, int]:
    """Query heads, key-value heads and elements of a head: a model's, or a GPU's share of them."""
    model, shards = model_with(dice, "kv_heads"), dice.choice(SHARDS)
    if model.heads % shards or model.kv_heads % min(shards, model.kv_heads):
        shards = 1
    return model.heads // shards, max(1, model.kv_heads // shards), model.head_dim


def sequence_axes(dice: Random, page_sizes: tuple[int, ...]) -> dict[str, int | str]:
    """Axes of sequences over a paged cache but ``pages``: a step of decoding, or chunks of prompts.

    In chunks with skewed lengths some sequences decode, as in an engine that mixes both.
    """
    kind = dice.choices(("decode", "verify", "chunk"), (6, 1, 2))[0]
    batch = log_uniform(dice, 1, 16 if kind == "chunk" else 256)
    q_len = {"decode": 1, "verify": dice.randint(2, 8), "chunk": log_uniform(dice, 32, 4096)}[kind]
    context = max(q_len, log_uniform(dice, 32, 131072))
    skew, size = dice.choice(LENGTHS), dice.choice(page_sizes)
    tokens = batch * q_len
    if kind == "chunk" and skew == "skewed":
        tokens = batch - 1 + q_len
    return {
        "batch": batch, "tokens": tokens, "max_q": q_len, "page_size": size,
        "table_width": -(-context // size), "lengths": skew,
    }  # fmt: skip


def with_chunk(decoding: Problem, q_len: int) -> Problem:
    """``decoding``, an attention problem, with ``q_len`` query tokens in one sequence.

    The other sequences have one each, and the cache has the pages that the lengths need.
    """
    axes = {**decoding.values, "tokens": decoding["batch"] - 1 + q_len, "max_q": q_len}
    problem = Problem.of(decoding.entry, **axes)
    return Problem.of(problem.entry, **{**axes, "pages": pages_needed(problem)})


def of_sequences(
    shape: Problem,
    sequences: dict[str, int | str],
    slot_bytes: int,
    flops: Callable[[Problem], int],
) -> Problem | None:
    """``shape`` with these sequences and the pages that they need; None where it is too large.

    A slot of the cache takes ``slot_bytes``, and a problem ``flops(problem)`` operations.
    """
    problem = Problem.of(shape.entry, **{**shape.values, **sequences})
    problem = Problem.of(shape.entry, **{**problem.values, "pages": pages_needed(problem)})
    cache_bytes = problem["pages"] * problem["page_size"] * slot_bytes
    if cache_bytes > MAX_CACHE_BYTES or flops(problem) > MAX_FLOPS:
        return None
    return with_pages(problem)


def with_pages(problem: Problem) -> Problem:
    """``problem`` with a cache that its drawn sequences fill.

    Ragged lengths follow from the whole problem: with other pages they are others, too. So numbers
    of pages are tried, each what the lengths of the one before need, ``TRIES`` at most.
    """
    pages = problem["pages"]
    for _ in range(TRIES):
        problem = Problem.of(problem.entry, **{**problem.values, "pages": pages})
        needed = pages_needed(problem)
        if needed <= pages and pages - needed <= max(1, SPARE_PAGES * pages):
            break
        pages = needed
    return problem


def pages_needed(problem: Problem) -> int:
    """Pages that the drawn sequences of ``problem`` have together."""
    return sum(-(-kv_len // problem["page_size"]) for kv_len in lengths(problem)[1])
