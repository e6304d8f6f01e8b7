"""What is in the machine code: registers, spills, and the instructions that prove a technique.

The SASS instruction of each technique, as NVRTC 13.5 and nvdisasm 13.1 name it for sm_90a and
sm_100a (a pattern is a prefix, ``*`` stands for any text):

======================  ==========================  ===============================================
technique               pattern                     PTX
======================  ==========================  ===============================================
16-byte loads           ``LDG*128``, ``STG*128``    ``ld.global.v4``, ``st.global.v4``
asynchronous copy       ``LDGSTS``                  ``cp.async``
1-D bulk copy           ``UBLKCP.S.G``              ``cp.async.bulk.shared::cluster.global``
1-D bulk store          ``UBLKCP.G.S``              ``cp.async.bulk.global.shared::cta``
1-D bulk multicast      ``UBLKCP*MULTICAST``        ``... .multicast::cluster``
bulk copy to a CTA      ``UBLKCP.S.S``              ``cp.async.bulk.shared::cluster.shared::cta``
bulk reduction          ``UBLKRED``, ``UTMAREDG``   ``cp.reduce.async.bulk[.tensor]``
bulk prefetch           ``UBLKPF``, ``UTMAPF``      ``cp.async.bulk.prefetch[.tensor]``
TMA load                ``UTMALDG``                 ``cp.async.bulk.tensor`` (``UTMALDG.2D``)
TMA multicast           ``UTMALDG*MULTICAST``       ``... .multicast::cluster``
TMA store               ``UTMASTG``                 ``cp.async.bulk.tensor.global.shared::cta``
descriptor prefetch     ``UTMACCTL.PF``             ``prefetch.tensormap``
mbarrier                ``SYNCS``                   ``mbarrier.try_wait``: ``SYNCS.PHASECHK``
arrive at another CTA   ``SYNCS.ARRIVE*RED``        ``mbarrier.arrive.shared::cluster``
cluster barrier         ``UCGABAR``                 ``barrier.cluster``
mma                     ``HMMA``                    ``mma.sync`` (``HMMA.16816.F32.BF16``)
ldmatrix, stmatrix      ``LDSM``, ``STSM``          ``ldmatrix``, ``stmatrix``
wgmma                   ``HGMMA``                   ``wgmma`` (``HGMMA.64x256x16.F32.BF16``; fp8
                                                    is ``QGMMA``, int8 ``IGMMA``)
warp specialization     ``USETMAXREG``              ``setmaxnreg``; ptxas drops it unless
                                                    ``__launch_bounds__(threads, 1)`` is given
dependent launch        ``ACQBULK``, ``PREEXIT``    ``griddepcontrol.wait``, ``.launch_dependents``
tcgen05                 ``UTCHMMA``                 ``tcgen05.mma.kind::f16``; ``UTCQMMA`` f8f6f4,
                                                    ``UTCOMMA`` mxf4
tcgen05 on two SMs      ``UTCHMMA*2CTA``            ``... .cta_group::2``
tensor memory           ``LDTM``, ``STTM``          ``tcgen05.ld``, ``tcgen05.st``
copy to tensor memory   ``UTCCP``                   ``tcgen05.cp``
tcgen05 commit          ``UTCBAR``                  ``tcgen05.commit``
======================  ==========================  ===============================================
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import struct
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from kernelcat.catalog.implementation import Implementation
from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.jit import elf
from kernelcat.jit.artifact import Artifact
from kernelcat.runtime import children

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE
)

_KPARAM_INFO = 0x17


@dataclass(frozen=True)
class Report:
    """One kernel's machine code.

    Attributes
    ----------
    registers : registers of a thread at launch; None where the compiler does not report them
    spill_bytes : bytes that a thread spills; None where the compiler does not report them
    shared_bytes : bytes of static shared memory; for Triton, of all shared memory
    opcodes : how often each instruction occurs, modifiers included (``UTMALDG.2D.MULTICAST``)
    """

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    opcodes: Counter[str]

    def has(self, pattern: str) -> bool:
        """Whether an opcode starts with ``pattern``, in which ``*`` stands for any text."""
        return any(fnmatchcase(opcode, f"{pattern}*") for opcode in self.opcodes)


def inspect(artifact: Artifact) -> Report:
    """Disassemble ``artifact`` and count its instructions.

    Raises what :func:`inspect_all` raises.
    """
    (report,) = inspect_all([artifact])
    return report


def inspect_all(artifacts: Sequence[Artifact]) -> list[Report]:
    """Disassemble ``artifacts``, all for one architecture, and count their instructions.

    One run of nvdisasm reads them all, because its start takes a third of a second.

    Raises
    ------
    MissingDependency
        There is no nvdisasm.
    KernelcatError
        nvdisasm cannot read the machine code, or an artifact holds none.
    """
    if not artifacts:
        return []
    (arch,) = {artifact.arch for artifact in artifacts}
    counts = _opcodes_of(arch, *map(_instructions, artifacts))
    return [_report(artifact, count) for artifact, count in zip(artifacts, counts, strict=True)]


@lru_cache(maxsize=8)
def _opcodes_of(arch: str, *kernels: bytes) -> list[Counter[str]]:
    """The opcodes of each of ``kernels``, machine code for ``arch``."""
    ends = list(itertools.accumulate(map(len, kernels)))
    return opcodes(_nvdisasm(b"".join(kernels), "--binary", arch.replace("sm_", "SM")), ends)


def _report(artifact: Artifact, count: Counter[str]) -> Report:
    metadata = artifact.metadata
    shared_bytes = metadata.get("static_shared_bytes", 0) + metadata.get("shared_bytes", 0)
    return Report(metadata.get("registers"), metadata.get("spill_bytes"), shared_bytes, count)


def _instructions(artifact: Artifact) -> bytes:
    """The machine code of the kernel; of all functions where none has the kernel's name (CuTe)."""
    functions = {
        section.name.removeprefix(".text."): section.body
        for section in elf.sections(artifact.cubin)
        if section.name.startswith(".text.")
    }
    code = functions.get(artifact.kernel, b"".join(functions.values()))
    if not code:
        raise KernelcatError(f"{artifact.kernel} has no machine code")
    return code


