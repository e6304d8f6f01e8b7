"""What the FlashInfer peers share: the library, and the pages of sequences in FlashInfer's form."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

from kernelcat.reference._peers import import_torch, required_by


class PageLists(NamedTuple):
    """Page numbers of all sequences in one list (FlashInfer's ``paged_kv`` arguments); int32."""

    indptr: Any
    """(batch + 1,): the pages of sequence s are indices[indptr[s] : indptr[s + 1]]."""
    indices: Any
    """Page numbers, one sequence after another, on the GPU."""
    last_page_len: Any
    """(batch,): tokens in the last page of each sequence."""


def import_flashinfer():
    """The module ``flashinfer``; raises ``MissingDependency``."""
    with required_by("flashinfer", "pip install flashinfer-python"):
        import flashinfer
    return flashinfer


@cache
def workspace(device):
    """FlashInfer's scratch memory, 256 MiB, the same for all wrappers of a process.

    A race has hundreds of copies of a small problem, each with a wrapper of its own. They run one
    after another, so one scratch memory serves them all, as in an engine.
    """
    torch = import_torch("flashinfer")
    return torch.zeros(256 << 20, dtype=torch.uint8, device=device)


def page_lists(block_table, kv_lens: tuple[int, ...], page_size: int, device) -> PageLists:
    """Page lists of sequences of ``kv_lens`` tokens.

    ``block_table`` is a torch tensor (batch, table_width); ``indptr`` and ``last_page_len`` are
    made on ``device``.
    """
    torch = import_torch("flashinfer")
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    indices = torch.cat([block_table[s, :count] for s, count in enumerate(counts)])

    def tensor(numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    indptr = tensor([0, *itertools.accumulate(counts)])
    return PageLists(indptr, indices, tensor([(n - 1) % page_size + 1 for n in kv_lens]))
