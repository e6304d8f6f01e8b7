"""CuTe DSL: a Python class that builds a host function in, an object file with its launcher out.

The object holds the cubin and a compiled host function that makes the TMA descriptors, chooses the
grid and launches. The DSL's small C runtime loads it in milliseconds and without importing the DSL,
whose import alone takes a second; a launch packs its arguments into one buffer and calls C once.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import re
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat.catalog import source
from kernelcat.catalog.reach import reached
from kernelcat.errors import CompileError, LaunchError, MissingDependency
from kernelcat.jit import elf
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import version_of

INSTALL = "pip install 'kernelcat[cute]'"
ALIGNMENT = 16
"""Bytes every pointer handed to a kernel is aligned to; copies are vectorized on that promise."""

FLAVORS = ("cu13", "cu12")
"""The DSL's compilers, by the CUDA version they are of; the newest first."""

_LIBS = "nvidia-cutlass-dsl-libs"
_PREFIX = "kernelcat"
_SLOTS = {"int32": "i4x", "int64": "q", "float32": "f4x"}
"""Kind of a scalar parameter -> how it lies in its 8-byte slot (``struct`` notation)."""

_USAGE = {0x2F: "registers", 0x11: "spill_bytes"}
"""Attributes of ``.nv.info`` that tell one number of a kernel."""
_SYMBOL_AND_VALUE = struct.Struct("<II")
_NAMES_IN_IR = (
    (re.compile(r'@kernels_binary\("(?:[^"\\]|\\.)*"\)'), "@kernels_binary"),
    (re.compile(r"kernel_cutlass_\w+"), "kernel"),
    (re.compile(r"cutlass___call___\w+"), "launch"),
    (re.compile(r"array<\d+ x i8>"), "text"),
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_compiling = threading.Lock()


@dataclass(frozen=True)
class CuteSource:
    """One instantiation of a kernel.

    Attributes
    ----------
    kernel : ``module:Class`` below ``kernels/cute`` (``gemm.wgmma:Wgmma``). ``Class(**constants)``
        must give a ``@cute.jit`` callable of ``(*params, stream)``
    params : kinds in the order of ``Step.params``: ``*bfloat16`` for the address of bfloat16
        elements, ``int32``, ``int64`` or ``float32``
    constants : compile-time constants, name and value
    """

    kernel: str
    params: tuple[str, ...]
    constants: tuple[tuple[str, int | str | bool], ...] = ()

    language = "cute"

    @property
    def module(self) -> str:
        return f"kernelcat.kernels.cute.{self.kernel.partition(':')[0]}"

    @property
    def builder(self) -> str:
        """Name of the class."""
        return self.kernel.partition(":")[2]

    def text(self) -> str:
        """The definitions that the class reaches."""
        return reached(self.module, self.builder)

    def files(self) -> list[Path]:
        return source.python_files(self.module)

    def instance(self) -> list[Any]:
        return [self.builder, self.params, self.constants, ALIGNMENT]

    def digest(self) -> str:
        """Of the kernel's file and the catalog files it imports, whole, and of the instance."""
        parts = [source.python_text(self.module), self.instance()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def toolchain(self) -> str:
        """Version of the DSL, and of CUDA in its compiler."""
        return f"nvidia-cutlass-dsl {version_of('nvidia-cutlass-dsl') or 'missing'} {flavor()}"

    def compile(self, arch: str) -> Artifact:
        """An object file and the cubin in it, for ``arch`` (``sm_90a``); needs no GPU.

        Raises
        ------
        CompileError
            The DSL refused the source; its log has the DSL's own words.
        MissingDependency
            The DSL is not installed.
        """
        if importlib.util.find_spec("cutlass") is None:
            raise MissingDependency(f"CuTe kernels need the CuTe DSL: {INSTALL}")
        with _compiling:
            # A cross-compiled host function is linked against the runtime's symbols as well.
            ctypes.CDLL(str(_runtime_path()), mode=ctypes.RTLD_GLOBAL)
            try:
                compiled = self._compile(arch)
            except Exception as error:
                raise _compile_error(self.kernel, arch, error) from error
            with tempfile.TemporaryDirectory() as folder:
                compiled.export_to_c(folder, "kernel", _PREFIX)
                code = Path(folder, "kernel.o").read_bytes()
        cubin = embedded_cubin(code)
        host = host_digest(str(compiled.ir_module))
        metadata = resources(cubin) | {"params": list(self.params), "host": host}
        return Artifact("cute", arch, next(iter(compiled.kernel_info)), code, cubin, metadata)

    def _compile(self, arch: str) -> Any:
        import cutlass.cute as cute
        from cuda.bindings.driver import CUstream

        builder = getattr(importlib.import_module(self.module), self.builder)
        arguments = [*map(_example, self.params), CUstream(0)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This static loop")  # unrolled on purpose
            return cute.compile(
                builder(**dict(self.constants)), *arguments, options=f"--gpu-arch {arch}"
            )


def flavor() -> str:
    """Which of its compilers the DSL takes: ``cu13``, the newest installed, or ``cu12``.

    They make other machine code of the same source. (One newer than the driver it leaves alone,
    but without a driver for CUDA 13 no kernel of ours runs.)
    """
    return next((name for name in FLAVORS if version_of(f"{_LIBS}-{name}")), "none")


def load(artifact: Artifact) -> Callable[..., None]:
    """The launcher of an artifact: ``launch(*values, stream)``.

    ``values`` are in the order of ``CuteSource.params``: addresses and numbers, all plain Python
    ints or floats; ``stream`` is a ``CUstream`` handle. Nothing is compiled. Needs a GPU.

    Raises
    ------
    MissingDependency
        The DSL's runtime library is not installed.
    LaunchError
        The object cannot be loaded; from the launcher: the driver refused the launch.
    """
    function, run = _function(artifact), _runtime().CuteDSLRT_Function_Run
    formats = [
        "Q" if kind.startswith("*") else _SLOTS[kind] for kind in artifact.metadata["params"]
    ]
    pack = struct.Struct("=" + "".join(formats) + "Q").pack_into
    slots = (ctypes.c_uint64 * (len(formats) + 2))()  # the values, the stream, the CUDA error
    first, last = ctypes.addressof(slots), len(formats) + 1
    arguments = (ctypes.c_void_p * len(slots))(*(first + 8 * i for i in range(len(slots))))
    count, lock = ctypes.c_size_t(len(slots)), threading.Lock()

    def launch(*values: int | float) -> None:
        with lock:
            pack(slots, 0, *values)
            status = run(function, arguments, count)
            error = slots[last]
        if status or error:
            raise LaunchError(f"{artifact.kernel}: {_reason(status, error)}")

    return launch


def embedded_cubin(code: bytes) -> bytes:
    """The machine code inside an exported object file."""
    start = code.find(b"\x7fELF", 4)
    while start >= 0:
        header = struct.unpack_from("<HHIQQQIHHHHHH", code, start + 16)
        machine, phoff, shoff = header[1], header[4], header[5]
        phsize, phnum, shsize, shnum = header[8:12]
        if machine == 190:  # EM_CUDA
            size = max(phoff + phsize * phnum, shoff + shsize * shnum)
            return code[start : start + size]
        start = code.find(b"\x7fELF", start + 4)
    raise ValueError("the object file holds no cubin")


def host_digest(ir: str) -> str:
    """Digest of the host code that launches a kernel, as MLIR: grid, cluster, TMA descriptors.

    Without the machine code and the symbols, which name the kernel's class and file.
    """
    for pattern, instead in _NAMES_IN_IR:
        ir = pattern.sub(instead, ir)
    return hashlib.sha256(ir.encode()).hexdigest()[:12]


def resources(cubin: bytes) -> dict[str, int]:
    """The most that any kernel in it uses: registers a thread, bytes of stack, shared bytes.

    What lies on the stack is what was spilled. Shared memory of 1 KB is the system's, from Hopper.
    """
    usage = {"registers": 0, "spill_bytes": 0, "static_shared_bytes": 0}
    for section in elf.sections(cubin):
        if section.name == ".nv.info":
            for number, payload in elf.attributes(section.body):
                key = _USAGE.get(number)
                if key and len(payload) == _SYMBOL_AND_VALUE.size:
                    usage[key] = max(usage[key], _SYMBOL_AND_VALUE.unpack(payload)[1])
        elif section.name.startswith(".nv.shared.") and section.kind == elf.NOBITS:
            usage["static_shared_bytes"] = max(usage["static_shared_bytes"], section.size)
    return usage


def _example(kind: str) -> Any:
    """A stand-in argument: compilation looks at types only."""
    import cutlass
    from cutlass.cute.runtime import make_ptr

    scalars = {"int32": cutlass.Int32, "int64": cutlass.Int64, "float32": cutlass.Float32}
    if kind in scalars:
        return scalars[kind](1)
    space = cutlass.AddressSpace.gmem
    return make_ptr(element_type(kind[1:]), ALIGNMENT, space, assumed_align=ALIGNMENT)


def element_type(dtype: str) -> Any:
    """The DSL's type of elements called ``dtype`` in kernelcat."""
    import cutlass

    names = {"bfloat16": "BFloat16", "float8_e4m3fn": "Float8E4M3FN"}
    return getattr(cutlass, names.get(dtype, dtype.capitalize()))


def _compile_error(kernel: str, arch: str, error: Exception) -> CompileError:
    log = _ESCAPES.sub("", str(error)).strip() or repr(error)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    line = next((line for line in lines if "error" in line.lower()), lines[0])
    return CompileError(f"{kernel} does not compile for {arch}: {line}", log)


@cache
def _runtime_path() -> Path:
    """The DSL's runtime library; ``$CUTE_DSL_LIBS`` overrides it as it does for the DSL."""
    chosen = os.environ.get("CUTE_DSL_LIBS")
    if chosen:
        return Path(chosen.split(os.pathsep)[0])
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    found = sorted(p for f in folders for p in f.glob("cu*/lib/libcute_dsl_runtime.so"))
    if not found:
        raise MissingDependency(f"CuTe kernels need the CuTe DSL's runtime library: {INSTALL}")
    return found[-1]  # of the newest flavor, as the DSL takes it


@cache
def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(_runtime_path()))
    runtime.CuteDSLRT_GetErrorString.restype = ctypes.c_char_p
    runtime.cuda_dialect_get_error_name.restype = ctypes.c_char_p
    return runtime


def _function(artifact: Artifact) -> ctypes.c_void_p:
    """The host function of an object; its module stays loaded until the process ends."""
    runtime, module, function = _runtime(), ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t(len(artifact.code))
    status = runtime.CuteDSLRT_Module_Create_From_Bytes(
        ctypes.byref(module), artifact.code, size, None, ctypes.c_size_t(0)
    )
    if not status:
        status = runtime.CuteDSLRT_Module_Get_Function(
            ctypes.byref(function), module, _PREFIX.encode()
        )
    if status:
        raise LaunchError(f"cannot load {artifact.kernel}: {_reason(status, 0)}")
    return function


def _reason(status: int, error: int) -> str:
    runtime = _runtime()
    if error:
        return f"{runtime.cuda_dialect_get_error_name(ctypes.c_int(error)).decode()} ({error})"
    return str(runtime.CuteDSLRT_GetErrorString(status).decode())
