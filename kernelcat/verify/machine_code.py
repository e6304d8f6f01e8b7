"""Digests of machine code, which no comment, name or file of the source changes.

A digest covers the sections of a cubin that determine what the kernel does, and what the host
launches. :mod:`kernelcat.verify.code_record` keeps these digests beside receipts and measurements.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from typing import Any, NamedTuple

from kernelcat import jit
from kernelcat.catalog import discovery, launches
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.jit import elf
from kernelcat.runtime.gpu import Gpu, find
from kernelcat.verify.code_record import Case
from kernelcat.verify.inspect import disassemble

COMPARED = (".text", ".rela.text", ".nv.constant", ".nv.info", ".nv.shared", ".nv.global.init")
"""Prefixes of the names of the sections that determine what a kernel does."""

GLOBALS = (".nv.constant4", ".nv.global.init")
"""Prefixes of the sections that hold constants of namespaces.

The compiler emits constants of a header even where no instruction reads them.
"""

LAUNCHED = ("num_warps", "shared_bytes", "cluster", "hidden_params", "global_scratch_bytes",
            "params", "host")  # fmt: skip
"""Keys of an artifact's metadata that describe its launch."""

_SYMBOL_AND_VALUE = struct.Struct("<II")
_RELOCATION = struct.Struct("<QQq")


class Code(NamedTuple):
    """Digests of what a case launches (``launched``) and of its machine code (``machine``)."""

    launched: str
    machine: str

    @property
    def text(self) -> str:
        """Both digests as records hold them, joined by a dot."""
        return f"{self.launched}.{self.machine}"


def code_of(implementation: Implementation, case: Case, gpu: Gpu) -> Code:
    """The code of ``case``, built by the compilers of this process.

    Raises
    ------
    CompileError, MissingDependency
        From the language's compiler.
    """
    program = implementation.program(case.problem, case.config, gpu)
    artifacts = [jit.build(step.source, gpu.arch) for step in program.steps]
    built = [
        [cubin_digest(a.cubin), [a.metadata.get(name) for name in LAUNCHED]] for a in artifacts
    ]
    return Code(launched(implementation, case, gpu), _sha(built))


def exact_code(implementation: Implementation, case: Case, gpu: Gpu) -> Code:
    """The code of ``case``, with constants that no instruction may read; needs no disassembler.

    Stricter than :func:`code_of`. Raises ``CompileError`` or ``MissingDependency`` as that does.
    """
    program = implementation.program(case.problem, case.config, gpu)
    artifacts = [jit.build(step.source, gpu.arch) for step in program.steps]
    built = [
        [_sha(_compared(a.cubin)), [a.metadata.get(name) for name in LAUNCHED]] for a in artifacts
    ]
    return Code(launched(implementation, case, gpu), _sha(built))


def launched(implementation: Implementation, case: Case, gpu: Gpu) -> str:
    """Digest of what ``case`` launches; compiles nothing.

    Constants, types and options of a kernel are left out, because the machine code shows them.
    Names are left out too: a tensor or a workspace is identified by its position.
    """
    program = implementation.program(case.problem, case.config, gpu)
    entry = discovery.entry(implementation.entry)
    places = {tensor.name: place for place, tensor in enumerate(entry.tensors)}
    for step in program.steps:
        for param in step.params:
            places.setdefault(getattr(param, "tensor", ""), len(places))
    steps, workspaces = launches.values(program, places)
    return _sha([[[step[0], *step[2:]] for step in steps], workspaces], 8)


def cubin_digest(cubin: bytes) -> str:
    """Digest of the sections that determine what a kernel does; independent of symbol names."""
    sections = [s for s in elf.sections(cubin) if s.name.startswith(COMPARED)]
    has_globals = any(s.name.startswith(GLOBALS) for s in sections)
    if has_globals and "c[0x4]" not in disassemble(cubin):
        sections = [s for s in sections if not s.name.startswith(GLOBALS)]
    return _sha(sorted(_section(section) for section in sections))


def _compared(cubin: bytes) -> list[list[Any]]:
    """All sections that may determine what a kernel does."""
    return sorted(_section(s) for s in elf.sections(cubin) if s.name.startswith(COMPARED))


def _section(section: elf.Section) -> list[Any]:
    """Kind, size, registers and digest of a section, without names and numbers of symbols."""
    kind = next(prefix for prefix in COMPARED if section.name.startswith(prefix))
    body = section.body
    if kind == ".nv.info":
        body = b"".join(_attribute(*pair) for pair in elf.attributes(body))
    elif kind == ".rela.text":
        rows = (_RELOCATION.unpack_from(body, at) for at in range(0, len(body), _RELOCATION.size))
        body = repr([(offset, info & 0xFFFFFFFF, addend) for offset, info, addend in rows]).encode()
    registers = section.info >> 24 if kind == ".text" else 0
    return [kind, section.size, registers, hashlib.sha256(body).hexdigest()]


def _attribute(number: int, payload: bytes) -> bytes:
    """An attribute of a ``.nv.info`` section without the numbers of symbols."""
    if len(payload) == _SYMBOL_AND_VALUE.size:  # a symbol and its value, or a section and its size
        payload = struct.pack("<I", _SYMBOL_AND_VALUE.unpack(payload)[1])
    return struct.pack("<B", number) + payload


def _sha(value: Any, digits: int = 12) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:digits]


# ---- the codes of many cases, in a separate process --------------------------------------------


def main() -> None:
    """``python -m kernelcat.verify.machine_code``: builds the cases that standard input names.

    Each line is a request, ``{"implementation": NAME, "gpu": SKU, "cases": [[PROBLEM, CONFIG],
    ...]}``. The answer is the line ``{"implementation": NAME, "codes": [CODE, ...]}``. The code of
    a case that does not compile is ``"!"`` and the error.
    """
    for line in sys.stdin:
        request = json.loads(line)
        implementation = discovery.implementation(*request["implementation"].split("/"))
        gpu = find(request["gpu"])
        codes = [_code(implementation, pair, gpu) for pair in request["cases"]]
        print(json.dumps({"implementation": implementation.name, "codes": codes}), flush=True)


def _code(implementation: Implementation, pair: list[Any], gpu: Gpu) -> str:
    case = Case(Problem.of(implementation.entry, **pair[0]), Config(pair[1]))
    try:
        return code_of(implementation, case, gpu).text
    except Exception as error:  # with any error, this case does not run the recorded code
        return f"!{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
