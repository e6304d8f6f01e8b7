"""A call: arguments -> problem -> configuration -> launch.

The first call with a new signature (types, shapes, strides, element types, device) takes the slow
path: it checks everything, chooses, builds, and remembers a launcher under a cheap key. Every later
call is one dictionary hit. Misses (nobody measured such a problem on this GPU) are counted.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from kernelcat import catalog
from kernelcat.call import adapters, arrays, signature
from kernelcat.call.choice import Decision, Pin, choose
from kernelcat.call.fast_path import (
    UNKNOWN_TO_FAST_PATH,
    Bound,
    Ready,
    allocator,
    count_miss,
    count_slow,
    misses,
    refuse_overlap,
    slow_calls,
)
from kernelcat.catalog.implementation import Config, ConfigValue
from kernelcat.catalog.spec import AxisValue, Entry, Problem
from kernelcat.errors import InvalidArgument, MissingDependency
from kernelcat.report.explain import Explanation
from kernelcat.runtime import gpu as gpus
from kernelcat.verify import code_record, receipts

__all__ = ["Bound", "Op", "Plan", "entries", "get", "misses", "pinned", "reload", "slow_calls"]

REMEMBERED = 1024
"""Signatures, and launchers, that one operator keeps; the oldest go first."""

RECENT = 8
"""Signatures that are tried one by one, before the full key is made of the arguments."""

_is_compiling: Callable[[], bool] = bool  # torch's own check replaces it once torch is there
_scans: dict[type, arrays.Scan] = {}
_ops: dict[tuple[str, Pin], Op] = {}
_alive: WeakSet[Op] = WeakSet()


def entries() -> tuple[str, ...]:
    """The names of all entries, sorted: what :func:`get` takes."""
    return catalog.names()


def get(
    name: str,
    *,
    language: str | None = None,
    variant: str | None = None,
    config: Mapping[str, ConfigValue] | None = None,
) -> Op:
    """The operator called ``name``; imports no kernel yet.

    Parameters
    ----------
    language, variant, config
        Insist on a language (``cuda``, ``triton``, ``cute``), a variant of it, and a configuration
        of that. By default the measurements decide.

    Raises
    ------
    UnknownName
        With the nearest names.
    MissingDependency
        The language asked for is not installed.
    """
    entry = catalog.entry(name)
    pin = Pin(language, variant, None if config is None else Config(config))
    op = _ops.get((name, pin))
    if op is None:
        pin.check(entry)
        op = _ops.setdefault((name, pin), Op(entry, pin))
    _meet_torch()
    return op


def reload() -> None:
    """Read the database again; every operator chooses anew at its next call."""
    _snapshot.cache_clear()
    receipts.known.cache_clear()
    code_record.find.cache_clear()
    for op in _ops.values():
        op.forget()


class Op:
    """An entry of the catalog as a function on arrays.

    ``op(a, b, out=d)`` takes the entry's inputs in order or by name (optional ones may be left
    out), torch, CuPy or other DLPack arrays of one GPU, and returns the output, or a tuple of
    them, in the caller's library. An output that the entry updates must be passed, and the others
    with it. It runs on the caller's current stream. Arrays that start at an address that is not a
    multiple of 16 bytes are copied first, with one warning.

    For arrays of other DLPack producers (JAX) the call returns when the kernel has finished:
    they cannot tell that their memory is still being read.

    Raises
    ------
    InvalidArgument
        Arguments that do not fit the specification; one line.
    Unsupported
        Nothing serves this problem on this GPU; says what would.
    """

    def __init__(self, entry: Entry, pin: Pin, only: Problem | None = None) -> None:
        self.entry = entry
        self.pin = pin
        self._only = only
        self._single = len(entry.outputs) == 1
        absent = range(len(entry.inputs), -1, -1)
        self._pads = [(None,) * n for n in absent]
        self._zeros = [(0,) * n for n in absent]
        self._fresh: list[list[Any]] = [[] for _ in absent]
        self._onto: list[list[Any]] = [[] for _ in absent]
        self._ready: dict[Any, Ready] = {}
        self._loaded: dict[tuple[Problem, int], tuple[Decision, Any]] = {}
        self._lock = threading.RLock()
        self.traced: Callable[..., Any] | None = None  # serves torch.compile and wrapper tensors
        self._positions = {tensor.name: i for i, tensor in enumerate(entry.inputs)}
        _alive.add(self)

    def __repr__(self) -> str:
        return f"<kernelcat.Op {self.entry.name}{self.pin.key}>"

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        if _is_compiling():
            return self.traced(*args, out=out, **named)  # type: ignore[misc]
        ready: Ready | None = None
        placed: tuple[Any, ...] = args
        axes: tuple[Any, ...] = ()
        try:
            if named:
                placed, axes = self._place(args, named)
            given = placed if out is None else (*placed, out) if self._single else (*placed, *out)
            if not axes:
                count = len(placed)
                for recent in (self._fresh if out is None else self._onto)[count]:
                    if recent.matches(*given):
                        pointers = recent.addresses(given)
                        pointers[count:count] = self._zeros[count]
                        ready = recent
                        break
            if ready is None:
                ready, pointers = self._look_up(placed, given, axes, out is None)
        except UNKNOWN_TO_FAST_PATH as error:  # the slow path says what is wrong with a call
            ready = None
            count_slow(type(error).__name__)
        if ready is None:
            return self._first_call(args, out, named)
        if ready.allocate is not None:
            out, addresses = ready.allocate()
            pointers += addresses
        for first, second, low, high in ready.pairs:
            if low < pointers[second] - pointers[first] < high:
                self._refuse_overlap(placed, given)
        ready.launch(tuple(pointers), ready.stream(ready.device))
        return out

    def bind(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Bound:
        """Fix the arrays: a callable without arguments and with nothing left to look up.

        Each call launches on the same memory and returns the output. It goes to the caller's
        current stream, or always to ``stream``; it is safe inside CUDA graph capture, and has
        workspaces of its own. The arrays are kept alive, and so must this be, as long as a graph
        that captured it is replayed.
        """
        inputs, axes = signature.arrange(self.entry, args, named)
        outs = signature.outputs(self.entry, out)
        infos, library, problem, device = self._resolve(inputs, outs, axes)
        for tensor in self.entry.tensors:
            if tensor.name in infos and not infos[tensor.name].aligned:
                name = signature.label(self.entry, tensor)
                raise InvalidArgument(
                    f"{self.entry.name}: bind needs arrays at multiples of 16 bytes; "
                    f"{name} is not: bind a copy of it"
                )
        decision, launch = self._load(problem, device)
        if not outs:
            out, _ = allocator(self.entry, problem, device, library)()
            outs = signature.outputs(self.entry, out)
        given = (*inputs, *outs)
        refuse_overlap(self.entry, given)
        if decision.missed:
            count_miss(problem)
        current = library.stream() if stream is None else arrays.fixed_stream(stream)
        return Bound(launch.clone(), device, current, library.scan(given)[1], given, out)

    def plan(self, *args: Any, device: int = 0, **named: Any) -> Plan:
        """Choose and build for one problem ahead of its calls.

        Takes arrays, or the axes of a problem (``M=..., N=...``) and the GPU's index. The result
        is called with arrays of that problem. Entries with host-side schedules will make them
        here, once for many layers.
        """
        problem, index = self._problem(args, named)
        device = device if index is None else index
        return Plan(self, problem, device)

    def explain(self, *args: Any, gpu: str | None = None, **named: Any) -> Explanation:
        """Which implementation and configuration would serve, and why; launches nothing.

        Takes arrays (``out=`` too), or the axes of a problem (``M=..., N=...``). With ``gpu``
        (``"b200"``) the answer is for that SKU and needs no GPU.
        """
        problem, index = self._problem(args, named, anywhere=gpu is not None)
        where = gpus.find(gpu) if gpu is not None else _gpu(index or 0)
        decision = choose(self.entry, problem, where, _choices(self.entry.name), self.pin)
        return Explanation.of(problem, where, decision)

    def forget(self) -> None:
        """Drop all launchers and choices."""
        with self._lock:
            self._ready.clear()
            self._loaded.clear()
            for recent in self._fresh + self._onto:
                recent.clear()

    def _place(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Put keyword arguments in their places; what names no input may be an axis."""
        placed: list[Any] = list(args)
        axes = []
        for name, value in named.items():
            position = self._positions.get(name)
            if position is None:
                axes.append((name, value))
            elif position < len(args):
                raise TypeError("given twice")
            else:
                placed += [None] * (position + 1 - len(placed))
                placed[position] = value
        return tuple(placed), tuple(axes)

    def _look_up(
        self, args: tuple[Any, ...], given: tuple[Any, ...], axes: tuple[Any, ...], fresh: bool
    ) -> tuple[Ready | None, list[int]]:
        """What is remembered for these arrays, by their full key; and their addresses."""
        count = len(args)
        if count < len(self._positions):
            given = (*args, *self._pads[count], *given[count:])
        key, pointers = _scans[type(given[0])](given)
        ready = self._ready.get((key, axes) if axes else key)
        if ready is not None and ready.matches and not axes and not any(x is None for x in args):
            recent = (self._fresh if fresh else self._onto)[count]
            if not any(ready is known for known in recent):
                recent.insert(0, ready)
                del recent[RECENT:]
        return ready, pointers

    def _refuse_overlap(self, placed: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        count = len(placed)
        refuse_overlap(self.entry, (*placed, *self._pads[count], *given[count:]))

    def _first_call(self, args: tuple[Any, ...], out: Any, named: Mapping[str, Any]) -> Any:
        inputs, axes = signature.arrange(self.entry, args, named)
        outs = signature.outputs(self.entry, out)
        if any(map(arrays.is_foreign, inputs + outs)):
            return adapters.through_dlpack(self, inputs, outs, axes)
        _meet_torch()
        if self.traced is not None and any(map(arrays.is_wrapper, inputs + outs)):
            return self.traced(*inputs, out=out, **axes)
        infos, library, problem, device = self._resolve(inputs, outs, axes)
        if not all(info.aligned for info in infos.values()):
            return adapters.with_copies(self, library, inputs, outs, axes)
        decision, launch = self._load(problem, device)
        ready = Ready.make(self.entry, problem, device, library, decision, launch, inputs, outs)
        key, _ = library.scan((*inputs, *outs))
        with self._lock:
            _remember(self._ready, (key, tuple(axes.items())) if axes else key, ready)
            _scans[type(inputs[0])] = library.scan
        return self(*inputs, out=out, **axes)

    def _resolve(
        self, inputs: Sequence[Any], outs: Sequence[Any], axes: Mapping[str, AxisValue]
    ) -> tuple[signature.Infos, arrays.Library, Problem, int]:
        """What the arrays are, whose, which problem they pose, on which GPU."""
        infos = signature.describe(self.entry, inputs, outs)
        device = signature.device_of(self.entry, infos)
        problem = signature.infer(self.entry, infos, axes)
        if self._only not in (None, problem):
            raise InvalidArgument(f"this plan is for {self._only}; these arrays are {problem}")
        return infos, arrays.library_of(inputs[0]), problem, device

    def _problem(
        self, args: tuple[Any, ...], named: dict[str, Any], anywhere: bool = False
    ) -> tuple[Problem, int | None]:
        """The problem that arrays pose, and their GPU; or that axes spell out."""
        if not args and all(isinstance(value, (int, float, str)) for value in named.values()):
            return self.entry.problem(**named), None
        out = named.pop("out", None)
        inputs, axes = signature.arrange(self.entry, args, named)
        infos = signature.describe(self.entry, inputs, signature.outputs(self.entry, out))
        index = None if anywhere else signature.device_of(self.entry, infos)
        return signature.infer(self.entry, infos, axes), index

    def _load(self, problem: Problem, device: int) -> tuple[Decision, Any]:
        """The decision for a problem and its launcher, built once."""
        with self._lock:
            if (problem, device) not in self._loaded:
                found = self._build(problem, device)
                _remember(self._loaded, (problem, device), found)
            return self._loaded[problem, device]

    def _build(self, problem: Problem, device: int) -> tuple[Decision, Any]:
        from kernelcat.runtime import launcher

        gpu, missing = _gpu(device), dict[str, str]()
        while True:
            choices = _choices(self.entry.name)
            decision = choose(self.entry, problem, gpu, choices, self.pin, missing)
            chosen = decision.implementation
            try:
                launch = launcher.load(chosen, problem, decision.config, gpu, device)
            except MissingDependency as error:  # its compiler is not there: the next rival serves
                if chosen.language in missing or self.pin.language is not None:
                    raise
                missing[chosen.language] = str(error)
                continue
            doubt = receipts.doubt(chosen)
            if doubt is not None:
                adapters.warn_once(f"{chosen.name} is unverified ({doubt})")
            return decision, launch


class Plan:
    """A problem whose implementation is chosen and built; call it with arrays of that problem."""

    def __init__(self, op: Op, problem: Problem, device: int) -> None:
        self._op = Op(op.entry, op.pin, only=problem)
        self.problem = problem
        self.device = device
        self.decision, _ = self._op._load(problem, device)

    def __repr__(self) -> str:
        chosen = self.decision
        return f"<kernelcat.Plan {self.problem}: {chosen.implementation.name} {chosen.config}>"

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        return self._op(*args, out=out, **named)

    def bind(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Bound:
        """:meth:`Op.bind` with this plan's choice."""
        return self._op.bind(*args, out=out, stream=stream, **named)


def pinned(name: str, key: str) -> Op:
    """The operator of :attr:`Pin.key`; how a compiled graph finds it."""
    return get(name, **json.loads(key)) if key else get(name)


def _meet_torch() -> None:
    """Once torch has been imported, make every operator a torch operator too."""
    global _is_compiling
    if "torch" in sys.modules:
        from kernelcat.call import torch_operators

        for op in list(_alive):
            op.traced = op.traced or torch_operators.register(op.entry, op.pin.key, pinned)
        _is_compiling = torch_operators.is_compiling


@cache
def _snapshot() -> Any:
    from kernelcat import store

    return store.snapshot()


def _choices(name: str) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _snapshot().choices(name)
    return found


@cache
def _gpu(index: int) -> gpus.Gpu:
    return gpus.detect(index)


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    if len(memory) >= REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = value
