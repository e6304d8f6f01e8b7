"""Specifications of entries: axes, tensors, peers, tolerances and oracles, as plain data.

Entries and kernels import the parts of a specification from here, whichever module defines them.
This module imports neither torch, nor a compiler, nor NumPy, so listing the catalog is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kernelcat.catalog.axes import Axis as Axis
from kernelcat.catalog.axes import AxisValue as AxisValue
from kernelcat.catalog.axes import any_size as any_size
from kernelcat.catalog.axes import exact as exact
from kernelcat.catalog.axes import power_of_two as power_of_two
from kernelcat.catalog.precondition import Precondition
from kernelcat.catalog.problem import Problem as Problem
from kernelcat.catalog.tensor import EXACT as EXACT
from kernelcat.catalog.tensor import Derived as Derived
from kernelcat.catalog.tensor import ElementType as ElementType
from kernelcat.catalog.tensor import Tensor as Tensor
from kernelcat.catalog.tensor import Tolerance as Tolerance
from kernelcat.errors import InvalidArgument, UnknownName, nearest

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True)
class Peer:
    """Somebody else's implementation of an entry, raced with the catalog's implementations.

    ``load()`` imports the peer's library and returns ``make(problem, arrays) -> run``. ``arrays``
    are the entry's tensors (outputs included) as torch tensors on the GPU, and ``run()`` launches
    on torch's current stream. ``load`` raises ``MissingDependency`` where the library is not
    installed, and ``make`` raises ``Unsupported`` for a problem that the library cannot compute.
    """

    name: str
    load: Callable[[], Callable[[Problem, Mapping[str, Any]], Callable[[], Any]]]


Arrays = Mapping[str, Any]
"""Tensor name -> array."""


@dataclass(frozen=True)
class Signal:
    """Required ratio of signal to quantization noise, checked in addition to the tolerance.

    ``exact(problem, drawn)`` returns the outputs for unquantized inputs, float32 arrays by name;
    ``drawn`` is all that ``make_inputs`` returned, including the unquantized originals under names
    that begin with ``_``. ``least(problem)`` is the smallest ratio allowed in dB,
    ``10 log10(sum exact^2 / sum (out - exact)^2)``, or None where an output has too few elements
    for the ratio to be meaningful.
    """

    exact: Callable[[Problem, Arrays], dict[str, Any]]
    least: Callable[[Problem], float | None]


@dataclass(frozen=True)
class Entry:
    """The specification of one technique: what it computes, and which results are right.

    Attributes
    ----------
    oracle : ``oracle(problem, arrays) -> {output: array}``
        Takes NumPy or CuPy arrays by tensor name: float32 values, or storage arrays where the
        tolerance is ``EXACT`` and for tensors ``as_stored``; returns arrays of the same kind. The
        oracle uses only operators and methods that both libraries share. It also takes the values
        of updated outputs before the call and returns all their values after the call: elements
        that the entry does not write must stay the same bit for bit.
    make_inputs : ``make_inputs(problem, normal) -> {input or updated output: array}``
        ``normal(shape)`` draws float32 standard normal values on the device in use. Arrays whose
        names begin with ``_`` are no tensors of the entry; ``signal`` uses them.
    tolerance
        Value of ``tolerance_axis`` -> tolerance.
    product_axis
        The axis that names the element type of the operands, ``tolerance_axis`` by default.
    flops, bytes_moved : ``problem -> int``
        The least work that any implementation must do; the roofline follows from both.
    constraint : ``problem -> reason or None``
        Why a combination of axis values makes no sense (``src_stride`` below ``cols``), or None.
    problems
        Name -> problem: the problems that are tuned, checked and shown.
    random_problem : ``dice -> problem``, or None
        Draws a problem as programs have them, for races with peers on problems that nobody tuned.
        The problem fits into 60 GB with its copies, and at least one peer computes it.
    unusual_problem : ``dice -> problem``, or None
        Draws a legal problem with sizes and options that no model has: calls may have any. What
        random problems are served from serves these, too.
    peers
        Implementations of others that are raced.
    without_peer
        Name of problems, in which ``*`` stands for any text -> why none of the peers computes them.
    signal
        Required ratio of signal to quantization noise, where inputs are quantized; or None.
    preconditions : what values of arrays must satisfy, in the order in which they are checked
    work_in_progress
        True until the entry is complete; one language and one variant suffice until then.
    ranks
        The axis that counts the processes which compute the entry together, for an entry of several
        ranks. Every tensor begins with this axis: each rank holds its part alone, and a kernel gets
        the part's address. ``flops`` and ``bytes_moved`` are those of one rank.
    one_sided
        Of an entry of several ranks, whether a launch waits for no other rank. One rank may then
        have much to do and another one nothing.
    """

    name: str
    summary: str
    axes: tuple[Axis, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    oracle: Callable[[Problem, Arrays], dict[str, Any]]
    make_inputs: Callable[[Problem, Callable[[tuple[int, ...]], Any]], dict[str, Any]]
    tolerance: Mapping[str, Tolerance]
    flops: Callable[[Problem], int]
    bytes_moved: Callable[[Problem], int]
    problems: Mapping[str, Problem] = field(default_factory=dict)
    random_problem: Callable[[Random], Problem] | None = None
    unusual_problem: Callable[[Random], Problem] | None = None
    peers: tuple[Peer, ...] = ()
    without_peer: Mapping[str, str] = field(default_factory=dict)
    constraint: Callable[[Problem], str | None] = lambda problem: None
    tolerance_axis: str = "dtype"
    product_axis: str | None = None
    signal: Signal | None = None
    preconditions: tuple[Precondition, ...] = ()
    work_in_progress: bool = False
    ranks: str | None = None
    one_sided: bool = False

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of all tensors: inputs, then outputs."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def updated(self) -> tuple[Tensor, ...]:
        """Outputs that hold values before a call."""
        return tuple(tensor for tensor in self.outputs if tensor.updated)

    @property
    def drawn(self) -> tuple[Tensor, ...]:
        """Tensors that hold values before a call: those that ``make_inputs`` makes."""
        return self.inputs + self.updated

    def axis(self, name: str) -> Axis:
        """The axis called ``name``; raises ``UnknownName``."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise UnknownName(f"{self.name} has no axis {name!r}{nearest(name, self.axis_names)}")

    @property
    def axis_names(self) -> list[str]:
        """Names of the axes, in the order of the specification."""
        return [axis.name for axis in self.axes]

    @property
    def defaults(self) -> dict[str, AxisValue]:
        """Axis -> default value, for the axes that have one."""
        return {a.name: a.default for a in self.axes if a.default is not None}

    def problem(self, **axes: AxisValue) -> Problem:
        """The problem with these axis values, and defaults for the axes left out.

        Raises
        ------
        UnknownName
            The entry has no such axis.
        InvalidArgument
            An axis without a default is left out, or a value or a combination is not allowed.
        """
        for name in axes:
            self.axis(name)
        axes = {**self.defaults, **axes}
        missing = [name for name in self.axis_names if name not in axes]
        if missing:
            raise InvalidArgument(f"{self.name} also needs {', '.join(missing)}")
        axes = {axis.name: axis.take(axes[axis.name]) for axis in self.axes}
        problem = Problem.of(self.name, **axes)
        reason = self.constraint(problem)
        if reason:
            raise InvalidArgument(f"{self.name}: {reason}")
        return problem

    def named(self, name: str) -> Problem:
        """The problem called ``name``, or the one that ``name`` describes: ``M=256,N=512,K=64``.

        What a description leaves out is filled in as by :meth:`described`.

        Raises
        ------
        UnknownName
            There is no such problem or axis.
        InvalidArgument
            A size is missing, or a value or a combination is not allowed.
        """
        if "=" in name:
            return self._parsed(name)
        if name not in self.problems:
            hint = nearest(name, list(self.problems))
            raise UnknownName(f"{self.name} has no problem {name!r}{hint}")
        return self.problems[name]

    def described(self, **axes: Any) -> Problem:
        """The problem with these axis values.

        Choices that are left out have their default, or else the value of the first problem of this
        entry; sizes without a default must be given. Raises as :meth:`problem` does.
        """
        first = next(iter(self.problems.values()))
        chosen = {a.name: first[a.name] for a in self.axes if a.values and a.default is None}
        return self.problem(**{**chosen, **axes})

    def _parsed(self, text: str) -> Problem:
        axes = {}
        for word in text.split(","):
            name, is_pair, value = word.strip().partition("=")
            if not is_pair:
                raise InvalidArgument(f"{word!r} is not AXIS=VALUE, as in M=256,N=512,K=64")
            axes[name] = self.axis(name).parse(value)
        return self.described(**axes)

    def problem_name(self, problem: Problem) -> str | None:
        """The name of ``problem``, or None for a problem without a name."""
        return next((name for name, named in self.problems.items() if named == problem), None)

    def why_no_peer(self, name: str) -> str | None:
        """Why no peer computes the problem called ``name``; None where one may."""
        reasons = self.without_peer.items()
        return next((why for pattern, why in reasons if fnmatchcase(name, pattern)), None)

    def bucket(self, problem: Problem) -> Problem:
        """The problem with sizes rounded by the bucketing rules and without minor choices."""
        sized = {a.name: a.bucket(problem[a.name]) for a in self.axes if not a.values}
        return Problem.of(self.name, **sized, **self.major_choices(problem))

    @cached_property
    def _varying(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes if axis.varies}

    def rounded(self, problem: Problem) -> Problem:
        """``problem`` with varying sizes rounded up (:meth:`Axis.shared`).

        It is not checked: no problem may have these sizes (:meth:`why_not`).
        """
        return Problem.with_values(self.name, self.rounded_values(problem))

    def rounded_values(self, problem: Problem) -> dict[str, AxisValue]:
        """The values of :meth:`rounded`, in the canonical order."""
        values = problem.values.copy()
        for name, axis in self._varying.items():
            values[name] = axis.shared(values[name])  # type: ignore[arg-type]
        return values

    def why_not(self, problem: Problem) -> str | None:
        """Why no call has ``problem``, whose values are of the axes' types; None for a problem."""
        for name, axis in self._varying.items():
            if problem[name] >= axis.limit:
                return f"{name}={problem[name]} must be less than {axis.limit}"
        return self.constraint(problem)

    def major_choices(self, problem: Problem) -> dict[str, AxisValue]:
        """The values of all choices that are not minor."""
        return {a.name: problem[a.name] for a in self.axes if a.values and not a.minor}

    def tolerance_of(self, problem: Problem, output: Tensor | None = None) -> Tolerance:
        """The tolerance of ``output``, or the entry's tolerance for ``problem``."""
        override = output.tolerance if output else None
        if isinstance(override, Tolerance):
            return override
        return self.tolerance[str(problem[override or self.tolerance_axis])]

    def product_dtype(self, problem: Problem) -> str:
        """The element type whose peak rate bounds the arithmetic of ``problem``."""
        return str(problem.values.get(self.product_axis or self.tolerance_axis, "float32"))

    def present(self, problem: Problem) -> Iterator[Tensor]:
        """The tensors that ``problem`` has, in order: all but absent optional tensors."""
        return (tensor for tensor in self.tensors if tensor.present(problem))
