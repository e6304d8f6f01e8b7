"""Where a new token belongs: its sequence, its position there, and its slot in a paged cache.

The tokens of all sequences follow one another.

    cu_q (batch + 1,) int32: the first new token of each sequence, and the number of all
    kv_lens (batch,) int32: the tokens of each sequence, new ones included
    block_table (batch, width) int32: the pages of each sequence
"""

import triton
import triton.language as tl

PAST_END = tl.constexpr(2147483647)
"""The start of a sequence that does not exist: no token comes after it."""


@triton.jit
def find_sequence(token, cu_q, batch, CHUNK: tl.constexpr):
    """Index of a token's sequence.

    The index is the number of sequences, the first left out, that start at the token or before.
    """
    seq = 0
    for first in range(1, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        starts = tl.load(cu_q + others, mask=others < batch, other=PAST_END)
        seq += tl.sum((starts <= token).to(tl.int32), 0)
    return seq


@triton.jit
def find_sequences(tokens, cu_q, batch, CHUNK: tl.constexpr):
    """Index (N,) of the sequence of each token of ``tokens`` (N,), as `find_sequence`."""
    seqs = tokens * 0
    for first in range(1, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        starts = tl.load(cu_q + others, mask=others < batch, other=PAST_END)
        seqs += tl.sum((starts[None, :] <= tokens[:, None]).to(tl.int32), 1)
    return seqs


@triton.jit
def find_position(token, seq, kv_lens, cu_q):
    """Position of a token in its sequence ``seq``."""
    return tl.load(kv_lens + seq) - tl.load(cu_q + seq + 1) + token


@triton.jit
def find_slot(position, seq, block_table, width, PAGE_SIZE: tl.constexpr):
    """The page of a position of sequence ``seq``, and its slot among the slots of all pages."""
    page = tl.load(block_table + seq.to(tl.int64) * width + position // PAGE_SIZE).to(tl.int64)
    return page, page * PAGE_SIZE + position % PAGE_SIZE
