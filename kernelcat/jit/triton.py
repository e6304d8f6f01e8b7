"""Triton and Gluon, compiled ahead of time: no Triton is imported to launch a cached kernel.

A source names its kernel (``module``, ``kernel``) instead of holding it, and is digested from the
module's text, so that planning, looking up and launching never import the compiler.

The ABI, the same in Triton 3.6 and 3.9 for compute capability 9.0 and above: parameters in the
kernel's order without its constants, then two pointers that Triton adds (global scratch, profile
scratch). A tensor descriptor takes a 128-byte ``CUtensorMap``, its shape as i32, its strides as
i64, outermost first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from kernelcat.errors import CompileError
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import version_of

if version_of("triton") is None:
    raise ModuleNotFoundError("No module named 'triton'", name="triton")

TYPES = {
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float16": "fp16",
    "float32": "fp32",
    "uint8": "u8",
    "int32": "i32",
}
"""Element type name -> Triton's."""

NAMES = {short: name for name, short in TYPES.items()}

DEFAULT_OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel that does not give them."""

_DESCRIPTOR = re.compile(
    r"tensordesc<(?P<dtype>\w+)\[(?P<block>[\d, ]+)\](,.*cga_layout=(?P<cluster>.*)\))?>"
)
_PTXAS = re.compile(r"(?P<stores>\d+) bytes spill stores.*?Used (?P<registers>\d+) reg", re.DOTALL)
_SWIZZLE_BYTES = (0, 32, 64, 128)
_compiling = threading.Lock()


# ---- arguments ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """A kernel argument: its Triton type, what is launched for it, and a divisor of its value."""

    type: str
    params: tuple[Param, ...]
    divisor: int = 1


def pointer(tensor: str, dtype: str) -> Argument:
    """Address of a tensor or workspace of element type ``dtype``, a multiple of 16 bytes."""
    return Argument("*" + TYPES[dtype], (Pointer(tensor),), 16)


def integer(value: int, divisor: int | None = None) -> Argument:
    """An integer, 32 bits wide where that is enough.

    Code is specialized for ``divisor`` (default: the part of 16 that divides ``value``). Pass 1
    where specialization buys nothing, so that more problems share one binary.
    """
    divisor = gcd(value, 16) if divisor is None else divisor
    if value < 1 << 31:
        return Argument("i32", (Int32(value),), divisor)
    return Argument("i64", (Int64(value),), divisor)


def real(value: float) -> Argument:
    """A float of 32 bits."""
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
    """A TMA descriptor over a row-major matrix, loaded and stored in tiles of ``block``.

    ``shape`` and ``row_stride`` (default: contiguous) are in elements; a row must take a multiple
    of 16 bytes. To a ``gluon`` kernel the type also tells how a tile lies in shared memory, and
    which part of it each block of a cluster has: ``cluster`` is Gluon's ``cga_layout``, ``(1, 0)``
    for halves of the rows, ``(0, 0)`` for all of it twice.
    """
    rows, cols = shape
    stride = cols if row_stride is None else row_stride
    size = dtypes.itemsize(dtype)
    box, swizzle = box_of(dtype, _part(block, cluster))
    tensor_map = TensorMap(tensor, dtype, (cols, rows), (stride * size,), box, swizzle)
    bases = [list(basis) for basis in cluster]
    layout = f",NVMMASharedLayout({swizzle}, {8 * size}, cga_layout={bases})" if gluon else ""
    return Argument(
        f"tensordesc<{TYPES[dtype]}[{block[0]}, {block[1]}]{layout}>",
        (tensor_map, Int32(rows), Int32(cols), Int64(stride), Int64(1)),
    )


def _part(block: tuple[int, int], cluster: Iterable[Sequence[int]]) -> tuple[int, int]:
    """The part of ``block`` that one block of a cluster has."""
    rows, cols = block
    for by_rows, by_cols in cluster:
        rows, cols = rows // (2 if by_rows else 1), cols // (2 if by_cols else 1)
    return rows, cols


def box_of(dtype: str, block: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """Box (innermost first) and swizzle that Triton gives a descriptor of tiles of ``block``.

    A tile is cut into boxes one swizzle span wide; a swizzle needs 8 rows.
    ``TritonSource.compile`` checks this against what Triton says it did.
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
    arguments : in the kernel's order
    constants : its ``tl.constexpr`` parameters
    options : Triton's: ``num_warps``, ``num_stages``, ``num_ctas``, ``maxnreg`` ...
    """
    module, _, name = kernel.partition(":")
    made = TritonSource(
        module,
        name,
        {key: argument.type for key, argument in arguments.items()},
        {key: argument.divisor for key, argument in arguments.items() if argument.divisor > 1},
        dict(constants),
        options,
    )
    cluster = options.get("num_ctas", 1)
    params = tuple(param for argument in arguments.values() for param in argument.params)
    return Step(made, (grid[0] * cluster, *grid[1:]), params, cluster=(cluster, 1, 1))


# ---- compilation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TritonSource:
    """A Triton or Gluon kernel with everything that decides its machine code.

    Attributes
    ----------
    module, kernel : where the function is
    signature : argument -> Triton type (``*bf16``, ``i32``, ``tensordesc<bf16[128, 64]>``)
    divisors : argument -> a power of two that divides it
    constants : ``tl.constexpr`` parameter -> value
    options : compiler option -> value
    """

    module: str
    kernel: str
    signature: Mapping[str, str] = field(hash=False)
    divisors: Mapping[str, int] = field(hash=False)
    constants: Mapping[str, ConfigValue] = field(hash=False)
    options: Mapping[str, int] = field(hash=False)
    language = "triton"

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
        """Of the kernel's module and the catalog modules it imports, whole, and of the instance."""
        parts = [source.python_text(self.module), self.instance()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def toolchain(self) -> str:
        """``triton 3.6.0``."""
        return f"triton {version_of('triton')}"

    def function(self) -> Any:
        """The kernel itself; imports Triton."""
        return getattr(importlib.import_module(self.module), self.kernel)

    def compile(self, arch: str) -> Artifact:
        """Compile for ``arch`` (``sm_90a``); needs no GPU.

        Raises
        ------
        CompileError
            One line; ``log`` holds what Triton and ptxas printed.
        """
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget

        if knobs.runtime.interpret:
            raise CompileError("Triton compiles nothing while TRITON_INTERPRET is set: unset it")
        target = GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
        options = {**DEFAULT_OPTIONS, **self.options}
        log = _Log()
        # Triton's own disk cache would only shadow ours; ptxas reports registers in its log.
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
        lines = [line.strip() for line in str(error).splitlines()]
        told = [line for line in lines if line and not line.startswith("Repro command")]
        reason = told[-1] if told else "no reason given"
        return CompileError(
            f"{self.kernel} does not compile for {arch}: {type(error).__name__}: {reason}",
            f"{error}\n{log}",
        )

    def _artifact(self, arch: str, compiled: Any, log: str) -> Artifact:
        told = compiled.metadata
        self._verify_boxes(told.tensordesc_meta or ())
        usage = _PTXAS.search(log)
        if usage is None:
            raise CompileError(f"{self.kernel}: ptxas did not tell its register count", log)
        cubin = compiled.asm["cubin"]
        scratch = (told.global_scratch_size, told.profile_scratch_size)
        metadata = {
            "num_warps": told.num_warps,
            "shared_bytes": told.shared,
            "cluster": [told.num_ctas, 1, 1],
            "hidden_params": ["scratch" if scratch[0] else "null", "null"],
            "global_scratch_bytes": scratch[0] or 0,
            "global_scratch_align": told.global_scratch_align or 1,
            "registers": int(usage["registers"]),
            "spill_bytes": int(usage["stores"]),
            "static_shared_bytes": 0,
        }
        if scratch[1]:
            raise CompileError(f"{self.kernel} was compiled for profiling: unset Triton's profiler")
        return Artifact("triton", arch, told.name, cubin, cubin, metadata)

    def _verify_boxes(self, told: Any) -> None:
        """Steps were built before Triton chose its layouts: make sure both agree."""
        types = [t for t in self.signature.values() if t.startswith("tensordesc")]
        expected = [box_of(dtype, block) for dtype, block in map(parse_descriptor, types)]
        actual = [(tuple(reversed(m["block_size"])), _SWIZZLE_BYTES[m["swizzle"]]) for m in told]
        if expected != actual:
            raise CompileError(
                f"{self.kernel}: Triton laid its descriptors out as {actual}, not {expected}"
            )


class _Log(io.StringIO):
    """Stands in for ``sys.stdout``: keeps what this thread prints, passes on what others do."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._others = threading.get_ident(), sys.stdout

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return super().write(text)
        return self._others.write(text)


def parse_descriptor(type_name: str) -> tuple[str, tuple[int, int]]:
    """Element type of ``tensordesc<bf16[128, 64]>`` and its block, or a cluster's block's part."""
    match = _DESCRIPTOR.fullmatch(type_name)
    if match is None:
        raise ValueError(f"malformed descriptor type {type_name!r}")
    rows, cols = map(int, match["block"].split(","))
    return NAMES[match["dtype"]], _part((rows, cols), json.loads(match["cluster"] or "[]"))
