"""Named ranges of the host's time, for Nsight Systems (NVTX) and for torch's profiler.

    with span("schedule"):          costs less than half a microsecond while nobody records
        ...

An engine's step has the ranges `PHASES`. A model that is run without a CUDA graph has one for each
layer as well; a graph's launch shows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from kernelcat.errors import Unsupported

PHASES = ("schedule", "launch", "sample", "wait", "output")
"""The phases of an engine's step on the host, in order: plan the step and fill its arrays; launch
the model; launch the choice of tokens; wait for the oldest step in flight; give tokens to their
requests."""

Open = Callable[[str], AbstractContextManager[Any]]


class _Nothing(AbstractContextManager[None]):
    """A range that nobody records; it costs half of what `contextlib.nullcontext` does."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None


_NOTHING = _Nothing()
_open: Open | None = None


def span(name: str, index: int | None = None) -> AbstractContextManager[Any]:
    """A range called ``name``, or ``name index``; the same do-nothing object if none records."""
    if _open is None:
        return _NOTHING
    return _open(name if index is None else f"{name} {index}")


@contextmanager
def _opened_by(opener: Open) -> Iterator[None]:
    global _open
    before, _open = _open, opener
    try:
        yield
    finally:
        _open = before


def for_profiler() -> AbstractContextManager[None]:
    """Meanwhile ranges are events of a running `torch.profiler`."""
    return _opened_by(torch.profiler.record_function)


def for_nvtx() -> AbstractContextManager[None]:
    """Meanwhile ranges are NVTX ranges, which Nsight Systems shows.

    Raises ``Unsupported`` where torch was built without CUDA.
    """
    if not torch.version.cuda:
        raise Unsupported("NVTX ranges need a torch that was built for CUDA")
    return _opened_by(torch.cuda.nvtx.range)
