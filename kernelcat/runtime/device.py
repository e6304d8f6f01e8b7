"""Devices that run kernels: a GPU with CuPy arrays, or Triton's interpreter with NumPy arrays.

The checker, the fuzzer and the tuner use the protocol :class:`Device` and work on every device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.runtime import gpu

if TYPE_CHECKING:
    from kernelcat.runtime.launcher import Launcher

Arrays = Mapping[str, Any]
Run = Callable[[], None]
Bind = Callable[[Arrays], Run]


class Device(Protocol):
    """A device that holds arrays and runs implementations.

    ``xp`` is the array module (CuPy or NumPy). ``load`` builds a configuration and returns
    ``bind(arrays) -> run``: ``arrays`` are storage arrays by tensor name (absent optional
    tensors are left out), and ``run()`` launches once, asynchronously on a GPU.
    """

    @property
    def gpu(self) -> gpu.Gpu: ...

    @property
    def xp(self) -> Any: ...

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Bind: ...

    def synchronize(self) -> None: ...


class CudaDevice:
    """An NVIDIA GPU. Arrays are CuPy's; kernels are launched on CuPy's current stream.

    Raises
    ------
    MissingDependency
        CuPy is not installed, or there is no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            import cupy
        except ModuleNotFoundError as error:
            raise MissingDependency(
                "checking and tuning on a GPU need CuPy: pip install 'kernelcat[cupy]'"
            ) from error
        self.xp = cupy
        self.index = index
        self.gpu = gpu.detect(index)
        cupy.cuda.Device(index).use()

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Bind:
        from kernelcat.runtime import launcher

        return self.bind(launcher.load(implementation, problem, config, self.gpu, self.index))

    def bind(self, launch: Launcher) -> Bind:
        """Binds a launcher to arrays, on CuPy's current stream."""
        names = launch.tensors
        current_stream = self.xp.cuda.get_current_stream

        def bind(arrays: Arrays) -> Run:
            pointers = tuple(arrays[n].data.ptr if n in arrays else 0 for n in names)
            return lambda: launch(pointers, current_stream().ptr)

        return bind

    @staticmethod
    def address_of(array: Any) -> int:
        """Where ``array`` begins."""
        return int(array.data.ptr)

    def bytes_at(self, address: int, size: int, owner: object) -> Any:
        """The ``size`` bytes at ``address`` as an array that keeps ``owner`` alive."""
        memory = self.xp.cuda.UnownedMemory(address, size, owner, self.index)
        return self.xp.ndarray(size, "uint8", self.xp.cuda.MemoryPointer(memory, 0))

    def synchronize(self) -> None:
        self.xp.cuda.runtime.deviceSynchronize()


class MirroredDevice:
    """An NVIDIA GPU with NumPy arrays: every run copies the arrays to the GPU and back.

    Every array gets an allocation of its exact size, and no kernels but the catalog's run. So
    compute-sanitizer finds every access out of bounds, and all of its findings are the catalog's.
    """

    def __init__(self, index: int = 0) -> None:
        import numpy

        self.cuda = CudaDevice(index)
        self.cuda.xp.cuda.set_allocator(None)  # no memory pool: an allocation for each array
        self.xp: Any = numpy
        self.gpu = self.cuda.gpu

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Bind:
        bind = self.cuda.load(implementation, problem, config)

        def bind_mirrored(arrays: Arrays) -> Run:
            def run() -> None:
                spans = {name: self.span(array) for name, array in arrays.items()}
                copies = {name: self.upload(span) for name, span in spans.items()}
                bind(copies)()
                self.synchronize()
                for name, span in spans.items():
                    copies[name].get(out=span)

            return run

        return bind_mirrored

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def span(self, array: Any) -> Any:
        """The memory from the first to the last element as a flat array, gaps included."""
        if array.size == 0:
            return array.reshape(-1)
        steps = zip(array.shape, array.strides, strict=True)
        length = 1 + sum((n - 1) * step for n, step in steps) // array.itemsize
        strided = self.xp.lib.stride_tricks.as_strided
        return strided(array, (length,), (array.itemsize,))

    def upload(self, span: Any) -> Any:
        """A copy of a flat array on the GPU."""
        copy = self.cuda.xp.empty(span.shape, span.dtype)
        copy.set(span)
        return copy


class Interpreter:
    """Triton's interpreter on the CPU, which is slow and needs no GPU.

    ``target`` is the SKU whose configurations are interpreted.

    Raises
    ------
    Unsupported
        The process was started without ``TRITON_INTERPRET=1``.
    """

    def __init__(self, target: str = "h200") -> None:
        import numpy

        if os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("the interpreter needs TRITON_INTERPRET=1 in the environment")
        self.xp: Any = numpy
        self.gpu = gpu.find(target)

    @staticmethod
    def serving(implementation: Implementation) -> Interpreter:
        """The interpreter for a SKU that ``implementation`` serves: the H200 where possible."""
        skus = ("h200", *gpu.SKUS)
        return Interpreter(next(s for s in skus if implementation.serves(gpu.SKUS[s].arch)))

    def load(self, implementation: Implementation, problem: Problem, config: Config) -> Bind:
        from kernelcat.jit.interpreter import interpret

        if not implementation.interpretable:
            raise Unsupported(
                f"{implementation.name} cannot be interpreted: only Triton (not Gluon) can"
            )
        program = implementation.program(problem, config, self.gpu)
        return lambda arrays: lambda: interpret(program, arrays)

    def synchronize(self) -> None:
        pass
