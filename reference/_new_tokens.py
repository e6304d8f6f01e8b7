"""New tokens of sequences: the slots of a paged cache that entries write them to.

Token i of the ``q_lens[s]`` new tokens of sequence s is at position ``kv_lens[s] - q_lens[s] + i``.
Its slot follows from the position as `_sequences` says. Only table entries of new tokens are read,
and only their rows of cos_sin. No two new tokens may have the same slot, and nothing checks that:
table entries and positions must be valid.
"""

from __future__ import annotations

import random
from functools import lru_cache

from kernelcat.catalog.spec import Axis, Problem
from kernelcat.reference._arrays import library_of
from kernelcat.reference._sequences import GARBAGE, Lengths, draw_lengths, index_arrays

TOKENS = Axis.size("tokens", "new tokens of all sequences together", 0, 40)
PAGES = Axis.size("pages", "pages of the cache", 1, 60)


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
