"""A batch: the new tokens of some sequences, in the tensors that the entries take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch


class Chunk(NamedTuple):
    """New tokens of one sequence: a chunk of its prompt, or the token that was decoded last.

    Attributes
    ----------
    tokens : ids of the new tokens
    start : tokens of the sequence that are in the cache already: the position of the first new one
    pages : for each group of layers, the pages of the sequence in order, those of new tokens
        included
    num_rows : how many of the last tokens need logits: 1, or 0 for a chunk that does not end the
        prompt, or all to verify a draft
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[Sequence[int]]
    num_rows: int = 1


@dataclass(frozen=True)
class Batch:
    """New tokens of ``batch`` sequences, one sequence after another; all tensors are int32.

    Every token belongs to a sequence. To pad a batch to a fixed size, add sequences of one token
    that own a scratch page. A sequence may have no new token.

    Attributes
    ----------
    tokens : (tokens,) ids; an id outside of the vocabulary has an embedding of zeros
    positions : (tokens,) the place of each token in its sequence
    block_tables : for each group of layers (batch, table_width): token t of sequence s is in page
        ``block_table[s, t // page_size]``, slot ``t % page_size``. Entries behind a sequence's last
        page are not read. Those of pages that lie before the window may name any page whose
        values are finite.
    kv_lens : (batch,) tokens of each sequence, the new ones included
    cu_q : (batch + 1,) new tokens of sequence s are rows ``cu_q[s]`` to ``cu_q[s + 1] - 1``
    rows : (rows,) tokens whose logits are needed
    max_q : upper bound of the new tokens of a sequence
    num_tokens : (1,) how many of the first tokens are requests'; the others were added to fill a
        size. None where all are.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    kv_lens: torch.Tensor
    cu_q: torch.Tensor
    rows: torch.Tensor
    max_q: int
    num_tokens: torch.Tensor | None = None

    @cached_property
    def is_added(self) -> torch.Tensor | None:
        """bool (tokens, 1), whether a token was added to fill a size; None where none was."""
        if self.num_tokens is None:
            return None
        places = torch.arange(len(self.tokens), device=self.tokens.device)
        return (places >= self.num_tokens)[:, None]

    @staticmethod
    def of(chunks: Sequence[Chunk], device: str | torch.device, table_width: int = 0) -> Batch:
        """The batch of at least one chunk, whose tables have at least ``table_width`` columns."""

        def tensor(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def table(group: int) -> torch.Tensor:
            pages = [list(chunk.pages[group]) for chunk in chunks]
            width = max(table_width, *map(len, pages), 1)
            return tensor([row + [0] * (width - len(row)) for row in pages])

        ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
        lasts = zip(ends, chunks, strict=True)
        return Batch(
            tokens=tensor([token for chunk in chunks for token in chunk.tokens]),
            positions=tensor([c.start + i for c in chunks for i in range(len(c.tokens))]),
            block_tables=tuple(map(table, range(len(chunks[0].pages)))),
            kv_lens=tensor([chunk.start + len(chunk.tokens) for chunk in chunks]),
            cu_q=tensor([0, *ends]),
            rows=tensor([row for end, c in lasts for row in range(end - c.num_rows, end)]),
            max_q=max(1, *(len(chunk.tokens) for chunk in chunks)),
        )