def opcodes(sass: str, ends: Sequence[int]) -> list[Counter[str]]:
    """How often each instruction occurs in each of several kernels, of which ``sass`` is the code.

    ``ends`` are the addresses in bytes at which the kernels end, in order.
    """
    counts: list[Counter[str]] = [Counter() for _ in ends]
    for address, opcode in _INSTRUCTION.findall(sass):
        counts[bisect_right(ends, int(address, 16))][opcode] += 1
    return counts


def prove(implementation: Implementation, artifact: Artifact) -> dict[str, bool]:
    """Technique that ``implementation`` claims -> whether the machine code has its instruction.

    Raises what :func:`inspect_all` raises.
    """
    return proofs(implementation, [inspect(artifact)])


def proofs(implementation: Implementation, reports: Sequence[Report]) -> dict[str, bool]:
    """Technique that ``implementation`` claims -> whether one of ``reports`` has its instruction.

    ``reports`` are those of the implementation's kernels.
    """
    return {
        name: any(report.has(pattern) for report in reports)
        for name, pattern in implementation.techniques.items()
    }


def parameters(cubin: bytes, kernel: str) -> list[int]:
    """Bytes of each parameter of ``kernel``, in order, as the machine code expects them.

    Raises
    ------
    KernelcatError
        The cubin has no kernel of this name.
    """
    section = f".nv.info.{kernel}"
    body = next((s.body for s in elf.sections(cubin) if s.name == section), None)
    if body is None:
        raise KernelcatError(f"the machine code has no section {section}")
    sizes: dict[int, int] = {}
    for number, payload in elf.attributes(body):
        if number == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            sizes[ordinal] = packed >> 18
    return [sizes[ordinal] for ordinal in range(len(sizes))]


@lru_cache(maxsize=8)
def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, as nvdisasm prints it.

    Raises
    ------
    MissingDependency
        There is no nvdisasm.
    KernelcatError
        nvdisasm cannot read the cubin.
    """
    return _nvdisasm(cubin, "--print-code")


def _nvdisasm(content: bytes, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel"
        path.write_bytes(content)
        done = children.run([str(disassembler()), *options, str(path)])
    if done.returncode:
        errors = (done.stderr or done.stdout).strip().splitlines() or ["no error message"]
        raise KernelcatError(f"nvdisasm cannot read the machine code: {errors[0]}")
    return done.stdout


def disassembler() -> Path:
    """Path of nvdisasm: from NVIDIA's wheel, else from Triton's, else from a CUDA toolkit.

    Raises
    ------
    MissingDependency
        There is no nvdisasm.
    """
    for folder in _folders():
        path = shutil.which("nvdisasm", path=str(folder))
        if path:
            return Path(path)
    raise MissingDependency(
        "reading machine code needs nvdisasm: pip install nvidia-cuda-nvdisasm, or set CUDA_HOME "
        "to a CUDA toolkit"
    )


def _folders() -> Iterator[Path | str]:
    for site in filter(None, sys.path):
        yield from sorted(Path(site).glob("nvidia/cu[0-9]*/bin"), reverse=True)
    triton = importlib.util.find_spec("triton")
    if triton is not None:
        yield from (Path(p, "backends/nvidia/bin") for p in triton.submodule_search_locations or ())
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield Path(root, "bin")
    yield os.environ.get("PATH", "")
