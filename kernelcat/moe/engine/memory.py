"""How many pages the caches have: what fits into the memory, divided among layer groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.limits import Limits

GIB = 1 << 30
NUM_PREFILLS = 4
"""Requests whose prompts a group with a window has room for at a time, beside those that write."""


@contextmanager
def fitting(what: str, way_out: str) -> Iterator[None]:
    """Raises ``InvalidArgument`` where memory is full: ``what`` does not fit, do ``way_out``."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidArgument(f"{what} do not fit into the memory: {way_out} ({reason})") from error


def divide(
    num_bytes: int,
    page_bytes: Sequence[int],
    windows: Sequence[int],
    page_size: int,
    limits: Limits,
    budget: str,
) -> list[int]:
    """Pages of each layer group, the null page included.

    The groups' pages are in proportion to what `Limits.max_running` requests of `Limits.context`
    tokens need, and enough for one such request.

    Parameters
    ----------
    num_bytes : bytes of all pages
    page_bytes : bytes of a page of each group
    windows : tokens that a query of each group reads; 0 for all
    budget : where ``num_bytes`` comes from, for the message of the error

    Raises
    ------
    InvalidArgument
        The bytes are too few for one request of `Limits.context` tokens.
    """
    blocks = -(-limits.context // page_size)
    manager = BlockManager(
        [LayerGroup(str(w), 2, w) for w in windows], page_size, blocks, has_prefix_cache=False
    )
    least = [manager.max_pages(group, limits.span) + 1 for group in manager.groups]
    needed = sum(n * size for n, size in zip(least, page_bytes, strict=True))
    if needed > num_bytes:
        raise InvalidArgument(
            f"{budget} leaves {num_bytes / GIB:.2f} GiB for the cache, and one request of "
            f"context={limits.context} tokens needs {needed / GIB:.2f} GiB: raise the budget, or "
            "lower context"
        )
    most = [_most(manager, group, limits) + 1 for group in manager.groups]
    share = (num_bytes - needed) / max(
        1, sum((m - n) * size for m, n, size in zip(most, least, page_bytes, strict=True))
    )
    return [n + int((m - n) * share) for m, n in zip(most, least, strict=True)]


def _most(manager: BlockManager, group: LayerGroup, limits: Limits) -> int:
    """Pages that all requests that run can have in ``group``, the prefix cache aside."""
    if not group.window:
        return limits.max_running * manager.table_width
    writing = limits.max_running * manager.max_pages(group, 2)
    return writing + NUM_PREFILLS * manager.max_pages(group, limits.span)
