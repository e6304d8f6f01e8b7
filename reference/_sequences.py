"""Sequences over a paged cache: their lengths and block tables, for entries that share these nouns.

Sequence s has ``kv_lens[s]`` tokens. The last ``q_lens[s] = cu_q[s + 1] - cu_q[s]`` of them are new
in this call: they are the queries of attention, or the tokens that are written to the cache. Token
t of sequence s is in page ``block_table[s, t // page_size]``, slot ``t % page_size``.

Lengths are data on the GPU and no part of a problem, so that one captured graph serves all lengths.
Inputs that the catalog draws have lengths that follow from the problem alone, so that the least
work of a problem can be counted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from kernelcat.catalog.precondition import Precondition, rising
from kernelcat.catalog.spec import Axis, Derived, Problem, Tensor
from kernelcat.reference._arrays import library_of

GARBAGE = -(1 << 30)
"""Drawn block tables hold this where no kernel may read a page number."""
MAX_SCORES = 1 << 26
"""Scores that an oracle computes at a time."""

BATCH = Axis.size("batch", "number of sequences", 0, 6, varies=True)
TABLE_WIDTH = Axis.size(
    "table_width", "columns of block_table: pages that a sequence may have", 0, 12, varies=True
)
LENGTHS = Axis.choice(
    "lengths", "how long the sequences of drawn inputs are; means nothing in a call",
    "equal", "ragged", default="equal", minor=True, drawn=True, extra=("skewed",),
)  # fmt: skip

STARTS = Derived("batch + 1", lambda axes: axes["batch"] + 1)
INDICES = (
    Tensor(
        "block_table", ("batch", "table_width"), "int32",
        "token t of sequence s is in page block_table[s, t // page_size], slot t % page_size",
    ),
    Tensor("kv_lens", ("batch",), "int32", "tokens of each sequence, new ones included"),
    Tensor("cu_q", (STARTS,), "int32", "new tokens of sequence s are rows cu_q[s] : cu_q[s + 1]"),
)  # fmt: skip
"""The arrays that describe sequences."""

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""``(q_lens, kv_lens)``: new tokens and all tokens of each sequence."""


@lru_cache(64)
def lengths(problem: Problem) -> Lengths:
    """Lengths of an attention problem's drawn sequences.

    ``equal``: every sequence fills its row of the table, and new tokens are divided evenly.
    ``ragged``: any lengths for which the table has room, among them empty sequences and lengths at
    and beside multiples of the page size. ``skewed``: log-uniform lengths, so that most sequences
    are much shorter than the longest, which fills its row; every sequence has a token and, if there
    are enough, a new one, and the first sequences have most of the new ones.
    """
    room = problem["table_width"] * problem["page_size"]
    return draw_lengths(problem, room, min(problem["max_q"], room))


def draw_lengths(problem: Problem, room: int, max_new: int) -> Lengths:
    """Lengths of at most ``room`` tokens a sequence, of which at most ``max_new`` are new."""
    batch, tokens, size = problem["batch"], problem["tokens"], problem["page_size"]
    if batch == 0:
        return (), ()
    if problem["lengths"] == "equal":
        each, more = divmod(tokens, batch)
        return (each + 1,) * more + (each,) * (batch - more), (room,) * batch
    if problem["lengths"] == "skewed":
        return _skewed(batch, tokens, room, max_new)
    dice = random.Random(problem.key)
    q_lens = [0] * batch
    for _ in range(tokens):
        q_lens[dice.choice([s for s in range(batch) if q_lens[s] < max_new])] += 1
    kv_lens = []
    for q_len in q_lens:
        near_page_end = dice.randint(0, problem["table_width"]) * size + dice.choice((-1, 0, 1))
        kv_len = dice.choice((near_page_end, dice.randint(0, room), room if q_len else 0))
        kv_lens.append(min(max(kv_len, q_len), room))
    return tuple(q_lens), tuple(kv_lens)


def _skewed(batch: int, tokens: int, room: int, max_new: int) -> Lengths:
    """Skewed lengths; they do not depend on the number of pages, which may follow from them."""
    dice, left, q_lens, kv_lens = random.Random(f"{batch} {tokens} {room}"), tokens - batch, [], []
    longest = dice.randrange(batch)
    for s in range(batch):
        more = min(max(left, 0), max_new - 1)
        q_lens.append(more + 1 if s < tokens else 0)
        left -= more
        kv_len = room if s == longest else round(room ** dice.random())
        kv_lens.append(min(max(kv_len, q_lens[-1]), room))
    return tuple(q_lens), tuple(kv_lens)


