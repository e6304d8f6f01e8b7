"""Operators: from arguments to a problem, a configuration and a launch.

The first call with a new signature (types, shapes, strides, element types, device) takes the slow
path, which checks the arguments, chooses and builds a kernel, and remembers a launcher under a key
that is cheap to compute. Every later call is one dictionary lookup. Misses (calls of problems that
nobody has measured on this GPU) are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakSet

from kernelcat.call import adapters, arrays, documentation, evidence, fast_path, signature
from kernelcat.call import debugging as debugging  # imported for its environment variable
from kernelcat.call import recording as recording  # likewise
from kernelcat.call.building import build
from kernelcat.call.choice import Decision, Pin
from kernelcat.call.fast_path import Bound, FastCall, Launch
from kernelcat.call.locking import ruling
from kernelcat.call.plan import Plan
from kernelcat.call.resizing import Families, Resized
from kernelcat.call.sharing import Choices
from kernelcat.call.wrapping import listen, wrapped
from kernelcat.catalog.axes import plain
from kernelcat.catalog.spec import AxisValue, Entry, Problem
from kernelcat.errors import InvalidArgument, short
from kernelcat.importing import LOCK, is_imported
from kernelcat.report.explain import Explanation
from kernelcat.runtime import gpu as gpus

MAX_REMEMBERED = 1024
"""Signatures, and launchers, that one operator remembers; the oldest is forgotten first."""

MAX_RECENT = 8
"""Signatures that a call tries one by one before it computes the full key of its arguments."""

_is_compiling: Callable[[], bool] = bool  # torch's own check replaces bool once torch is imported
_scans: dict[type, arrays.Scan] = {}
_alive: WeakSet[Op] = WeakSet()  # read and changed by holders of LOCK


class Op:
    """An entry of the catalog as a function on arrays.

    ``op(a, b, out=d)`` takes the entry's inputs in order or by name (optional inputs may be left
    out): torch, CuPy or other DLPack arrays, all on one GPU. The call returns the output, or a
    tuple of several outputs, as arrays of the caller's library, with None for absent optional
    outputs. Where the entry updates an output, all outputs must be passed as ``out``. Kernels run
    on the caller's current stream. An array whose address is not a multiple of 16 bytes is copied
    first, with one warning.

    With arrays of other DLPack producers (JAX) the call returns when the kernel has finished,
    because the producer cannot know that a kernel still reads its memory.

    Raises
    ------
    InvalidArgument
        An argument does not fit the specification; the message is one line.
    Unsupported
        No implementation serves this problem on this GPU; the message has the reasons.
    MissingDependency
        There is no GPU driver, or a needed compiler is not installed.
    """

    __signature__ = documentation.OfEntry(documentation.signature)

    def __init__(self, entry: Entry, pin: Pin, only: Problem | None = None, spare: int = 0) -> None:
        self.entry = entry
        self.pin = pin
        self._only = only
        self._spare = spare
        self._leaving: dict[int, Op] = {}
        self._single = len(entry.outputs) == 1
        # Each of the next four has an item for every possible number of passed inputs.
        num_absent = range(len(entry.inputs), -1, -1)
        self._pads = [(None,) * n for n in num_absent]
        self._zeros = [(0,) * n for n in num_absent]
        self._fresh: list[list[Any]] = [[] for _ in num_absent]  # recent calls without out=
        self._onto: list[list[Any]] = [[] for _ in num_absent]  # recent calls with out=
        self._fast_calls: dict[Any, FastCall] = {}
        self._loaded: dict[tuple[Problem, int], tuple[Decision, Any]] = {}
        self._families = Families(entry)
        self._choices: Choices | None = None
        self._lock = threading.RLock()
        self._forgotten = 0  # how often fast calls were forgotten
        self.traced: Callable[..., Any] | None = None  # serves torch.compile and wrapper tensors
        self._positions = {tensor.name: i for i, tensor in enumerate(entry.inputs)}
        with LOCK:
            _alive.add(self)
        listen(self)

    def __repr__(self) -> str:
        return f"<kernelcat.Op {self.entry.name}{self.pin.key}>"

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        if _is_compiling():
            return self.traced(*args, out=out, **named)  # type: ignore[misc]
        call: FastCall | None = None
        key: arrays.Key | None = None
        placed: tuple[Any, ...] = args
        axes: tuple[Any, ...] = ()
        try:
            if named:
                placed, axes = self._place(args, named)
            operands = (
                placed if out is None else (*placed, out) if self._single else (*placed, *out)
            )
            if not axes:
                count = len(placed)
                for recent in (self._fresh if out is None else self._onto)[count]:
                    if recent.matches(*operands):
                        pointers = recent.addresses(operands)
                        pointers[count:count] = self._zeros[count]
                        call = recent
                        break
            if call is None:
                count = len(placed)
                every = self._padded(operands, count)
                first = every[0] if every[0] is not None else _first(every)
                key, pointers = _scans[type(first)](every)
                call = self._look_up(key, every, axes, count, out is None)
        except fast_path.EXPECTED_ERRORS as error:  # the slow path makes the error message, if any
            call = None
            fast_path.count_slow(type(error).__name__)
        if call is None:
            if key is not None and (run := self._resized(key, pointers, every, axes)):
                return run(out)
            return self._first_call(args, out, named)
        if call.allocate is not None:
            out, addresses = call.allocate()
            pointers += addresses
        elif call.overlaps(pointers):
            fast_path.refuse_overlap(self.entry, self._padded(operands, len(placed)))
        call.launch(tuple(pointers), call.stream(call.device))
        return out

    def bind(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Bound:
        """A callable without arguments that runs on these arrays, with nothing left to look up.

        Each call launches on the same memory and returns the output. It launches on the caller's
        current stream, or always on ``stream``. The callable has its own workspaces and is safe
        inside CUDA graph capture. It keeps the arrays alive; whoever captures a call in a graph
        must keep the callable alive as long as the graph is replayed. Raises ``InvalidArgument``
        as a call does, and for an array whose address is not a multiple of 16 bytes.
        """
        inputs, axes = signature.arrange(self.entry, args, named)
        outs = signature.outputs(self.entry, out)
        infos, library, problem, device = self._resolve(inputs, outs, axes)
        for tensor in self.entry.tensors:
            if tensor.name in infos and not infos[tensor.name].aligned:
                name = signature.label(self.entry, tensor)
                raise InvalidArgument(
                    f"{self.entry.name}: bind needs arrays at multiples of 16 bytes; "
                    f"{name} is not at one: bind a copy of {name}"
                )
        decision, launch = self._load(problem, device)
        if not outs:
            out, _ = fast_path.allocator(self.entry, problem, device, library)()
            outs = signature.outputs(self.entry, out)
        operands = (*inputs, *outs)
        fast_path.refuse_overlap(self.entry, operands)
        if decision.missed:
            fast_path.count_miss(problem)
        current = library.stream() if stream is None else arrays.fixed_stream(stream)
        wrap = partial(self._wrap, problem, device, decision)
        pointers = library.scan(operands)[1]
        return Bound(launch.clone(), wrap, device, current, pointers, operands, out)

    def plan(self, *args: Any, device: int = 0, **named: Any) -> Plan:
        """The choice for one problem, made and built ahead of calls.

        Takes arrays, or the axes of a problem as :meth:`Entry.described` does (``M=..., N=...``)
        and the index of a GPU. The result is called with arrays of that problem. Entries with
        host-side schedules will make their schedules here, once for many layers.
        """
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise InvalidArgument(f"device={short(device)} must be the index of a GPU")
        problem, index = self._problem(args, named)
        device = device if index is None else index
        return Plan(Op(self.entry, self.pin, only=problem), problem, device)

    def explain(self, *args: Any, gpu: str | None = None, **named: Any) -> Explanation:
        """The implementation and configuration that would serve, and why; launches nothing.

        Takes arrays (``out=`` too), or the axes of a problem as :meth:`Entry.described` does. With
        ``gpu`` (``"b200"``) the explanation is for that SKU and no GPU is needed.
        """
        problem, index = self._problem(args, named, anywhere=gpu is not None)
        target = gpus.find(gpu) if gpu is not None else _gpu(index or 0)
        says = ruling(problem, target, self.pin)
        decision = self._known().choose(problem, target, ruling=says)
        return Explanation.of(problem, target, decision)

    def launchers(self) -> list[Any]:
        """The launchers that this operator remembers, with their workspaces.

        An operator forgets old launchers. Who captures calls in a CUDA graph keeps this list as
        long as the graph is replayed.
        """
        with self._lock:
            own = [launcher for _, launcher in self._loaded.values()]
            return own + [each for op in self._leaving.values() for each in op.launchers()]

    def leaving(self, sms: int) -> Op:
        """This operator with kernels that are chosen and sized for ``sms`` SMs fewer.

        Persistent kernels then have no thread block for these SMs, which are free for what runs
        beside them.
        """
        with self._lock:
            op = self._leaving.get(sms)
            if op is None:
                op = self._leaving[sms] = Op(self.entry, self.pin, spare=sms)
            return op

    def forget(self) -> None:
        """Forget all launchers and choices."""
        with self._lock:
            for op in self._leaving.values():
                op.forget()
            self._loaded.clear()
            self._choices = None
            self.rewrap()

    def rewrap(self) -> None:
        """Forget fast calls, and keep launchers: a watcher of calls has started or stopped."""
        with self._lock:
            self._forgotten += 1
            self._fast_calls.clear()
            for recent in self._fresh + self._onto:
                recent.clear()

    def _place(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Inputs in order, and pairs of an axis and its value: keywords that name no input."""
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

    def _padded(self, operands: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        """``operands`` with None for each input that was left out; ``count`` were passed."""
        if count >= len(self._positions):
            return operands
        return (*operands[:count], *self._pads[count], *operands[count:])

    def _look_up(
        self,
        key: arrays.Key,
        operands: tuple[Any, ...],
        axes: tuple[Any, ...],
        count: int,
        fresh: bool,
    ) -> FastCall | None:
        """What is remembered for ``operands``: inputs, then outputs, with this ``key``.

        ``count`` inputs were passed; the call is ``fresh`` where it allocates outputs.
        """
        forgotten = self._forgotten
        call = self._fast_calls.get((key, axes) if axes else key)
        if call is None or axes or any(x is None for x in operands[:count]):
            return call
        recent = (self._fresh if fresh else self._onto)[count]
        if not any(call is other for other in recent) and call.learn(operands):
            recent.insert(0, call)
            del recent[MAX_RECENT:]
            if forgotten != self._forgotten:  # in another thread: the call is forgotten too
                recent.clear()
        return call

    def _first_call(self, args: tuple[Any, ...], out: Any, named: Mapping[str, Any]) -> Any:
        inputs, axes = signature.arrange(self.entry, args, named)
        outs = signature.outputs(self.entry, out)
        if any(map(arrays.is_foreign, inputs + outs)):
            return adapters.call_through_dlpack(self, inputs, outs, axes)
        register_with_torch()
        if self.traced is not None and any(map(arrays.is_wrapper, inputs + outs)):
            return self.traced(*inputs, out=out, **axes)
        infos, library, problem, device = self._resolve(inputs, outs, axes)
        if not all(info.aligned for info in infos.values()):
            return adapters.call_with_copies(self, library, inputs, outs, axes)
        _scans[type(_first(inputs))] = library.scan
        operands = (*inputs, *outs)
        key, pointers = library.scan(operands)
        if self._only is None:
            with suppress(InvalidArgument):
                self._families.add(key, axes, library, problem, device)
        found = Resized(problem, device, library)
        return self._prepare(found, key, pointers, operands, tuple(axes.items()))(out)

    def _prepare(
        self,
        call_of: Resized,
        key: arrays.Key,
        pointers: list[int],
        operands: tuple[Any, ...],
        axes: tuple[tuple[str, AxisValue], ...],
    ) -> Callable[[Any], Any]:
        """Remember how calls with the signature of these arrays and keywords run: ``run(out)``.

        ``key`` and ``pointers`` are what ``scan`` returns for ``operands``: all inputs, and the
        outputs that are passed.
        """
        problem, device, library = call_of
        count = len(self._positions)
        inputs, outs = operands[:count], operands[count:]
        decision, launch = self._load(problem, device)
        with self._lock:
            launch = self._wrap(problem, device, decision, launch)
            call = FastCall.make(
                self.entry, problem, device, library, decision, launch, inputs, outs
            )
            _remember(self._fast_calls, (key, axes) if axes else key, call)

        def run(out: Any) -> Any:
            if call.allocate is not None:
                out, addresses = call.allocate()
                pointers.extend(addresses)
            elif call.overlaps(pointers):
                fast_path.refuse_overlap(self.entry, operands)
            call.launch(tuple(pointers), call.stream(call.device))
            return out

        return run

    def _resized(
        self,
        key: arrays.Key,
        pointers: list[int],
        operands: tuple[Any, ...],
        axes: tuple[tuple[str, AxisValue], ...],
    ) -> Callable[[Any], Any] | None:
        """:meth:`_prepare` where an earlier call differs from this call in sizes only; or None."""
        try:
            found = self._families.find(key, axes)
        except fast_path.EXPECTED_ERRORS:
            return None
        return found and self._prepare(found, key, pointers, operands, axes)

    def _resolve(
        self, inputs: Sequence[Any], outs: Sequence[Any], axes: Mapping[str, AxisValue]
    ) -> tuple[signature.Infos, arrays.Library, Problem, int]:
        """Descriptions of the arrays, their library, their problem and the index of their GPU."""
        infos = signature.describe(self.entry, inputs, outs)
        device = signature.device_of(self.entry, infos)
        problem = signature.infer(self.entry, infos, axes)
        if self._only not in (None, problem):
            raise InvalidArgument(f"this plan is for {self._only}; these arrays are {problem}")
        return infos, arrays.library_of(_first(inputs)), problem, device

    def _problem(
        self, args: tuple[Any, ...], named: dict[str, Any], anywhere: bool = False
    ) -> tuple[Problem, int | None]:
        """The problem of arrays or of axes; also the arrays' GPU, unless they may be anywhere."""
        named = {name: plain(value) for name, value in named.items()}
        is_array = {name: hasattr(value, "shape") for name, value in named.items()}
        if not args and not any(is_array[name] for name in self._positions.keys() & named.keys()):
            return self.entry.described(**named), None
        out = named.pop("out", None)
        inputs, axes = signature.arrange(self.entry, args, named)
        infos = signature.describe(self.entry, inputs, signature.outputs(self.entry, out))
        index = None if anywhere else signature.device_of(self.entry, infos)
        return signature.infer(self.entry, infos, axes), index

    def _load(self, problem: Problem, device: int) -> tuple[Decision, Any]:
        """The decision for a problem and its launcher, made once."""
        with self._lock:
            loaded = self._loaded.get((problem, device))
            if loaded is None:
                loaded = self._build(problem, device)
                _remember(self._loaded, (problem, device), loaded)
            return loaded

    def _wrap(self, problem: Problem, device: int, decision: Decision, launch: Launch) -> Launch:
        """``launch`` as it is while nothing watches calls, else a function that does more."""
        return wrapped(launch, problem, _gpu(device), device, decision)

    def _build(self, problem: Problem, device: int) -> tuple[Decision, Any]:
        from kernelcat.runtime import launcher, workspaces

        load, gpu = partial(launcher.load, device=device, zeros=workspaces.cut), _gpu(device)
        if self._spare:  # thread blocks that wait for a launch would take the SMs that it leaves
            gpu = replace(gpu, sms=max(gpu.sms - self._spare, 1))
            load = partial(load, in_turn=True)
        return build(self._known(), problem, gpu, load, ruling(problem, gpu, self.pin))

    def _known(self) -> Choices:
        """What is known of this entry, and the choices made so far."""
        known = self._choices
        if known is None:
            rows, refuted = evidence.of_entry(self.entry.name)
            known = self._choices = Choices(self.entry, self.pin, rows, refuted)
        return known


Op.__doc__ = documentation.OfEntry(documentation.docstring, Op.__doc__)  # type: ignore[assignment]


def register_with_torch() -> None:
    """Register every operator as a torch operator, once torch has been imported."""
    global _is_compiling
    if is_imported("torch"):
        with LOCK:
            from kernelcat.call import registry, torch_operators

            for op in list(_alive):
                op.traced = op.traced or torch_operators.register(
                    op.entry, op.pin.key, registry.pinned
                )
            _is_compiling = torch_operators.is_compiling


@cache
def _gpu(index: int) -> gpus.Gpu:
    return gpus.detect(index)


def _first(operands: Sequence[Any]) -> Any:
    """The first operand that is not None; None without any."""
    return next((operand for operand in operands if operand is not None), None)


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an item, and drop the oldest of ``MAX_REMEMBERED`` items."""
    if len(memory) >= MAX_REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = value
