"""Triton and Gluon, compiled ahead of time: launching a cached kernel does not import Triton.

A source holds the names of the module and of the kernel, not the kernel itself, and its digest is
of the module's text. So planning, looking up and launching never import the compiler.

The ABI is the same in Triton 3.6 and 3.9 for compute capability 9.0 and above: the kernel's
parameters in order without constants, then two pointers that Triton adds (global scratch, profile
scratch). A tensor descriptor is passed as a 128-byte ``CUtensorMap``, its shape as i32 and its
strides as i64, outermost first.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

from kernelcat import dtypes
from kernelcat.catalog import source
from kernelcat.catalog.implementation import (
    ConfigValue,
    Float32,
    Int32,
    Int64,
    Param,
    Pointer,
    Step,
    TensorMap,
)
from kernelcat.catalog.reach import reached
from kernelcat.errors import CompileError, MissingDependency
from kernelcat.importing import import_module
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import version_of

INSTALL = "pip install 'kernelcat[triton]'"

TYPES = {
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float16": "fp16",
    "float32": "fp32",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}
"""Element type -> Triton's name for the type."""

NAMES = {short: name for name, short in TYPES.items()}
"""Triton's name -> element type."""

DEFAULT_OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel that does not set them."""

_DESCRIPTOR = re.compile(
    r"tensordesc<(?P<dtype>\w+)\[(?P<block>[\d, ]+)\](,.*cga_layout=(?P<cluster>.*)\))?>"
)
_PTXAS = re.compile(r"(?P<stores>\d+) bytes spill stores.*?Used (?P<registers>\d+) reg", re.DOTALL)
_SWIZZLE_BYTES = (0, 32, 64, 128)
_compiling = threading.Lock()


# ---- arguments ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """A kernel argument: Triton type, parameters of the launch, and a divisor of the value."""

    type: str
    params: tuple[Param, ...]
    divisor: int = 1


@lru_cache(1024)
def pointer(tensor: str, dtype: str) -> Argument:
    """The address of a tensor or workspace with element type ``dtype``: a multiple of 16 bytes."""
    return Argument("*" + TYPES[dtype], (Pointer(tensor),), 16)


@lru_cache(1024, typed=True)  # most sizes of a layer are the same in every call
def integer(value: int, divisor: int | None = None) -> Argument:
    """An integer of 32 bits, or of 64 bits where ``value`` needs them.

    Code is specialized for ``divisor`` (default: the greatest common divisor of ``value`` and 16).
    Pass 1 where specialization gains nothing, so that more problems share one binary.
    """
    divisor = gcd(value, 16) if divisor is None else divisor
    if value < 1 << 31:
        return Argument("i32", (Int32(value),), divisor)
    return Argument("i64", (Int64(value),), divisor)


def real(value: float) -> Argument:
    """A 32-bit float."""
    return Argument("fp32", (Float32(value),))


def descriptor(
    tensor: str,
    dtype: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    row_stride: int | None = None,
    gluon: bool = False,
    cluster: tuple[tuple[int, int], ...] = (),
) -> Argument:
    """A TMA tensor map over a row-major matrix, loaded and stored in tiles of ``block``.

    ``shape``, ``block`` (rows, columns) and ``row_stride`` (default: contiguous) are in elements;
    a row stride must be a multiple of 16 bytes. For a ``gluon`` kernel the type includes the layout
    of a tile in shared memory and its distribution over the thread blocks of a cluster: ``cluster``
    is Gluon's ``cga_layout``, with ``(1, 0)`` where two thread blocks hold half of the rows each,
    and ``(0, 0)`` where both hold the whole tile.
    """
    rows, cols = shape
    stride = cols if row_stride is None else row_stride
    kind, size, box, swizzle = _tile(dtype, block, gluon, cluster)
    tensor_map = TensorMap(tensor, dtype, (cols, rows), (stride * size,), box, swizzle)
    return Argument(kind, (tensor_map, Int32(rows), Int32(cols), Int64(stride), _ONE))


_ONE = Int64(1)


@lru_cache(256)
def _tile(
    dtype: str, block: tuple[int, int], gluon: bool, cluster: tuple[tuple[int, int], ...]
) -> tuple[str, int, tuple[int, int], int]:
    """What a tile says of its descriptor: type, bytes of an element, box and swizzle."""
    size = dtypes.itemsize(dtype)
    box, swizzle = box_of(dtype, _part(block, cluster))
    bases = [list(basis) for basis in cluster]
    layout = f",NVMMASharedLayout({swizzle}, {8 * size}, cga_layout={bases})" if gluon else ""
    kind = f"tensordesc<{TYPES[dtype]}[{block[0]}, {block[1]}]{layout}>"
    return kind, size, box, swizzle


def _part(block: tuple[int, int], cluster: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Rows and columns of a tile that one thread block of a cluster holds."""
    rows, cols = block
    for by_rows, by_cols in cluster:
        rows, cols = rows // (2 if by_rows else 1), cols // (2 if by_cols else 1)
    return rows, cols


