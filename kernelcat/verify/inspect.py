"""What is in the machine code: registers, spills, and the instructions that prove a technique.

The names that techniques have, as NVRTC 13.5 and nvdisasm 13.1 give them for sm_90a and sm_100a
(a pattern is a prefix, ``*`` stands for anything):

======================  ==========================  ===============================================
technique               pattern                     PTX
======================  ==========================  ===============================================
16-byte loads           ``LDG*128``, ``STG*128``    ``ld.global.v4``, ``st.global.v4``
asynchronous copy       ``LDGSTS``                  ``cp.async``
1-D bulk copy           ``UBLKCP.S.G``              ``cp.async.bulk.shared::cluster.global``
1-D bulk store          ``UBLKCP.G.S``              ``cp.async.bulk.global.shared::cta``
1-D bulk multicast      ``UBLKCP*MULTICAST``        ``... .multicast::cluster``
between blocks          ``UBLKCP.S.S``              ``cp.async.bulk.shared::cluster.shared::cta``
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
import subprocess
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

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)

_KPARAM_INFO = 0x17


@dataclass(frozen=True)
class Report:
    """One kernel's machine code.

    Attributes
    ----------
    registers : a thread's, at launch; None where the compiler does not tell
    spill_bytes : a thread's; None where the compiler does not tell
    shared_bytes : static shared memory, for Triton all of it
    opcodes : how often each instruction occurs, modifiers included (``UTMALDG.2D.MULTICAST``)
    """

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    opcodes: Counter[str]

    def has(self, pattern: str) -> bool:
        """Whether an opcode starts with ``pattern``; ``*`` stands for anything."""
        return any(fnmatchcase(opcode, f"{pattern}*") for opcode in self.opcodes)


def inspect(artifact: Artifact) -> Report:
    """Disassemble ``artifact`` and count its instructions.

    Raises
    ------
    MissingDependency
        There is no nvdisasm.
    """
    told = artifact.metadata
    return Report(
        told.get("registers"),
        told.get("spill_bytes"),
        told.get("static_shared_bytes", 0) + told.get("shared_bytes", 0),
        opcodes(disassemble(artifact.cubin), artifact.kernel),
    )


def prove(implementation: Implementation, artifact: Artifact) -> dict[str, bool]:
    """For each technique that ``implementation`` claims, whether its instruction is in the code."""
    report = inspect(artifact)
    return {name: report.has(pattern) for name, pattern in implementation.techniques.items()}


def opcodes(sass: str, kernel: str) -> Counter[str]:
    """Instructions of ``kernel``; of every function where it is not one of them (CuTe)."""
    parts = _SECTION.split(sass)
    functions = dict(zip(parts[1::2], parts[2::2], strict=True))
    own = functions.get(kernel)
    return Counter(_INSTRUCTION.findall(sass if own is None else own))


def parameters(cubin: bytes, kernel: str) -> list[int]:
    """Bytes that each parameter of ``kernel`` takes, in order, as the machine code expects them."""
    wanted = f".nv.info.{kernel}"
    body = next((s.body for s in elf.sections(cubin) if s.name == wanted), None)
    if body is None:
        raise KernelcatError(f"the machine code has no section {wanted}")
    sizes: dict[int, int] = {}
    for number, payload in elf.attributes(body):
        if number == _KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            sizes[ordinal] = packed >> 18
    return [sizes[ordinal] for ordinal in range(len(sizes))]


@lru_cache(maxsize=8)
def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, as nvdisasm prints it; ``MissingDependency`` without nvdisasm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(disassembler()), "--print-code", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise KernelcatError(f"nvdisasm cannot read the machine code: {said[0]}")
    return done.stdout


def disassembler() -> Path:
    """nvdisasm: of its own wheel, else of Triton's, else of a CUDA toolkit.

    Raises
    ------
    MissingDependency
        None is there.
    """
    for folder in _folders():
        found = shutil.which("nvdisasm", path=str(folder))
        if found:
            return Path(found)
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
