"""Peers in the race: torch tensors on the very memory our kernels use, on the same stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernelcat.bench.timer import CudaTimer
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import MissingDependency
from kernelcat.runtime.device import Arrays


def enter(timer: CudaTimer) -> None:
    """Make ``timer``'s stream torch's current one, and its graphs keep torch's memory, for good."""
    torch = _torch()
    torch.cuda.set_stream(torch.cuda.ExternalStream(timer.stream.ptr))
    timer.memory = own_memory


@contextmanager
def own_memory() -> Iterator[Any]:
    """A pool that torch allocates from, and nobody else gets back what was freed there.

    A tensor that a captured run allocates is free for others once the run has returned, but every
    replay writes to it.
    """
    torch = _torch()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        yield pool


def tensors(entry: Entry, problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """Torch views of storage arrays, with the element types the entry names; nothing is copied."""
    torch = _torch()
    views = {}
    for tensor in entry.present(problem):
        array = arrays[tensor.name]
        if array.dtype.name == "uint16":  # torch takes signed integers in every version
            array = array.view("int16")
        view = torch.as_tensor(array, device=f"cuda:{array.device.id}")
        if view.numel() and view.data_ptr() != array.data.ptr:
            raise MissingDependency("torch copied a CuPy array instead of viewing it: update torch")
        views[tensor.name] = view.view(getattr(torch, tensor.dtype_of(problem)))
    return views


def binder(
    entry: Entry, problem: Problem, make: Callable[..., Callable[[], Any]]
) -> Callable[[Arrays], Callable[[], Any]]:
    """What ``device.load`` gives for our own kernels, for a peer's ``make``."""
    return lambda arrays: make(problem, tensors(entry, problem, arrays))


def forget() -> None:
    """Forget what ``torch.compile`` made: from the ninth shape of a function on it fails."""
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
        _torch().compiler.reset()


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("racing peers needs torch: pip install torch") from error
    return torch
