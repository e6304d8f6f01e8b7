"""The fast path: everything that a call with a known signature runs, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kernelcat.bounded import Bounded
from kernelcat.call import signature, wrapping
from kernelcat.call.arrays import Library
from kernelcat.call.choice import Decision
from kernelcat.call.wrapping import Launch
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.dtypes import itemsize
from kernelcat.errors import InvalidArgument

Allocate = Callable[[], tuple[Any, list[int]]]
"""``allocate() -> (output or tuple of outputs, their addresses)``."""

_missed = Bounded[Problem, list[int]](4096)
"""Problem that nobody has measured on the GPU where it ran -> [number of calls]; the newest."""

EXPECTED_ERRORS = (
    AttributeError,  # an argument that is no array of the remembered library
    IndexError,  # more arguments than the entry has inputs
    InvalidArgument,  # an array that is not aligned
    KeyError,  # the first array of a library
    RuntimeError,  # a torch tensor without memory
    TypeError,  # an argument given twice, or an out= that is no sequence
    ValueError,  # a CuPy or NumPy array where a torch tensor is expected
)
"""Exceptions that the fast path may raise for arguments whose signature is not known."""

_slow: Counter[str] = Counter()
"""Exception that made a call leave the fast path -> number of calls."""


class FastCall:
    """The launcher of one signature, with all that a call needs.

    Attributes
    ----------
    launch, device : the launcher and its GPU
    stream : ``stream(device)`` returns the caller's current stream
    pairs
        (position of a tensor, position of an output, low, high): the two can share memory only if
        low < address of the output - address of the tensor < high.
    allocate : makes the outputs; None where the caller passes them
    matches
        ``matches(*arrays that are not None)`` recognizes the signature faster than ``scan``; None
        before :meth:`learn`, and where the library has no such test.
    addresses : returns the addresses of arrays, and raises for one that is not aligned
    """

    __slots__ = ("addresses", "allocate", "device", "launch", "library", "matches", "pairs",
                 "stream")  # fmt: skip

    def __init__(
        self,
        library: Library,
        device: int,
        launch: Launch,
        allocate: Allocate | None,
        pairs: tuple[tuple[int, int, int, int], ...],
    ) -> None:
        self.library, self.device, self.launch = library, device, launch
        self.allocate, self.pairs = allocate, pairs
        self.stream, self.addresses = library.stream(), library.addresses
        self.matches: Callable[..., bool] | None = None

    def learn(self, operands: Iterable[Any]) -> bool:
        """Make :attr:`matches` of arrays with this signature; whether the library has that test.

        Only the second call with a signature does so: many signatures are called once.
        """
        if self.matches is None:
            self.matches = self.library.matcher([x for x in operands if x is not None])
        return self.matches is not None

    def overlaps(self, pointers: Sequence[int]) -> bool:
        """Whether an output may share memory with another tensor, by the tensors' addresses."""
        for first, second, low, high in self.pairs:
            if low < pointers[second] - pointers[first] < high:
                return True
        return False

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
    ) -> FastCall:
        """The fast path for calls with the signature of ``inputs`` and ``outs``."""
        if decision.missed:
            launch = _counted(launch, problem)
        for array in inputs:
            if getattr(array, "requires_grad", False):
                launch = _without_grad(launch, entry.name)
                break
        if outs:
            return FastCall(library, device, launch, None, _pairs(entry, problem, inputs, outs))
        allocate = allocator(entry, problem, device, library)
        return FastCall(library, device, launch, allocate, ())


class Bound:
    """A call with fixed arrays, made by ``op.bind(...)``; nothing is left to look up.

    ``arrays`` are the entry's inputs and outputs (None for an absent one), which this object keeps
    alive. Every call returns ``out``. ``wrap`` makes of ``launch`` what a call runs.
    """

    __slots__ = ("__weakref__", "_current", "_device", "_launch", "_pointers", "_wrap", "arrays",
                 "out")  # fmt: skip

    def __init__(
        self,
        launch: Launch,
        wrap: Callable[[Launch], Launch],
        device: int,
        current: Callable[[int], int],
        pointers: Sequence[int],
        arrays: tuple[Any, ...],
        out: Any,
    ) -> None:
        self._wrap = partial(wrap, launch)
        self._device = device
        self._current = current
        self._pointers = tuple(pointers)
        self.arrays = arrays
        self.out = out
        wrapping.listen(self)
        self.rewrap()

    def rewrap(self) -> None:
        """Run what watchers make of the launch: one has started or stopped."""
        while True:
            changes = wrapping.changes
            self._launch = self._wrap()
            if changes == wrapping.changes:  # else another thread has started or stopped one
                return

    def __call__(self) -> Any:
        self._launch(self._pointers, self._current(self._device))
        return self.out