def tables(problem: Problem) -> tuple[list[list[int]], list[int]]:
    """The block table of an attention problem, and how many slots of each page are read.

    Sequences share pages only where the cache has fewer pages than the sequences need.
    """
    size, table, slots = problem["page_size"], [], [0] * problem["pages"]
    order = list(range(problem["pages"]))
    random.Random(problem.key).shuffle(order)
    pages = itertools.cycle(order)
    for kv_len in lengths(problem)[1]:
        row = [GARBAGE] * problem["table_width"]
        for i in range(-(-kv_len // size)):
            row[i] = next(pages)
            slots[row[i]] = max(slots[row[i]], min(size, kv_len - i * size))
        table.append(row)
    return table, slots


def index_arrays(problem: Problem, table: list[list[int]], lengths: Lengths, xp):
    """The arrays of :data:`INDICES` by name, made with the library ``xp``."""
    q_lens, kv_lens = lengths
    shape = problem["batch"], problem["table_width"]
    return {
        "block_table": xp.asarray(table, dtype="int32").reshape(shape),
        "kv_lens": xp.asarray(kv_lens, dtype="int32"),
        "cu_q": xp.asarray([0, *itertools.accumulate(q_lens)], dtype="int32"),
    }


def query_chunks(start: int, end: int, scores_per_query: int) -> Iterator[slice]:
    """Rows ``start`` to ``end - 1`` in slices whose scores an oracle holds in memory at once."""
    step = max(1, MAX_SCORES // max(scores_per_query, 1))
    for first in range(start, end, step):
        yield slice(first, min(first + step, end))


# ---- what the arrays must hold ------------------------------------------------------------------


def num_new(values):
    """``q_lens`` (batch,): the new tokens of each sequence."""
    return values["cu_q"][1:] - values["cu_q"][:-1]


def table_columns(values):
    """Numbers of the columns of block_table (1, table_width), to compare with (batch, 1)."""
    table = values["block_table"]
    return library_of(table).arange(table.shape[1])[None, :]


def is_no_page(axes, values):
    """A mask of the elements of block_table that are no page of the cache."""
    table = values["block_table"]
    return (table < 0) | (table >= axes["pages"])


def _pages_with_tokens(axes, values):
    """A mask of the elements of block_table that lead to a token of their sequence."""
    return table_columns(values) * axes["page_size"] < values["kv_lens"][:, None]


def _is_other_total(axes, values):
    mask = values["cu_q"] != axes["tokens"]
    mask[:-1] = False
    return mask


LENGTH_PRECONDITIONS = (
    *rising("cu_q"),
    Precondition(
        "cu_q", "the last element must be the number of tokens, {tokens}", _is_other_total
    ),
    Precondition(
        "kv_lens", "must not be negative", lambda axes, values: values["kv_lens"] < 0
    ),
    Precondition(
        "kv_lens", "the table has room for {table_width} pages of {page_size} tokens",
        lambda axes, values: values["kv_lens"] > axes["table_width"] * axes["page_size"],
    ),
)  # fmt: skip
"""Lengths within the table, and rows of new tokens one after another."""

ATTENTION_PRECONDITIONS = (
    *LENGTH_PRECONDITIONS,
    Precondition(
        "cu_q", "a sequence has at most max_q={max_q} query tokens, and this one ends there",
        lambda axes, values: _ends(num_new(values) > axes["max_q"]),
    ),
    Precondition(
        "block_table", "the cache has {pages} pages",
        lambda axes, values: is_no_page(axes, values) & _pages_with_tokens(axes, values),
        reads=("kv_lens",),
    ),
)  # fmt: skip
"""For attention: every page that holds a token of a sequence is a page of the cache."""


def _ends(is_wrong):
    """A mask of ``cu_q``: the end of each sequence of the mask ``is_wrong`` (batch,)."""
    xp = library_of(is_wrong)
    return xp.concatenate((xp.zeros(1, bool), is_wrong))


# ---- the least work of attention ----------------------------------------------------------------


def _window(problem: Problem) -> int:
    """Keys that a query may attend to; 0 (no limit) also where the entry has no such axis."""
    return int(problem.values.get("window", 0))


@lru_cache(16)  # as query_groups
def _sequences_by_lengths(problem: Problem) -> Counter[tuple[int, int]]:
    """``(q_len, kv_len)`` -> sequences with these lengths: drawn ones often have equal lengths."""
    return Counter(zip(*lengths(problem), strict=True))


@lru_cache(16)  # as query_groups
def pairs_seen(problem: Problem) -> int:
    """Number of pairs of a query and a key that is visible to the query."""
    total, window = 0, _window(problem)
    for (q_len, kv_len), sequences in _sequences_by_lengths(problem).items():
        cached, limit = kv_len - q_len, window or kv_len
        # queries that the window does not limit
        below_limit = min(max(limit - cached, 0), q_len)
        seen = below_limit * cached + below_limit * (below_limit + 1) // 2
        total += sequences * (seen + (q_len - below_limit) * limit)
    return total


class QueryGroup(NamedTuple):
    """Sequences with the same number of new tokens, as a call is assumed to have them."""

    sequences: int
    queries: int
    tokens: float
    """Cached tokens of each, new ones included."""


@lru_cache(256)  # estimates of all configurations ask for the same problem
def query_groups(problem: Problem) -> tuple[QueryGroup, ...]:
    """The sequences of a call, of whose lengths only sums and bounds are known, for cost models.

    Where sequences cannot all have as many new tokens, as many as possible have ``max_q``, one has
    what is left, and the others have one: chunks of prompts beside sequences that are being
    written. A chunk's sequence has at least its new tokens and what the others have no room for.
    Where at most half of the sequences have chunks, the longest one, which fills its row of the
    table, probably has none: if the others leave room for that, a chunk's sequence is a third of
    the way, in logarithms, to what they leave then. Else it is two thirds of the way to the most
    that it may have. By cost models that know the true lengths, what is chosen for 477 random
    problems of `paged_attn` with chunks loses 4.8 % in the mean and 2.9 times at most; 8.4 % and
    4.9 times where it is always two thirds of the way.
    """
    batch, tokens, most = problem["batch"], problem["tokens"], problem["max_q"]
    room = problem["table_width"] * problem["page_size"]
    total = min(batch * room, problem["pages"] * problem["page_size"])
    if most == 1 or tokens <= batch or tokens >= batch * most:
        return (QueryGroup(batch, -(-tokens // max(batch, 1)), total / max(batch, 1)),)
    chunks, left = divmod(tokens - batch, most - 1)
    others = batch - chunks
    least = max((total - others * room) / max(chunks, 1), most)
    greatest = max(min((total - others) / max(chunks, 1), room), least)
    longest = min(room, total - (batch - 1))
    left_over = min((total - longest - (others - 1)) / max(chunks, 1), room)
    if chunks <= others and left_over >= least:
        long = (least**2 * left_over) ** (1 / 3)
    else:
        long = (least * greatest**2) ** (1 / 3)
    short = max(total - chunks * long, others) / others
    groups = (
        QueryGroup(chunks, most, long),
        QueryGroup(int(left > 0), left + 1, max(short, left + 1)),
        QueryGroup(others - (left > 0), 1, short),
    )
    return tuple(group for group in groups if group.sequences)


@lru_cache(256)  # as query_groups
def tokens_read(problem: Problem) -> int:
    """Number of cached tokens that are visible to at least one query."""
    total, window = 0, _window(problem)
    for (q_len, kv_len), sequences in _sequences_by_lengths(problem).items():
        first = max(0, kv_len - q_len + 1 - window) if window else 0
        total += sequences * (kv_len - first if q_len else 0)
    return min(total, problem["pages"] * problem["page_size"])


# ---- constraints --------------------------------------------------------------------------------


def queries_error(problem: Problem) -> str | None:
    """Why the axes do not describe queries over a cache, or None."""
    tokens, batch = problem["tokens"], problem["batch"]
    room = problem["table_width"] * problem["page_size"]
    if not problem["heads"]:
        return "heads=0: attention needs a query head"
    if tokens > batch * min(problem["max_q"], room):
        return (
            f"tokens={tokens} are more query tokens than batch * max_q "
            f"({batch} * {problem['max_q']}), or than the table has room for ({batch} * {room})"
        )
    if not problem["pages"] and room * batch:
        return "pages=0: the cache has no page, and the table has room for one"
    return None
