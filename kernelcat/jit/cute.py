"""CuTe DSL: from a Python class that builds a host function to an object file with a launcher.

The object file holds the cubin and a compiled host function, which makes the TMA descriptors,
chooses the grid and launches. The DSL's small C runtime loads the object file in milliseconds,
without an import of the DSL, which takes a second. A launch packs its arguments into one buffer and
makes one call of C code.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import struct
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat.catalog import source
from kernelcat.catalog.reach import reached
from kernelcat.errors import CompileError, LaunchError, MissingDependency
from kernelcat.importing import import_module
from kernelcat.jit import elf
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import version_of

INSTALL = "pip install 'kernelcat[cute]'"
ALIGNMENT = 16
"""Bytes. Every address passed to a kernel is a multiple of this; vectorized copies rely on it."""

FLAVORS = ("cu13", "cu12")
"""Flavors of the DSL's compiler, by version of CUDA; the newest first."""

_LIBS = "nvidia-cutlass-dsl-libs"
_PREFIX = "kernelcat"
_SLOTS = {"int32": "i4x", "int64": "q", "float32": "f4x"}
"""Kind of a scalar parameter -> format of its 8-byte slot in the notation of ``struct``."""

_USAGE = {0x2F: "registers", 0x11: "spill_bytes"}
"""Attribute of ``.nv.info`` -> the number that the attribute holds for a kernel."""
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
        """The full name of the module."""
        return f"kernelcat.kernels.cute.{self.kernel.partition(':')[0]}"

    @property
    def builder(self) -> str:
        """The name of the class."""
        return self.kernel.partition(":")[2]

    def place(self) -> str:
        return self.kernel

    def text(self) -> str:
        """The definitions that the class reaches."""
        return reached(self.module, self.builder)

    def files(self) -> list[Path]:
        return source.python_files(self.module)

    def instance(self) -> list[Any]:
        return [self.builder, self.params, self.constants, ALIGNMENT]

    def digest(self) -> str:
        """Hex digest of the instance and of the full text of the module and catalog imports."""
        return source.instance_digest(source.python_text(self.module), self.instance())

    def toolchain(self) -> str:
        """Version of the DSL, and flavor of its compiler."""
        return f"nvidia-cutlass-dsl {version_of('nvidia-cutlass-dsl') or 'missing'} {flavor()}"

    def runtime(self) -> str:
        """Package and version of the C runtime that loads the compiled code."""
        package = f"{_LIBS}-{flavor()}"
        return f"{package} {version_of(package) or 'missing'}"

    def compile(self, arch: str) -> Artifact:
        """Compile to an object file for ``arch`` (``sm_90a``); needs no GPU.

        Raises
        ------
        CompileError
            The DSL refused the source; ``log`` holds the DSL's message.
        MissingDependency
            The DSL is not installed.
        """
        if importlib.util.find_spec("cutlass") is None:
            raise MissingDependency(f"CuTe kernels need the CuTe DSL: {INSTALL}")
        with _compiling:
            # Even for another machine's GPU the host function is linked with the DSL's runtime.
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

        builder = getattr(import_module(self.module), self.builder)
        arguments = [*map(_example, self.params), CUstream(0)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This static loop")  # unrolled intentionally
            return cute.compile(
                builder(**dict(self.constants)), *arguments, options=f"--gpu-arch {arch}"
            )


def flavor() -> str:
    """The flavor of the compiler that the DSL uses: the newest that is installed, or ``none``.

    The flavors compile one source to different machine code. (The DSL ignores a flavor that is
    newer than the driver, but kernelcat needs a driver for CUDA 13 anyway.)
    """
    return next((name for name in FLAVORS if version_of(f"{_LIBS}-{name}")), "none")


def load(artifact: Artifact) -> Callable[..., None]:
    """The launcher of an artifact: ``launch(*values, stream)``. Needs a GPU, compiles nothing.

    ``values`` are addresses and numbers in the order of ``CuteSource.params``, as Python ints and
    floats; ``stream`` is a ``CUstream`` handle. ``launch`` raises ``LaunchError`` where the driver
    refuses the launch.

    Raises
    ------
    MissingDependency
        The DSL's runtime library is not installed.
    LaunchError
        The object file cannot be loaded.
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
    """The cubin inside an exported object file; ``ValueError`` where there is none."""
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
    """Digest of the MLIR of a host function, which has the grid, cluster and TMA descriptors.

    Machine code and symbols are left out: symbols contain the names of the kernel's class and file.
    """
    for pattern, replacement in _NAMES_IN_IR:
        ir = pattern.sub(replacement, ir)
    return hashlib.sha256(ir.encode()).hexdigest()[:12]


def resources(cubin: bytes) -> dict[str, int]:
    """Largest use by any kernel of ``cubin``: registers per thread, spill and shared bytes.

    ``spill_bytes`` is the size of the stack, which holds spilled registers. From Hopper on,
    ``static_shared_bytes`` includes 1 KB of shared memory that the system reserves.
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
    """An argument for compilation, which uses only its type."""
    import cutlass
    from cutlass.cute.runtime import make_ptr

    scalars = {"int32": cutlass.Int32, "int64": cutlass.Int64, "float32": cutlass.Float32}
    if kind in scalars:
        return scalars[kind](1)
    space = cutlass.AddressSpace.gmem
    return make_ptr(element_type(kind[1:]), ALIGNMENT, space, assumed_align=ALIGNMENT)


def element_type(dtype: str) -> Any:
    """The DSL's type for kernelcat's element type ``dtype``."""
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
    """The file of the DSL's runtime library; ``$CUTE_DSL_LIBS`` overrides it, as in the DSL."""
    override = os.environ.get("CUTE_DSL_LIBS")
    if override:
        return Path(override.split(os.pathsep)[0])
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    libraries = sorted(p for f in folders for p in f.glob("cu*/lib/libcute_dsl_runtime.so"))
    if not libraries:
        raise MissingDependency(f"CuTe kernels need the CuTe DSL's runtime library: {INSTALL}")
    return libraries[-1]  # the newest flavor, as in the DSL


@cache
def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(_runtime_path()))
    runtime.CuteDSLRT_GetErrorString.restype = ctypes.c_char_p
    runtime.cuda_dialect_get_error_name.restype = ctypes.c_char_p
    return runtime


class _Function(ctypes.c_void_p):
    """A loaded host function."""


def _function(artifact: Artifact) -> ctypes.c_void_p:
    """The host function of an object file, unloaded with the last reference to the function."""
    runtime, module, function = _runtime(), ctypes.c_void_p(), _Function()
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
    weakref.finalize(function, runtime.CuteDSLRT_Module_Destroy, module).atexit = False
    return function


def _reason(status: int, error: int) -> str:
    """The text of a CUDA ``error``, or of the runtime's ``status`` where there is none."""
    runtime = _runtime()
    if error:
        return f"{runtime.cuda_dialect_get_error_name(ctypes.c_int(error)).decode()} ({error})"
    return str(runtime.CuteDSLRT_GetErrorString(status).decode())
