"""What a call with a known signature needs, and nothing more: the hot half of dispatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kernelcat.call import signature
from kernelcat.call.arrays import Library
from kernelcat.call.choice import Decision
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.dtypes import itemsize
from kernelcat.errors import InvalidArgument

Launch = Callable[[tuple[int, ...], int], None]
Allocate = Callable[[], tuple[Any, list[int]]]

_missed: dict[Problem, list[int]] = {}
"""Problems that nobody has measured on the GPU they ran on -> [calls]."""

UNKNOWN_TO_FAST_PATH = (
    AttributeError,  # an argument that is no array of the library remembered
    IndexError,  # more arguments than the entry has inputs
    InvalidArgument,  # an array that is not aligned
    KeyError,  # an array of a library that was not met before
    RuntimeError,  # a torch tensor without memory of its own
    TypeError,  # arguments given twice, or out= that is no sequence
    ValueError,  # a CuPy or NumPy array where a torch tensor is expected
)
"""What the fast path may raise on arguments that it does not know."""

_slow: Counter[str] = Counter()
"""Exceptions by which calls left the fast path -> how many calls."""


class Ready(NamedTuple):
    """A signature's launcher, ready to go.

    ``stream(device)`` is the caller's current stream. ``pairs`` are (position, an output's
    position, low, high): the two can share memory only if low < difference of their addresses
    < high. ``allocate`` makes the output and tells its addresses; None when the caller passes it.
    ``matches(*present arrays)`` recognizes the signature quickly, where the library can.
    """

    launch: Launch
    stream: Callable[[int], int]
    device: int
    pairs: tuple[tuple[int, int, int, int], ...]
    allocate: Allocate | None
    matches: Callable[..., bool] | None
    addresses: Callable[[Iterable[Any]], list[int]]

    @staticmethod
    def make(
        entry: Entry,
        problem: Problem,
        device: int,
        library: Library,
        decision: Decision,
        launch: Launch,
        inputs: Sequence[Any],
        outs: Sequence[Any],
    ) -> Ready:
        if decision.missed:
            launch = _counted(launch, problem)
        if any(getattr(array, "requires_grad", False) for array in inputs):
            launch = _without_grad(launch, entry.name)
        pairs = _pairs(entry, problem) if outs else ()
        allocate = None if outs else allocator(entry, problem, device, library)
        present = [array for array in (*inputs, *outs) if array is not None]
        return Ready(
            launch=launch,
            stream=library.stream(),
            device=device,
            pairs=pairs,
            allocate=allocate,
            matches=library.matcher(present),
            addresses=library.addresses,
        )


class Bound:
    """A call with nothing left to look up, made by ``op.bind(...)``.

    ``arrays`` are the entry's inputs and outputs, None where absent, kept alive; ``out`` is what
    every call returns.
    """

    __slots__ = ("_current", "_device", "_launch", "_pointers", "arrays", "out")

    def __init__(
        self,
        launch: Launch,
        device: int,
        current: Callable[[int], int],
        pointers: Sequence[int],
        arrays: tuple[Any, ...],
        out: Any,
    ) -> None:
        self._launch = launch
        self._device = device
        self._current = current
        self._pointers = tuple(pointers)
        self.arrays = arrays
        self.out = out

    def __call__(self) -> Any:
        self._launch(self._pointers, self._current(self._device))
        return self.out


def allocator(entry: Entry, problem: Problem, device: int, library: Library) -> Allocate:
    """A function that makes the outputs: the array, or a tuple of several; and their addresses."""
    makers = [
        library.allocator(tensor.shape_of(problem), tensor.dtype_of(problem), device)
        for tensor in entry.outputs
    ]
    address = library.address
    if len(makers) == 1:
        make = makers[0]

        def one() -> tuple[Any, list[int]]:
            array = make()
            return array, [address(array)]

        return one

    def several() -> tuple[Any, list[int]]:
        made = tuple(make() for make in makers)
        return made, [address(array) for array in made]

    return several


def misses() -> list[tuple[Problem, int]]:
    """Problems that ran unmeasured on their GPU, with their calls; the most frequent ones first."""
    counts = [(problem, cell[0]) for problem, cell in list(_missed.items())]
    return sorted((found for found in counts if found[1]), key=lambda found: -found[1])


def slow_calls() -> dict[str, int]:
    """How many calls left the fast path by an exception of each kind."""
    return dict(_slow)


def count_slow(kind: str) -> None:
    _slow[kind] += 1


def count_miss(problem: Problem) -> None:
    _missed.setdefault(problem, [0])[0] += 1


def refuse_overlap(entry: Entry, given: Sequence[Any]) -> None:
    """Raise when an output shares memory with another tensor. Exact, and slow."""
    count = len(entry.inputs)
    infos = signature.describe(entry, given[:count], given[count:])
    for first, second in _output_pairs(entry):
        both = first in infos and second in infos
        if both and signature.overlap(infos[first], infos[second]):
            name = "out" if len(entry.outputs) == 1 else second
            raise InvalidArgument(
                f"{entry.name}: {name} shares memory with {first}; pass another array"
            )


def _counted(launch: Launch, problem: Problem) -> Launch:
    cell = _missed.setdefault(problem, [0])

    def run(pointers: tuple[int, ...], stream: int) -> None:
        cell[0] += 1
        launch(pointers, stream)

    return run


def _without_grad(launch: Launch, name: str) -> Launch:
    """Refuse to drop gradients silently."""
    import torch

    def run(pointers: tuple[int, ...], stream: int) -> None:
        if torch.is_grad_enabled():
            raise InvalidArgument(
                f"{name} has no backward pass and an input requires grad: "
                "call it under torch.no_grad(), or detach() the input"
            )
        launch(pointers, stream)

    return run


def _output_pairs(entry: Entry) -> list[tuple[str, str]]:
    """(other tensor, output) for every two tensors that must not share memory."""
    names = [tensor.name for tensor in entry.tensors]
    first_output = len(entry.inputs)
    return [(names[i], names[o]) for o in range(first_output, len(names)) for i in range(o)]


def _pairs(entry: Entry, problem: Problem) -> tuple[tuple[int, int, int, int], ...]:
    names = [tensor.name for tensor in entry.tensors]
    spans = {
        tensor.name: tensor.span_of(problem) * itemsize(tensor.dtype_of(problem))
        for tensor in entry.present(problem)
    }
    return tuple(
        (names.index(first), names.index(second), -spans[second], spans[first])
        for first, second in _output_pairs(entry)
        if spans.get(first) and spans.get(second)
    )
