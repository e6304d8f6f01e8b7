"""Peers in a race: torch functions that run on the memory and on the stream of our kernels."""

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
    """Prepares ``timer`` and torch for peers, for the rest of the process.

    The stream of ``timer`` becomes torch's current stream, and each CUDA graph of ``timer`` keeps
    the memory that torch allocated during the capture.
    """
    torch = _torch()
    torch.cuda.set_stream(torch.cuda.ExternalStream(timer.stream.ptr))
    timer.memory = separate_memory


@contextmanager
def separate_memory() -> Iterator[Any]:
    """Yields a memory pool from which torch allocates inside the ``with`` statement.

    A tensor that a run allocates during the capture is freed when the run returns, but every replay
    of the graph writes to the memory of the tensor. Memory that is freed in this pool is therefore
    not given to allocations outside of the pool.
    """
    torch = _torch()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        yield pool


def tensors(entry: Entry, problem: Problem, arrays: Arrays) -> dict[str, Any]:
    """Torch views of CuPy arrays: tensor name -> torch tensor of the same shape, nothing copied.

    Each view has the element type that the entry names for the problem.

    Raises
    ------
    MissingDependency
        torch is missing, or copies an array instead of viewing the array.
    """
    torch = _torch()
    views = {}
    for tensor in entry.present(problem):
        array = arrays[tensor.name]
        if array.dtype.name == "uint16":  # every version of torch has int16
            array = array.view("int16")
        view = torch.as_tensor(array, device=f"cuda:{array.device.id}")
        if view.numel() and view.data_ptr() != array.data.ptr:
            raise MissingDependency("torch copied a CuPy array instead of viewing it: update torch")
        views[tensor.name] = view.view(getattr(torch, tensor.dtype_of(problem)))
    return views


def binder(
    entry: Entry, problem: Problem, make: Callable[..., Callable[[], Any]]
) -> Callable[[Arrays], Callable[[], Any]]:
    """Adapts a peer to the form that ``device.load`` returns for our kernels.

    ``make(problem, tensors)`` returns a callable that runs the peer once. The result takes arrays
    and returns such a callable.
    """
    return lambda arrays: make(problem, tensors(entry, problem, arrays))


def forget() -> None:
    """Drops the code that ``torch.compile`` made, which fails from a function's ninth shape on, and
    returns to the device the memory that torch keeps."""
    # Without torch._dynamo nothing was compiled, and importing torch._dynamo takes seconds.
    if "torch._dynamo" in sys.modules:
        _torch().compiler.reset()
    if "torch" in sys.modules:
        _torch().cuda.empty_cache()


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("racing peers needs torch: pip install torch") from error
    return torch