def allocator(entry: Entry, problem: Problem, device: int, library: Library) -> Allocate:
    """A function that allocates the outputs and returns them with their addresses.

    One output is returned as an array, several as a tuple with None for absent outputs.
    """
    makers = [
        library.allocator(tensor.shape_of(problem), tensor.dtype_of(problem), device)
        for tensor in entry.outputs
        if tensor.present(problem)
    ]
    address = library.address
    if len(makers) < len(entry.outputs):
        return _allocator_of_some(entry, problem, makers, address)
    if len(makers) == 1:
        make = makers[0]

        def allocate_one() -> tuple[Any, list[int]]:
            array = make()
            return array, [address(array)]

        return allocate_one

    def allocate_several() -> tuple[Any, list[int]]:
        arrays = tuple(make() for make in makers)
        return arrays, [address(array) for array in arrays]

    return allocate_several


def _allocator_of_some(
    entry: Entry,
    problem: Problem,
    makers: list[Callable[[], Any]],
    address: Callable[[Any], int],
) -> Allocate:
    """As :func:`allocator`, where some outputs are absent; ``makers`` make the present ones."""
    present = [tensor.present(problem) for tensor in entry.outputs]

    def allocate() -> tuple[Any, list[int]]:
        made = (make() for make in makers)
        arrays = tuple(next(made) if is_present else None for is_present in present)
        return arrays, [0 if array is None else address(array) for array in arrays]

    return allocate


def misses() -> list[tuple[Problem, int]]:
    """(problem, number of calls) for problems that nobody has measured on the GPU where they ran.

    The problem with the most calls comes first. Of more than 4096 problems the newest are known.
    """
    counts = [(problem, calls[0]) for problem, calls in list(_missed.items())]
    return sorted((pair for pair in counts if pair[1]), key=lambda pair: -pair[1])


def slow_calls() -> dict[str, int]:
    """Name of an exception -> number of calls that left the fast path because of it."""
    return dict(_slow)


def count_slow(exception: str) -> None:
    """Count a call that left the fast path because of ``exception``."""
    _slow[exception] += 1


def count_miss(problem: Problem) -> None:
    """Count a call of a problem that nobody has measured on this GPU."""
    _calls_of(problem)[0] += 1


def _calls_of(problem: Problem) -> list[int]:
    """The counter of a missed problem."""
    calls = _missed.get(problem)
    if calls is None:
        calls = _missed[problem] = [0]
    return calls


def refuse_overlap(entry: Entry, operands: Sequence[Any]) -> None:
    """Raise ``InvalidArgument`` when an output shares memory with another tensor.

    ``operands`` are inputs, then outputs; None where absent. The test is exact, and slow.
    """
    count = len(entry.inputs)
    infos = signature.describe(entry, operands[:count], operands[count:])
    for first, second in _output_pairs(entry):
        both = first in infos and second in infos
        if both and signature.overlap(infos[first], infos[second]):
            name = "out" if len(entry.outputs) == 1 else second
            raise InvalidArgument(
                f"{entry.name}: {name} shares memory with {first}; pass another array"
            )


def _counted(launch: Launch, problem: Problem) -> Launch:
    """``launch`` that also counts a miss."""
    calls = _calls_of(problem)

    def run(pointers: tuple[int, ...], stream: int) -> None:
        calls[0] += 1
        launch(pointers, stream)

    return run


def _without_grad(launch: Launch, name: str) -> Launch:
    """``launch`` that refuses to run while torch records gradients, which would be lost."""
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
    """(tensor, output) for every two tensors that must not share memory."""
    names = [tensor.name for tensor in entry.tensors]
    first_output = len(entry.inputs)
    return [(names[i], names[o]) for o in range(first_output, len(names)) for i in range(o)]


def _pairs(
    entry: Entry, problem: Problem, inputs: Sequence[Any], outs: Sequence[Any]
) -> tuple[tuple[int, int, int, int], ...]:
    """:attr:`FastCall.pairs` for ``problem``; bounds are in bytes."""
    spans = []
    for position, (tensor, array) in enumerate(zip(entry.tensors, (*inputs, *outs), strict=True)):
        if array is None:
            continue
        num_bytes = array.nbytes
        if tensor.strides is not None:
            num_bytes = tensor.span_of(problem) * itemsize(tensor.dtype_of(problem))
        if num_bytes:
            spans.append((position, num_bytes))
    first_output = len(inputs)
    pairs: list[tuple[int, int, int, int]] = []
    for number, (second, second_bytes) in enumerate(spans):
        if second >= first_output:
            pairs += [(first, second, -second_bytes, size) for first, size in spans[:number]]
    return tuple(pairs)
