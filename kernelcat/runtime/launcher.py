"""From a program to a fast callable: load its kernels once, then only rewrite pointers and launch.

A *frame* is all that one call in flight on one stream needs: parameter blocks, launch
configurations, workspaces. A call takes an idle frame of its stream, aims it at its pointers,
launches, and puts it back. So threads never share parameters, streams never share workspaces,
and the hot path takes no lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from kernelcat import catalog
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, LaunchError
from kernelcat.jit import Artifact, build
from kernelcat.runtime import driver, tensor_map

if TYPE_CHECKING:
    from kernelcat.runtime.gpu import Gpu

PER_THREAD_STREAM = 2
"""``cudaStreamPerThread``: one handle, but a stream of its own in every thread."""

_DEFAULT_SHARED_BYTES = 48 << 10
_PORTABLE_CLUSTER = 8
_VALUES: dict[type, Callable[[Any], Any]] = {Int32: c_int32, Int64: c_int64, Float32: c_float}


def load(
    implementation: Implementation, problem: Problem, config: Config, gpu: Gpu, device: int
) -> Launcher:
    """Build what ``config`` means for ``problem``, load it into GPU ``device``, and prepare it.

    Raises
    ------
    CompileError, MissingDependency
        From the language's compiler; ``MissingDependency`` also without a GPU driver.
    InvalidArgument
        A parameter that does not exist, or a TMA descriptor that the hardware cannot take.
    LaunchError
        The driver refused the machine code or its resources.
    """
    program = implementation.program(problem, config, gpu)
    artifacts = [build(step.source, gpu.arch) for step in program.steps]
    tensors = tuple(tensor.name for tensor in catalog.entry(implementation.entry).tensors)
    return prepare(implementation.name, program, artifacts, tensors, device)


def prepare(
    name: str,
    program: Program,
    artifacts: Sequence[Artifact],
    tensors: tuple[str, ...],
    device: int,
) -> Launcher:
    """The launcher of ``program``, whose steps were compiled to ``artifacts``."""
    workspaces = dict(program.workspaces)
    kernels = []
    try:
        for number, (step, artifact) in enumerate(zip(program.steps, artifacts, strict=True)):
            if prod(step.grid) == 0:
                continue
            kernel = _kernel(step, artifact, number, device)
            workspaces |= kernel.scratch
            _check(kernel.params, {*tensors, *workspaces})
            kernels.append(kernel)
    except (LaunchError, InvalidArgument) as error:
        raise type(error)(f"{name}: {error}") from error
    return Launcher(LoadedProgram(name, tuple(kernels), workspaces, tensors, device))


@dataclass(frozen=True)
class Kernel:
    """A step ready to launch. ``function`` is a CUfunction, or a callable for CuTe.

    ``scratch`` is memory that Triton asks for, as a workspace of its own.
    """

    function: Any
    params: tuple[Param, ...]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: tuple[int, int, int]
    programmatic: bool
    scratch: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedProgram:
    """What every frame of a launcher, and of its clones, is made from."""

    name: str
    kernels: tuple[Kernel, ...]
    workspaces: Mapping[str, int]
    tensors: tuple[str, ...]
    device: int


def _kernel(step: Step, artifact: Artifact, number: int, device: int) -> Kernel:
    if artifact.language == "cute":
        from kernelcat.jit import cute

        with driver.opened().using(device):
            call = cute.load(artifact)
        return Kernel(call, step.params, step.grid, 0, 0, (1, 1, 1), False)
    told = artifact.metadata
    scratch = {f"scratch of step {number}": told.get("global_scratch_bytes", 0) * prod(step.grid)}
    hidden: dict[str, Param] = {"scratch": Pointer(*scratch), "null": Int64(0)}
    params = step.params + tuple(hidden[kind] for kind in told.get("hidden_params", ()))
    threads = 32 * told["num_warps"] if artifact.language == "triton" else step.block
    shared_bytes = told.get("shared_bytes", step.shared_bytes)
    x, y, z = told.get("cluster", step.cluster)
    kernel = _function(artifact.code, artifact.kernel, device)
    cuda = driver.opened()
    if shared_bytes + told.get("static_shared_bytes", 0) > _DEFAULT_SHARED_BYTES:
        cuda.raise_limit(kernel, driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, device)
    if x * y * z > _PORTABLE_CLUSTER:
        cuda.raise_limit(kernel, driver.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, device)
    return Kernel(
        kernel, params, step.grid, threads, shared_bytes, (x, y, z), step.programmatic, scratch
    )


_functions: dict[tuple[bytes, str, int], c_void_p] = {}


def _function(code: bytes, name: str, device: int) -> c_void_p:
    key = (code, name, device)
    if key not in _functions:
        _functions[key] = driver.opened().function(code, name, device)
    return _functions[key]


def _check(params: tuple[Param, ...], names: set[str]) -> None:
    for param in params:
        if isinstance(param, Pointer | TensorMap) and param.tensor not in names:
            raise InvalidArgument(
                f"a parameter names {param.tensor!r}, which is neither a tensor of the entry nor "
                "a workspace"
            )
        if isinstance(param, TensorMap) and (reason := tensor_map.why_not(param)):
            raise InvalidArgument(f"{param.tensor}: {reason}")


class Launcher:
    """Launches a program on a stream: ``launcher(pointers, stream)``.

    ``tensors`` names what ``pointers`` are, in order: the entry's inputs, then its outputs.
    Calls from several threads, on several streams, and under graph capture are safe. A captured
    graph goes on using the workspaces of its capture, so whoever captures takes a ``clone()``.
    """

    __slots__ = ("_idle", "_program", "tensors")

    def __init__(self, program: LoadedProgram) -> None:
        self._program = program
        self._idle: dict[Any, list[Frame]] = {}
        self.tensors = program.tensors

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Launch on the tensors at ``pointers`` (addresses; 0 for an absent optional one).

        ``stream`` is a CUstream handle of the launcher's device; 0 is the default stream.

        Raises
        ------
        LaunchError
            The driver refused, or an earlier kernel failed.
        InvalidArgument
            An address that a TMA descriptor cannot start at (no multiple of 16).
        """
        try:
            frame = self._idle[stream].pop()
        except (KeyError, IndexError):
            frame = self._new_frame(stream)
        if frame.pointers != pointers:
            frame.aim(pointers)
        for launch in frame.launches:
            status = launch()
            if status:
                self._recover(launch, status)
        self._idle[frame.key].append(frame)

    def clone(self) -> Launcher:
        """The same kernels with workspaces of their own."""
        return Launcher(self._program)

    def _new_frame(self, stream: int) -> Frame:
        key: Any = stream
        if stream == PER_THREAD_STREAM:  # the bare handle never becomes a key
            key = (stream, threading.get_ident())
        idle = self._idle.setdefault(key, [])
        return idle.pop() if idle else Frame(self._program, stream, key)

    def _recover(self, launch: Callable[[], int], status: int) -> None:
        """Try once more in the right context, where the thread had none or another device's."""
        program, cuda = self._program, driver.opened()
        if status in (driver.INVALID_CONTEXT, driver.INVALID_HANDLE):
            cuda.adopt(program.device)
            with cuda.using(program.device):
                status = launch()
        if status:
            raise LaunchError(f"{program.name}: {cuda.describe(status)}")


