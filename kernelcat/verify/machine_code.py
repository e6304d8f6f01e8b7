"""What machine code a kernel is: a digest that no comment, name or file of the source changes.

It covers the sections of a cubin that the kernel's work depends on, and what the host launches.
:mod:`kernelcat.verify.code_record` keeps such digests beside receipts and measurements.
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
"""Sections that a kernel's work depends on, by how their names begin."""

GLOBALS = (".nv.constant4", ".nv.global.init")
"""Where namespace constants of a header lie, whether or not an instruction reads any."""

LAUNCHED = ("num_warps", "shared_bytes", "cluster", "hidden_params", "global_scratch_bytes",
            "params", "host")  # fmt: skip
"""What an artifact's metadata tell of its launch."""

_SYMBOL_AND_VALUE = struct.Struct("<II")
_RELOCATION = struct.Struct("<QQq")


class Code(NamedTuple):
    """Digests of what a case launches and of its machine code; ``text`` is how both are written."""

    launched: str
    machine: str

    @property
    def text(self) -> str:
        return f"{self.launched}.{self.machine}"


def code_of(implementation: Implementation, case: Case, gpu: Gpu) -> Code:
    """What ``case`` launches, and the machine code that the compilers of this process make.

    Raises
    ------
    CompileError, MissingDependency
        From the language's compiler.
    """
    program = implementation.program(case.problem, case.config, gpu)
    artifacts = [jit.build(step.source, gpu.arch) for step in program.steps]
    made = [[cubin_digest(a.cubin), [a.metadata.get(name) for name in LAUNCHED]] for a in artifacts]
    return Code(launched(implementation, case, gpu), _sha(made))


def launched(implementation: Implementation, case: Case, gpu: Gpu) -> str:
    """Digest of what ``case`` launches; compiles nothing.

    Constants, types and options of a kernel are left out: they show in its machine code. So are
    names: a tensor or a workspace counts by its place.
    """
    program = implementation.program(case.problem, case.config, gpu)
    entry = discovery.entry(implementation.entry)
    places = {tensor.name: place for place, tensor in enumerate(entry.tensors)}
    for step in program.steps:
        for param in step.params:
            places.setdefault(getattr(param, "tensor", ""), len(places))
    told = launches.values(program, places)
    return _sha([[[step[0], *step[2:]] for step in told[0]], told[1]], 8)


def cubin_digest(cubin: bytes) -> str:
    """Digest of the sections that a kernel's work depends on, whatever its symbols are called."""
    found = [s for s in elf.sections(cubin) if s.name.startswith(COMPARED)]
    has_globals = any(s.name.startswith(GLOBALS) for s in found)
    if has_globals and "c[0x4]" not in disassemble(cubin):
        found = [s for s in found if not s.name.startswith(GLOBALS)]
    return _sha(sorted(_section(section) for section in found))


def _section(section: elf.Section) -> list[Any]:
    """Kind, size and contents of a section, without names and numbers of symbols."""
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
    if len(payload) == _SYMBOL_AND_VALUE.size:  # a symbol and its value, or a section and its size
        payload = struct.pack("<I", _SYMBOL_AND_VALUE.unpack(payload)[1])
    return struct.pack("<B", number) + payload


def _sha(value: Any, digits: int = 12) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:digits]


# ---- the codes of many cases, in a process of its own ------------------------------------------


def main() -> None:
    """``python -m kernelcat.verify.machine_code``: reads requests, a JSON object a line.

    ``{"implementation": NAME, "gpu": SKU, "cases": [[PROBLEM, CONFIG], ...]}`` is answered by
    ``{"implementation": NAME, "codes": [CODE, ...]}``; ``"!"`` and the reason instead of the code
    of what does not compile.
    """
    for line in sys.stdin:
        asked = json.loads(line)
        implementation = discovery.implementation(*asked["implementation"].split("/"))
        gpu = find(asked["gpu"])
        codes = [_code(implementation, pair, gpu) for pair in asked["cases"]]
        print(json.dumps({"implementation": implementation.name, "codes": codes}), flush=True)


def _code(implementation: Implementation, pair: list[Any], gpu: Gpu) -> str:
    case = Case(Problem.of(implementation.entry, **pair[0]), Config(pair[1]))
    try:
        return code_of(implementation, case, gpu).text
    except Exception as error:  # whatever it is, this case does not run the code it ran
        return f"!{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