def box_of(dtype: str, block: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """Box (elements, innermost first) and swizzle (bytes) of Triton's descriptor for a tile.

    ``block`` is (rows, columns). A tile is divided into boxes as wide as the swizzle span; a
    swizzle needs 8 rows. ``TritonSource.compile`` compares this rule with Triton's metadata.
    """
    rows, cols = block
    if rows < 8:
        return (min(cols, 256), rows), 0
    size = dtypes.itemsize(dtype)
    span = min(cols * size, 128)
    return (span // size, min(rows, 256)), span if span >= 32 else 0


def step(
    kernel: str,
    grid: tuple[int, int, int],
    arguments: Mapping[str, Argument],
    constants: Mapping[str, ConfigValue],
    **options: int,
) -> Step:
    """The launch of ``kernel`` (``"package.module:function"``) on ``grid`` programs.

    Parameters
    ----------
    arguments : name -> argument, in the kernel's order
    constants : name -> value of ``tl.constexpr`` parameters
    options : Triton's compiler options: ``num_warps``, ``num_stages``, ``num_ctas``, ``maxnreg``
    """
    module, _, name = kernel.partition(":")
    kernel_source = TritonSource(
        module,
        name,
        {key: argument.type for key, argument in arguments.items()},
        {key: argument.divisor for key, argument in arguments.items() if argument.divisor > 1},
        dict(constants),
        options,
    )
    cluster = options.get("num_ctas", 1)
    params = tuple([param for argument in arguments.values() for param in argument.params])
    return Step(kernel_source, (grid[0] * cluster, *grid[1:]), params, cluster=(cluster, 1, 1))


# ---- compilation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TritonSource:
    """A Triton or Gluon kernel with everything that decides its machine code.

    Attributes
    ----------
    module, kernel : names of the module and of the function in the module
    signature : argument -> Triton type (``*bf16``, ``i32``, ``tensordesc<bf16[128, 64]>``)
    divisors : argument -> a power of two that divides it
    constants : ``tl.constexpr`` parameter -> value
    options : compiler option -> value
    """

    module: str
    kernel: str
    signature: Mapping[str, str]
    divisors: Mapping[str, int]
    constants: Mapping[str, ConfigValue]
    options: Mapping[str, int]
    language = "triton"

    def __hash__(self) -> int:
        instance = (frozenset(each.items()) for each in (self.divisors, self.constants))
        return hash((self.module, self.kernel, *instance))

    def place(self) -> str:
        return f"{self.module}:{self.kernel}"

    def text(self) -> str:
        """The definitions that the kernel reaches."""
        return reached(self.module, self.kernel)

    def files(self) -> list[Path]:
        return source.python_files(self.module)

    def instance(self) -> list[Any]:
        mappings = (self.signature, self.divisors, self.constants)
        options = sorted({**DEFAULT_OPTIONS, **self.options}.items())
        return [self.kernel, *(list(m.items()) for m in mappings), options]

    def digest(self) -> str:
        """Hex digest of the instance and of the full text of the module and catalog imports."""
        return source.instance_digest(source.python_text(self.module), self.instance())

    def toolchain(self) -> str:
        """Name and version: ``triton 3.6.0``."""
        return f"triton {version_of('triton') or 'missing'}"

    def runtime(self) -> str:
        return ""

    def function(self) -> Any:
        """The kernel itself; imports Triton."""
        return getattr(import_module(self.module), self.kernel)

    def verify_order(self) -> None:
        """Raise ``CompileError`` unless the arguments are those of the kernel, in its order.

        Compiled kernels take their arguments by place, so in another order they would be mixed up.
        """
        names = [name for name in self.function().arg_names if name not in self.constants]
        if names != list(self.signature):
            raise CompileError(
                f"{self.kernel} takes {', '.join(names)}, and is given {', '.join(self.signature)}"
            )

    def compile(self, arch: str) -> Artifact:
        """Compile for ``arch`` (``sm_90a``); needs no GPU.

        Raises
        ------
        CompileError
            The message is one line; ``log`` holds the output of Triton and ptxas.
        MissingDependency
            Triton is not installed.
        """
        if version_of("triton") is None:
            raise MissingDependency(f"Triton kernels need Triton: {INSTALL}")
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget

        if knobs.runtime.interpret:
            raise CompileError("Triton compiles nothing while TRITON_INTERPRET is set: unset it")
        target = GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
        options = {**DEFAULT_OPTIONS, **self.options}
        log = _Log()
        # Artifacts are in kernelcat's cache, so Triton's goes to a temporary folder. The log of
        # ptxas is needed for the number of registers.
        with (
            _compiling,
            knobs.cache.scope(),
            knobs.nvidia.scope(),
            tempfile.TemporaryDirectory() as scratch,
            contextlib.redirect_stdout(log),
        ):
            knobs.cache.dir = scratch
            knobs.nvidia.dump_ptxas_log = True
            try:
                compiled = triton.compile(self._ast_source(), target=target, options=options)
            except Exception as error:
                raise self._failure(arch, error, log.getvalue()) from error
        return self._artifact(arch, compiled, log.getvalue())

    def _ast_source(self) -> Any:
        self.verify_order()
        function = self.function()
        if function.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
        else:
            from triton.compiler import ASTSource
        names = function.arg_names
        return ASTSource(
            function,
            {**self.signature, **dict.fromkeys(self.constants, "constexpr")},
            dict(self.constants),
            {(names.index(n),): [["tt.divisibility", d]] for n, d in self.divisors.items()},
        )

    def _failure(self, arch: str, error: Exception, log: str) -> CompileError:
        stripped = (line.strip() for line in str(error).splitlines())
        lines = [line for line in stripped if line and not line.startswith("Repro command")]
        reason = lines[-1] if lines else "no reason given"
        return CompileError(
            f"{self.kernel} does not compile for {arch}: {type(error).__name__}: {reason}",
            f"{error}\n{log}",
        )

    def _artifact(self, arch: str, compiled: Any, log: str) -> Artifact:
        data = compiled.metadata
        self._verify_boxes(data.tensordesc_meta or ())
        usage = _PTXAS.search(log)
        if usage is None:
            raise CompileError(f"{self.kernel}: ptxas did not report a number of registers", log)
        cubin = compiled.asm["cubin"]
        if data.profile_scratch_size:
            raise CompileError(f"{self.kernel} was compiled for profiling: unset Triton's profiler")
        metadata = {
            "num_warps": data.num_warps,
            "shared_bytes": data.shared,
            "cluster": [data.num_ctas, 1, 1],
            "hidden_params": ["scratch" if data.global_scratch_size else "null", "null"],
            "global_scratch_bytes": data.global_scratch_size or 0,
            "global_scratch_align": data.global_scratch_align or 1,
            "registers": int(usage["registers"]),
            "spill_bytes": int(usage["stores"]),
            "static_shared_bytes": 0,
        }
        return Artifact("triton", arch, data.name, cubin, cubin, metadata)

    def _verify_boxes(self, layouts: Any) -> None:
        """Raise ``CompileError`` unless Triton's descriptors have the layouts of :func:`box_of`.

        ``layouts`` is ``tensordesc_meta`` of Triton's metadata. Steps are made before Triton
        chooses layouts, so steps rely on :func:`box_of`.
        """
        types = [t for t in self.signature.values() if t.startswith("tensordesc")]
        expected = [box_of(dtype, block) for dtype, block in map(parse_descriptor, types)]
        actual = [(tuple(reversed(m["block_size"])), _SWIZZLE_BYTES[m["swizzle"]]) for m in layouts]
        if expected != actual:
            raise CompileError(
                f"{self.kernel}: Triton's descriptors have layouts {actual}, not {expected}"
            )


class _Log(io.StringIO):
    """A replacement of ``sys.stdout`` that collects this thread's output and passes on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._stdout = threading.get_ident(), sys.stdout

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return super().write(text)
        return self._stdout.write(text)


def parse_descriptor(type_name: str) -> tuple[str, tuple[int, int]]:
    """Element type and tile (rows, columns) in a descriptor's type: ``tensordesc<bf16[128, 64]>``.

    For a Gluon descriptor of a cluster, the tile is the part that one thread block holds. Raises
    ``ValueError`` for a malformed type.
    """
    match = _DESCRIPTOR.fullmatch(type_name)
    if match is None:
        raise ValueError(f"malformed descriptor type {type_name!r}")
    rows, cols = map(int, match["block"].split(","))
    return NAMES[match["dtype"]], _part((rows, cols), json.loads(match["cluster"] or "[]"))
