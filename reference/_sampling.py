"""What `sample` computes from the logits of a row: the order of tokens, which ones stay, the draw.

`reference/sample.py` has the definition. Sums and logarithms are in float64 here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernelcat.reference._arrays import library_of
from kernelcat.reference._philox import WORD_MASK, philox

DRAWS = 4
"""Random words of one call of Philox: the draws of four neighbouring tokens."""
MAX_DRAW = 1.0 - 2.0**-24
"""Largest uniform number: float32 has no larger one below 1."""


class Choice(NamedTuple):
    """The tokens that rows (rows, vocab) choose, and how clear their choices are; (rows,) each."""

    ids: Any
    logprobs: Any
    min_p_margin: Any
    """Least distance of a score from the one that min_p requires."""
    top_p_margin: Any
    """Least distance, as a part of the total, of a sum of weights from the one of top_p."""
    draw_margin: Any
    """Distance of the two largest scores of tokens that stay."""


def penalized(logits, seen, penalty):
    """Logits (rows, vocab) after the repetition penalty, in float32.

    ``seen`` is int32 (rows, ceil(vocab / 32)): bit v % 32 of word v / 32 belongs to token v.
    ``penalty`` is float32 (rows,).
    """
    xp = library_of(logits)
    tokens = xp.arange(logits.shape[1])
    is_seen = (seen[:, tokens // 32] >> (tokens % 32) & 1) != 0
    x, penalty = logits.astype("float32"), penalty[:, None].astype("float32")
    return xp.where(is_seen, xp.where(x > 0, x / penalty, x * penalty), x)


def exponentials(seed, offset, vocab: int):
    """Numbers of the exponential distribution (rows, vocab), float64.

    ``seed`` and ``offset`` are int64 (rows,). Token v has word v % 4 of Philox; the key is
    ``seed``, the counter v / 4, 0, and the two words of ``offset``.
    """
    xp = library_of(seed)
    key = [(seed[:, None] >> shift & WORD_MASK).astype("uint64") for shift in (0, 32)]
    place = [(offset[:, None] >> shift & WORD_MASK).astype("uint64") for shift in (0, 32)]
    fours = xp.arange(-(-vocab // DRAWS), dtype="uint64")[None, :]
    words = xp.stack(philox((key[0], key[1]), (fours, xp.zeros_like(fours), *place)), axis=-1)
    words = words.reshape(len(seed), -1)[:, :vocab]
    return -xp.log1p(-xp.minimum((words + 0.5) * 2.0**-32, MAX_DRAW))


def choose(x, temperature, filters, draws) -> Choice:
    """The choices of rows of penalized logits ``x`` (rows, vocab).

    ``temperature`` is (rows,) and nowhere 0, ``draws`` (rows, vocab) are exponentials, ``filters``
    are min_p, top_k and top_p, (rows,) each.
    """
    xp = library_of(x)
    min_p, top_k, top_p = (values[:, None] for values in filters)
    order = xp.argsort(-x, axis=1, kind="stable")
    z = (x - x.max(1, keepdims=True)).astype("float64") / temperature[:, None]
    log_total = xp.log(xp.exp(z).sum(1))
    gumbel = xp.take_along_axis(-xp.log(draws), order, 1)
    z = xp.take_along_axis(z, order, 1)
    weights = xp.exp(z)
    with_min_p = xp.where(min_p > 0, min_p, 1.0)
    is_in = (z > float("-inf")) & ((min_p <= 0) | (weights >= with_min_p))
    border = xp.where((min_p > 0) & xp.isfinite(z), abs(z - xp.log(with_min_p)), 1.0)
    is_in &= (top_k <= 0) | (xp.arange(x.shape[1]) < top_k)
    total = (weights * is_in).sum(1, keepdims=True)
    before = (weights.cumsum(1) - weights) / total
    distance = xp.where(is_in & (top_p < 1), abs(before - top_p), 1.0)
    distance[:, :1] = 1.0  # the first token always stays
    is_in &= (top_p >= 1) | (before < top_p)
    is_in[:, 0] = True
    scores = xp.where(is_in, z + gumbel, float("-inf"))
    best = scores.argmax(1)[:, None]
    others = xp.where(xp.arange(x.shape[1]) == best, float("-inf"), scores)
    chosen = xp.take_along_axis(z, best, 1)[:, 0]
    return Choice(
        xp.take_along_axis(order, best, 1)[:, 0].astype("int32"),
        (chosen - log_total).astype("float32"),
        border.min(1),
        distance.min(1),
        scores.max(1) - others.max(1),
    )