class Frame:
    """Parameter blocks, launch configurations and workspaces of one call in flight.

    ``launches`` return a CUresult. Addresses lie in ``_slots``, one a tensor, and the parameter
    arrays of all kernels point there, so aiming writes each address once.
    """

    __slots__ = ("_alive", "_maps", "_program", "_slots", "_values", "key", "launches", "pointers")

    def __init__(self, program: LoadedProgram, stream: int, key: Any) -> None:
        self.key = key
        self.pointers: tuple[int, ...] | None = None
        self._program = program
        self._slots = (c_uint64 * len(program.tensors))()
        self._maps: list[tuple[Any, int, tensor_map.Descriptors, int]] = []
        self._values: list[tuple[list[Any], int, int]] = []
        self._alive: list[Any] = []
        spaces = {name: Memory(size, program.device) for name, size in program.workspaces.items()}
        self.launches = tuple(self._launch(k, stream, spaces) for k in program.kernels)
        self._alive += spaces.values()

    def aim(self, pointers: Sequence[int]) -> None:
        """Write ``pointers`` into the parameter blocks."""
        self.pointers = None
        self._slots[:] = pointers  # type: ignore[call-overload]
        for params, position, descriptors, tensor in self._maps:
            params[position] = descriptors.at(pointers[tensor])
        for values, position, tensor in self._values:
            values[position] = pointers[tensor]
        self.pointers = tuple(pointers)

    def _launch(self, k: Kernel, stream: int, spaces: Mapping[str, Memory]) -> Callable[[], int]:
        if callable(k.function):
            return self._host_call(k, stream, spaces)
        config = driver.launch_config(
            k.grid, k.threads, k.shared_bytes, stream, k.cluster, k.programmatic
        )
        params = self._block(k.params, spaces)
        return partial(driver.opened().launch, ctypes.byref(config), k.function, params, None)

    def _block(self, params: tuple[Param, ...], spaces: Mapping[str, Memory]) -> Any:
        """``void *kernelParams[]``: the host addresses of the parameters' values."""
        block = (c_void_p * len(params))()
        for position, param in enumerate(params):
            if isinstance(param, TensorMap | Pointer) and param.tensor in spaces:
                pointer = spaces[param.tensor].pointer
                if isinstance(param, TensorMap):
                    block[position] = self._keep(tensor_map.Descriptors(param)).at(pointer)
                else:
                    block[position] = ctypes.addressof(self._keep(c_uint64(pointer)))
            elif isinstance(param, TensorMap):
                tensor = self._program.tensors.index(param.tensor)
                self._maps.append((block, position, tensor_map.Descriptors(param), tensor))
            elif isinstance(param, Pointer):
                slot = self._program.tensors.index(param.tensor)
                block[position] = ctypes.addressof(self._slots) + 8 * slot
            else:
                value = _VALUES[type(param)](param.value)
                block[position] = ctypes.addressof(self._keep(value))
        return block

    def _host_call(self, k: Kernel, stream: int, spaces: Mapping[str, Memory]) -> Callable[[], int]:
        """A CuTe kernel: its host code takes the values and the stream, and raises by itself."""
        values: list[Any] = []
        for position, param in enumerate(k.params):
            if isinstance(param, TensorMap):
                raise InvalidArgument("CuTe kernels make their TMA descriptors themselves")
            if not isinstance(param, Pointer):
                values.append(param.value)
            elif param.tensor in spaces:
                values.append(spaces[param.tensor].pointer)
            else:
                self._values.append((values, position, self._program.tensors.index(param.tensor)))
                values.append(0)

        name, device = self._program.name, self._program.device

        def call() -> int:
            try:
                k.function(*values, stream)
            except Exception as error:
                if not driver.opened().adopt(device):
                    raise LaunchError(f"{name}: {error}") from error
                k.function(*values, stream)
            return 0

        return call

    def _keep(self, value: Any) -> Any:
        self._alive.append(value)
        return value


class Memory:
    """Zeroed device memory, freed with its last reference; no memory has address 0."""

    __slots__ = ("_device", "pointer")

    def __init__(self, size: int, device: int) -> None:
        self._device = device
        self.pointer = driver.opened().allocate(size, device) if size else 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            try:  # noqa: SIM105 (at exit a global may be None, even `suppress`)
                driver.opened().free(self.pointer, self._device)
            except Exception:
                pass  # the driver or this module is gone, and the memory with it
