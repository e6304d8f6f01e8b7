"""Debugging: a look at what lies in arrays before each launch, against preconditions of entries.

Kernels follow block tables, lengths and maps as they are, and a wrong number reads or writes wrong
memory. While debugging is on, each launch waits for its stream, copies the arrays that the entry
has preconditions for, and checks them on the host. While debugging is off, calls cost nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kernelcat import catalog, dtypes
from kernelcat.call import wrapping
from kernelcat.call.choice import Decision
from kernelcat.call.wrapping import Launch
from kernelcat.catalog.spec import Entry, Problem, Tensor
from kernelcat.errors import InvalidArgument
from kernelcat.runtime import driver
from kernelcat.runtime.gpu import Gpu

VARIABLE = "KERNELCAT_DEBUG"
"""Environment variable: debugging is on from the start, unless the value is empty or 0."""


class debug:
    """Check what lies in arrays before each launch: block tables, lengths, index maps, logits.

    ``kernelcat.debug()`` turns the check on and ``kernelcat.debug(False)`` off, for all threads.
    ``with kernelcat.debug():`` turns it on for a block. ``KERNELCAT_DEBUG=1`` turns it on for a
    whole process. Calls of operators, bound calls, plans and ``kernelcat.reference`` are checked.

    A checked call waits for its stream and copies arrays to the host, so that it is slow. A wrong
    element raises ``InvalidArgument``, and nothing is launched:

        paged_attn: block_table[3, 7] = 999: the cache has 128 pages

    Elements that no kernel reads may hold anything. A call inside the capture of a CUDA graph
    raises ``InvalidArgument`` where the entry has something to check: a capture allows no reading.
    """

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._before = is_on()
        _switch(on)

    def __enter__(self) -> None:
        _switch(self._on)

    def __exit__(self, *error: object) -> None:
        _switch(self._before)


class Checker:
    """The watcher that checks."""

    def wrap(
        self, launch: Launch, problem: Problem, gpu: Gpu, device: int, decision: Decision
    ) -> Launch:
        """``launch``, preceded by a check where the entry has preconditions."""
        entry = catalog.entry(problem.entry)
        if not entry.preconditions:
            return launch
        position = {tensor: number for number, tensor in enumerate(entry.tensors)}
        cuda = driver.opened()

        def run(pointers: tuple[int, ...], stream: int) -> None:
            if cuda.is_capturing(stream):
                raise InvalidArgument(
                    f"{entry.name}: kernelcat.debug() reads arrays before the launch, which the "
                    "capture of a CUDA graph does not allow: turn it off to capture"
                )

            def read(tensor: Tensor) -> Any:
                size = tensor.span_of(problem) * dtypes.itemsize(tensor.dtype_of(problem))
                pointer = pointers[position[tensor]]
                memory = cuda.read(pointer, size, device, stream)
                return dtypes.decode(_view(tensor, problem, memory), tensor.dtype_of(problem))

            check(entry, problem, read)
            launch(pointers, stream)

        return run


def check(entry: Entry, problem: Problem, read: Callable[[Tensor], Any]) -> None:
    """Raise ``InvalidArgument`` for the first element that breaks a precondition of ``entry``.

    ``read(tensor)`` returns the values of a tensor that ``problem`` has: a NumPy array of integers
    or float32.
    """
    present = {tensor.name: tensor for tensor in entry.present(problem)}
    values: dict[str, Any] = {}
    for precondition in entry.preconditions:
        names = (precondition.tensor, *precondition.reads)
        if not all(name in present for name in names):
            continue
        for name in names:
            if name not in values:
                array = read(present[name])
                values[name] = array.astype("int64") if array.dtype.kind == "i" else array
        mask = precondition.broken(problem.values, values)
        if mask.any():
            index = tuple(int(numbers[0]) for numbers in mask.nonzero())
            where = ", ".join(map(str, index))
            raise InvalidArgument(
                f"{entry.name}: {precondition.tensor}[{where}] = "
                f"{values[precondition.tensor][index]}: {precondition.why.format(**problem.values)}"
            )


def is_on() -> bool:
    """Whether calls are checked."""
    return _CHECKER in wrapping.active


def _switch(on: bool) -> None:
    if on and not is_on():
        wrapping.start(_CHECKER)
    elif not on and is_on():
        wrapping.stop(_CHECKER)


def _view(tensor: Tensor, problem: Problem, memory: bytearray) -> Any:
    """The storage array that begins with ``memory``."""
    import numpy

    flat = numpy.frombuffer(memory, dtypes.STORAGE[tensor.dtype_of(problem)])
    strides = tuple(stride * flat.itemsize for stride in tensor.strides_of(problem))
    return numpy.lib.stride_tricks.as_strided(flat, tensor.shape_of(problem), strides)


_CHECKER = Checker()
if os.environ.get(VARIABLE, "0") not in ("", "0"):
    debug()
