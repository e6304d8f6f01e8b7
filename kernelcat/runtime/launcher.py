"""Launchers: a program's kernels are loaded once, then each call writes addresses and launches.

A *frame* holds the parameter blocks, launch configurations and workspaces that one call uses. A
call takes an idle frame of its stream, writes addresses into the frame's parameters, launches, and
returns the frame. So threads never share parameters, streams never share workspaces, and the fast
path takes no lock.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_uint64
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelcat import catalog
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, LaunchError, Unsupported
from kernelcat.runtime import code, driver, tensor_map
from kernelcat.runtime.code import Code
from kernelcat.runtime.workspaces import Zeros, separate

if TYPE_CHECKING:
    from kernelcat.runtime.gpu import Gpu

_NULL = Int64(0)

PER_THREAD_STREAM = 2
"""``cudaStreamPerThread``: one handle, which stands for another stream in every thread."""

_is_dependent = True  # whether new frames launch kernels before those they wait for have ended


def load(
    implementation: Implementation,
    problem: Problem,
    config: Config,
    gpu: Gpu,
    device: int,
    zeros: Zeros = separate,
    in_turn: bool = False,
) -> Launcher:
    """Build the program of ``config`` for ``problem``, and load it into GPU ``device``.

    ``zeros`` allocates workspaces: :func:`workspaces.separate` or :func:`workspaces.cut`. With
    ``in_turn`` no launch is a dependent one: each waits for the end of the one before.

    Raises
    ------
    CompileError
        A kernel does not compile.
    MissingDependency
        The language's compiler is not installed, or there is no GPU driver.
    InvalidArgument
        A parameter names no tensor or workspace, or the hardware cannot use a TMA descriptor.
    LaunchError
        The driver refused the machine code, or shared memory or a cluster that the kernel needs.
    Unsupported
        The entry is one of several ranks, which need a group.
    """
    entry = catalog.entry(implementation.entry)
    if entry.ranks:
        raise Unsupported(f"{entry.name} is for several ranks: load it by kernelcat.ranks.group")
    program = implementation.program(problem, config, gpu)
    if in_turn:
        program = program.in_turn()
    tensors, arch = entry.tensor_names, gpu.arch

    def find(step: Step) -> Code:
        return code.of_source(step.source, arch, device)

    return prepare(implementation.name, program, find, tensors, device, zeros)


def prepare(
    name: str,
    program: Program,
    find: Callable[[Step], Code],
    tensors: tuple[str, ...],
    device: int,
    zeros: Zeros = separate,
) -> Launcher:
    """The launcher of ``program``; ``find`` returns the loaded code of a step.

    ``tensors`` are the names of the entry's tensors. Raises ``InvalidArgument`` and
    ``LaunchError`` like :func:`load`.
    """
    workspaces = dict(program.workspaces)
    kernels = []
    try:
        for number, step in enumerate(program.steps):
            if prod(step.grid) == 0:
                continue
            kernel = _kernel(step, find(step), number)
            if kernel.scratch:
                workspaces |= kernel.scratch
            _check(kernel.params, tensors, workspaces)
            kernels.append(kernel)
    except (LaunchError, InvalidArgument) as error:
        raise type(error)(f"{name}: {error}") from error
    return Launcher(LoadedProgram(name, tuple(kernels), workspaces, tensors, device, zeros))


class Kernel(NamedTuple):
    """A loaded step. ``function`` is a CUfunction, or a callable for CuTe.

    ``scratch`` maps the name of an additional workspace to its bytes: Triton's global scratch.
    """

    function: Any
    params: tuple[Param, ...]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: tuple[int, int, int]
    programmatic: bool
    scratch: Mapping[str, int] = {}


class LoadedProgram(NamedTuple):
    """Loaded kernels, from which all frames of a launcher and of its clones are made.

    ``workspaces`` maps a name to bytes; ``tensors`` are the names of the entry's tensors in order;
    ``zeros`` is as for :func:`load`.
    """

    name: str
    kernels: tuple[Kernel, ...]
    workspaces: Mapping[str, int]
    tensors: tuple[str, ...]
    device: int
    zeros: Zeros = separate


def _kernel(step: Step, code: Code, number: int) -> Kernel:
    """Step ``number`` of a program, whose code is loaded."""
    if code.language == "cute":
        return Kernel(code.function, step.params, step.grid, 0, 0, (1, 1, 1), False)
    data, params, scratch = code.metadata, step.params, {}
    for kind in data.get("hidden_params", ()):
        if kind == "scratch":
            name = f"scratch of step {number}"
            scratch[name] = data.get("global_scratch_bytes", 0) * prod(step.grid)
            params = (*params, Pointer(name))
        else:
            params = (*params, _NULL)
    threads = 32 * data["num_warps"] if code.language == "triton" else step.block
    shared_bytes = data.get("shared_bytes", step.shared_bytes)
    x, y, z = data.get("cluster", step.cluster)
    code.allow(shared_bytes, (x, y, z), step.max_carveout)
    return Kernel(
        code.function, params, step.grid, threads, shared_bytes, (x, y, z), step.programmatic,
        scratch,
    )  # fmt: skip


def _check(
    params: tuple[Param, ...], tensors: tuple[str, ...], workspaces: Mapping[str, int]
) -> None:
    """Raise ``InvalidArgument`` for an unknown name, or an impossible TMA descriptor."""
    for param in params:
        kind = type(param)
        if kind is not Pointer and kind is not TensorMap:
            continue
        name = param.tensor  # type: ignore[union-attr]
        if name not in tensors and name not in workspaces:
            raise InvalidArgument(
                f"a parameter names {name!r}, which is neither a tensor of the entry nor "
                "a workspace"
            )
        if kind is TensorMap and (reason := tensor_map.why_not(param)):  # type: ignore[arg-type]
            raise InvalidArgument(f"{name}: {reason}")


@cache
def _words(count: int) -> tuple[type[ctypes.Array[c_uint64]], Callable[..., None]]:
    """An array of ``count`` words of 8 bytes, and the function that writes integers into one."""
    return c_uint64 * count, struct.Struct(f"{count}q").pack_into


_FLOAT, _BITS = struct.Struct("f"), struct.Struct("I")


@contextmanager
def without_dependent_launches() -> Iterator[None]:
    """Launchers that are made meanwhile start each kernel when the kernel before it has ended.

    To measure what dependent launches bring: ``griddepcontrol.wait`` then returns at once. Kernels
    of CuTe keep theirs, because their compiled host functions ask for them.
    """
    global _is_dependent
    before, _is_dependent = _is_dependent, False
    try:
        yield
    finally:
        _is_dependent = before


class Launcher:
    """Launches a program on a stream: ``launcher(pointers, stream)``.

    ``pointers`` are the addresses of ``tensors``: the entry's inputs, then its outputs. Calls from
    several threads, on several streams and under graph capture are safe. A captured graph continues
    to use the workspaces of the capture, so a capture needs a launcher of its own (:meth:`clone`).
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
            The driver refused the launch, or an earlier kernel failed.
        InvalidArgument
            The address of a tensor with a TMA descriptor is not a multiple of 16.
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
        """A launcher of the same kernels that shares no workspaces with this launcher."""
        return Launcher(self._program)

    def _new_frame(self, stream: int) -> Frame:
        key: Any = stream
        if (
            stream == PER_THREAD_STREAM
        ):  # the handle alone is no key: it is another stream per thread
            key = (stream, threading.get_ident())
        idle = self._idle.setdefault(key, [])
        return idle.pop() if idle else Frame(self._program, stream, key)

    def _recover(self, launch: Callable[[], int], status: int) -> None:
        """Repeat a failed launch in the right context, or raise ``LaunchError``.

        Only a thread without a context, or with another GPU's context, gets a second attempt.
        """
        program, cuda = self._program, driver.opened()
        if status in (driver.INVALID_CONTEXT, driver.INVALID_HANDLE):
            cuda.adopt(program.device)
            with cuda.using(program.device):
                status = launch()
        if status:
            raise LaunchError(f"{program.name}: {cuda.describe(status)}")


