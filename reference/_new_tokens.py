"""New tokens of sequences: the slots of a paged cache that entries write them to.

Token i of the ``q_lens[s]`` new tokens of sequence s is at position ``kv_lens[s] - q_lens[s] + i``.
Its slot follows from the position as `_sequences` says. Only table entries of new tokens are read,
and only their rows of cos_sin. Table entries and positions must be valid: `kernelcat.debug` checks
them, kernels do not. No two new tokens may have the same slot, and nothing checks that.
"""

from __future__ import annotations

import random
from functools import lru_cache

from kernelcat.catalog.precondition import Precondition
from kernelcat.catalog.spec import Axis, Problem, any_size
from kernelcat.reference._arrays import library_of
from kernelcat.reference._sequences import (
    GARBAGE,
    LENGTH_PRECONDITIONS,
    Lengths,
    draw_lengths,
    index_arrays,
    is_no_page,
    num_new,
    table_columns,
)

TOKENS = Axis.size("tokens", "new tokens of all sequences together", 0, 40, varies=True)
PAGES = Axis.size("pages", "pages of the cache", 1, 60, any_size, varies=True)


def sequence_room(problem: Problem) -> int:
    """Tokens that a sequence may have: each needs a slot in the table and a row of cos_sin."""
    room = int(problem["table_width"] * problem["page_size"])
    return min(room, problem["positions"]) if problem["rotary_dim"] else room


def cache_room(problem: Problem) -> int:
    """New tokens that fit into the cache, if sequences share no page.

    Whole pages are filled first, then last pages, which ``sequence_room`` may leave partly empty.
    """
    whole, rest = divmod(sequence_room(problem), problem["page_size"])
    full = min(problem["pages"], problem["batch"] * whole)
    return full * problem["page_size"] + min(problem["pages"] - full, problem["batch"]) * rest


def room_error(problem: Problem) -> str | None:
    """Why the new tokens do not fit, or None."""
    tokens, batch, room = problem["tokens"], problem["batch"], sequence_room(problem)
    if tokens > batch * room:
        return (
            f"tokens={tokens} are more new tokens than the table, or cos_sin, has room for "
            f"({batch} * {room})"
        )
    if tokens > cache_room(problem):
        return f"{tokens} new tokens do not fit in {problem['pages']} pages"
    return None


@lru_cache(64)
def lengths(problem: Problem) -> Lengths:
    """Lengths of the drawn sequences: those of `_sequences` if there are enough pages.

    Otherwise all tokens are new, and sequences are filled one after another, which takes the fewest
    pages: first with whole pages, then to the last token that they may have.
    """
    room, size = sequence_room(problem), problem["page_size"]
    q_lens, kv_lens = draw_lengths(problem, room, room)
    if sum(map(len, _new_pages(problem, q_lens, kv_lens))) <= problem["pages"]:
        return q_lens, kv_lens
    lens, num_left = [0] * problem["batch"], problem["tokens"]
    for limit in (room // size * size, room):
        for s in range(problem["batch"]):
            count = min(limit - lens[s], num_left)
            lens[s], num_left = lens[s] + count, num_left - count
    return tuple(lens), tuple(lens)


def _new_pages(problem, q_lens, kv_lens) -> list[range]:
    """The columns of the table that have a new token, for each sequence."""
    size = problem["page_size"]
    return [
        range((kv_len - q_len) // size, -(-kv_len // size) if q_len else 0)
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]


def _table(problem: Problem) -> list[list[int]]:
    """A block table with a page of its own for each column with a new token, else ``GARBAGE``."""
    order = list(range(problem["pages"]))
    random.Random(problem.key).shuffle(order)
    pages, table = iter(order), []
    for columns in _new_pages(problem, *lengths(problem)):
        row = [GARBAGE] * problem["table_width"]
        for i in columns:
            row[i] = next(pages)
        table.append(row)
    return table


def draw_indices(problem: Problem, xp):
    """block_table, kv_lens and cu_q of the drawn sequences, by name."""
    return index_arrays(problem, _table(problem), lengths(problem), xp)


def positions(problem: Problem) -> list[int]:
    """The position of each new token of the drawn sequences."""
    q_and_kv = zip(*lengths(problem), strict=True)
    return [at for q_len, kv_len in q_and_kv for at in range(kv_len - q_len, kv_len)]


def slots(problem, arrays):
    """Position, page and slot in the page, each (tokens,), of the new tokens of ``arrays``."""
    cu_q, xp = arrays["cu_q"], library_of(arrays["cu_q"])
    token = xp.arange(problem["tokens"], dtype="int32")
    s = xp.searchsorted(cu_q, token, side="right") - 1
    at = arrays["kv_lens"][s] - cu_q[s + 1] + token
    return at, arrays["block_table"][s, at // problem["page_size"]], at % problem["page_size"]


# ---- what the arrays must hold ------------------------------------------------------------------


def _pages_of_new_tokens(axes, values):
    """A mask of the elements of block_table that lead to a new token."""
    start, count = table_columns(values) * axes["page_size"], num_new(values)[:, None]
    kv_lens = values["kv_lens"][:, None]
    has_first_or_later = start + axes["page_size"] > kv_lens - count
    return (count > 0) & has_first_or_later & (start < kv_lens)


def _is_beyond_cos_sin(axes, values):
    lens = values["kv_lens"]
    return (num_new(values) > 0) & (lens > axes["positions"]) & bool(axes["rotary_dim"])


WRITE_PRECONDITIONS = (
    *LENGTH_PRECONDITIONS,
    Precondition(
        "kv_lens", "less than the sequence's new tokens, cu_q[s + 1] - cu_q[s]",
        lambda axes, values: values["kv_lens"] < num_new(values), reads=("cu_q",),
    ),
    Precondition(
        "kv_lens", "cos_sin has {positions} rows, one a position", _is_beyond_cos_sin,
        reads=("cu_q",),
    ),
    Precondition(
        "block_table", "the cache has {pages} pages",
        lambda axes, values: is_no_page(axes, values) & _pages_of_new_tokens(axes, values),
        reads=("kv_lens", "cu_q"),
    ),
)  # fmt: skip
"""Every new token has a slot in a page of the cache, and a row of cos_sin.

Two tokens with one slot are not refused: engines give tokens that pad a step a page that nobody
reads, and there one of them wins.
"""
