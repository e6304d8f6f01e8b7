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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.errors import CompileError, LaunchError, MissingDependency
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import version_of

INSTALL = "pip install 'kernelcat[cute]'"
ALIGNMENT = 16
"""Bytes every pointer handed to a kernel is aligned to; copies are vectorized on that promise."""

_PREFIX = "kernelcat"
_SLOTS = {"int32": "i4x", "int64": "q", "float32": "f4x"}
"""Kind of a scalar parameter -> how it lies in its 8-byte slot (``struct`` notation)."""

_IMPORT = re.compile(r"^from kernelcat\.kernels\.cute\.(?P<module>[\w.]+) import", re.MULTILINE)
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

    def digest(self) -> str:
        """Of the kernel's file, the catalog files it imports, the constants and the parameters."""
        parts: list[Any] = [self.kernel, self.params, self.constants]
        sha = hashlib.sha256(json.dumps(parts).encode())
        for name, text in sorted(_texts(self.kernel.partition(":")[0])):
            sha.update(f"\0{name}\0{len(text)}\0{text}".encode())
        return sha.hexdigest()

    def toolchain(self) -> str:
        """Version of the DSL."""
        return f"nvidia-cutlass-dsl {version_of('nvidia-cutlass-dsl') or 'missing'}"

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
        metadata = resources(cubin) | {"params": list(self.params)}
        return Artifact("cute", arch, next(iter(compiled.kernel_info)), code, cubin, metadata)

    def _compile(self, arch: str) -> Any:
        import cutlass.cute as cute
        from cuda.bindings.driver import CUstream

        module, _, name = self.kernel.partition(":")
        builder = getattr(importlib.import_module(f"kernelcat.kernels.cute.{module}"), name)
        arguments = [*map(_example, self.params), CUstream(0)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This static loop")  # unrolled on purpose
            return cute.compile(
                builder(**dict(self.constants)), *arguments, options=f"--gpu-arch {arch}"
            )


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


def resources(cubin: bytes) -> dict[str, int]:
    """The most that any kernel in it uses: registers a thread, bytes of stack, shared bytes.

    What lies on the stack is what was spilled. Shared memory of 1 KB is the system's, from Hopper.
    """
    usage = {"registers": 0, "spill_bytes": 0, "static_shared_bytes": 0}
    for name, kind, body, size in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(body):
                key = {0x2F: "registers", 0x11: "spill_bytes"}.get(attribute)
                if key:
                    usage[key] = max(usage[key], value)
        elif name.startswith(".nv.shared.") and kind == 8:  # SHT_NOBITS
            usage["static_shared_bytes"] = max(usage["static_shared_bytes"], size)
    return usage


def _sections(elf: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """Name, type, contents and size of every section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    step, count, names = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + step * i) for i in range(count)]
    strings = rows[names][4]
    for name, kind, _flags, _address, offset, size in rows:
        end = elf.index(b"\0", strings + name)
        yield elf[strings + name : end].decode(), kind, elf[offset : offset + size], size


def _attributes(body: bytes) -> Iterator[tuple[int, int]]:
    """Attribute and value of the records of ``.nv.info`` that tell one number about a symbol."""
    at = 0
    while at + 4 <= len(body):
        layout, attribute, size = struct.unpack_from("<BBH", body, at)
        at += 4
        if layout == 4:  # the only layout whose payload follows
            if size == 8:
                yield attribute, struct.unpack_from("<I", body, at + 4)[0]
            at += size


def _texts(module: str) -> set[tuple[str, str]]:
    """Name and text of a kernel's file and of the catalog files it imports, transitively."""
    root, pending, found = paths.data("kernels") / "cute", [module], dict[str, str]()
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = root.joinpath(*name.split(".")).with_suffix(".py").read_text()
            pending += [m["module"] for m in _IMPORT.finditer(found[name])]
    return set(found.items())


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
    return found[0]


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