class Frame:
    """Parameter blocks, launch configurations and workspaces that one call uses at a time.

    Each of ``launches`` launches one kernel and returns a CUresult. ``_slots`` holds one address
    per tensor, and the parameter blocks of all kernels point into ``_slots``, so :meth:`aim`
    writes each address once.
    """

    __slots__ = ("_alive", "_maps", "_memory", "_program", "_slots", "_values", "key", "launches",
                 "pointers")  # fmt: skip

    def __init__(self, program: LoadedProgram, stream: int, key: Any) -> None:
        self.key = key
        self.pointers: tuple[int, ...] | None = None
        self._program = program
        self._slots = (c_uint64 * len(program.tensors))()
        # (parameter block, position, descriptors, index of the tensor), rewritten by aim
        self._maps: list[tuple[Any, int, tensor_map.Descriptors, int]] = []
        # (argument list of a CuTe kernel, position, index of the tensor), rewritten by aim
        self._values: list[tuple[list[Any], int, int]] = []
        self._alive: list[Any] = []
        spaces, self._memory = (
            program.zeros(program.workspaces, program.device) if program.workspaces else ({}, ())
        )
        self.launches = tuple([self._launch(k, stream, spaces) for k in program.kernels])

    def aim(self, pointers: Sequence[int]) -> None:
        """Write the addresses ``pointers`` into the parameter blocks."""
        self.pointers = None  # until all are written, in case encoding a descriptor fails
        self._slots[:] = pointers  # type: ignore[call-overload]
        for params, position, descriptors, tensor in self._maps:
            params[position] = descriptors.at(pointers[tensor])
        for values, position, tensor in self._values:
            values[position] = pointers[tensor]
        self.pointers = tuple(pointers)

    def _launch(self, k: Kernel, stream: int, spaces: Mapping[str, int]) -> Callable[[], int]:
        """A function that launches ``k`` and returns a CUresult; ``spaces`` are workspaces."""
        if callable(k.function):
            return self._host_call(k, stream, spaces)
        config = driver.launch_config(
            k.grid, k.threads, k.shared_bytes, stream, k.cluster, k.programmatic and _is_dependent
        )
        params = self._block(k.params, spaces)
        return partial(driver.opened().launch, ctypes.byref(config), k.function, params, None)

    def _block(self, params: tuple[Param, ...], spaces: Mapping[str, int]) -> Any:
        """``void *kernelParams[]``: the host addresses of the parameters' values."""
        # Scalars stand in slots of 8 bytes: the machine is little-endian, so a kernel that reads
        # fewer bytes finds them at the same address.
        words, pack = _words(len(params))
        scalars, block = words(), words()
        address, first_slot = ctypes.addressof(scalars), ctypes.addressof(self._slots)
        tensors = self._program.tensors
        values: list[int] = []
        addresses: list[int] = []
        maps: list[tuple[int, TensorMap]] = []
        for position, param in enumerate(params):
            value, at = 0, address + 8 * position
            if isinstance(param, Pointer):
                if (space := spaces.get(param.tensor)) is not None:
                    value = space
                else:
                    at = first_slot + 8 * tensors.index(param.tensor)
            elif isinstance(param, TensorMap):
                maps.append((position, param))
            elif isinstance(param, Float32):
                value = _BITS.unpack(_FLOAT.pack(param.value))[0]
            else:
                value = param.value
            values.append(value)
            addresses.append(at)
        pack(scalars, 0, *values)
        pack(block, 0, *addresses)
        for position, each in maps:
            descriptors = tensor_map.Descriptors(each)
            if (space := spaces.get(each.tensor)) is not None:
                block[position] = self._keep(descriptors).at(space)
            else:
                self._maps.append((block, position, descriptors, tensors.index(each.tensor)))
        self._alive.append(scalars)
        return block

    def _host_call(self, k: Kernel, stream: int, spaces: Mapping[str, int]) -> Callable[[], int]:
        """A function that launches a CuTe kernel through its compiled host function.

        The host function takes values and the stream, and raises where the launch fails. In a
        thread without a CUDA context the call is repeated with one.
        """
        values: list[Any] = []
        for position, param in enumerate(k.params):
            if isinstance(param, TensorMap):
                raise InvalidArgument("CuTe kernels make their TMA descriptors themselves")
            if not isinstance(param, Pointer):
                values.append(param.value)
            elif param.tensor in spaces:
                values.append(spaces[param.tensor])
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
