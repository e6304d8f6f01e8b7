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
import os
import re
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from kernelcat.catalog.implementation import Implementation
from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.jit import elf
from kernelcat.jit.artifact import Artifact
from kernelcat.runtime import children

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)

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

    Raises
    ------
    MissingDependency
        There is no nvdisasm.
    KernelcatError
        nvdisasm cannot read the machine code.
    """
    metadata = artifact.metadata
    return Report(
        metadata.get("registers"),
        metadata.get("spill_bytes"),
        metadata.get("static_shared_bytes", 0) + metadata.get("shared_bytes", 0),
        opcodes(disassemble(artifact.cubin), artifact.kernel),
    )


def prove(implementation: Implementation, artifact: Artifact) -> dict[str, bool]:
    """Technique that ``implementation`` claims -> whether the machine code has its instruction.

    Raises what :func:`inspect` raises.
    """
    report = inspect(artifact)
    return {name: report.has(pattern) for name, pattern in implementation.techniques.items()}


def opcodes(sass: str, kernel: str) -> Counter[str]:
    """How often each instruction occurs in ``kernel``, given what :func:`disassemble` returns.

    Where no function has the name ``kernel`` (CuTe), the instructions of all functions.
    """
    parts = _SECTION.split(sass)
    functions = dict(zip(parts[1::2], parts[2::2], strict=True))
    return Counter(_INSTRUCTION.findall(functions.get(kernel, sass)))


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(disassembler()), "--print-code", str(path)]
        done = children.run(command)
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
