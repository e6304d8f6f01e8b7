"""CUDA C++ through NVRTC: from a file and one instantiation of a kernel in it to a cubin.

No CUDA toolkit is needed: NVRTC and the headers come from PyPI. The result is machine code, never
PTX: a cubin runs with every driver of the same CUDA major version, but PTX only with a driver at
least as new as the compiler.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat.catalog import source
from kernelcat.errors import CompileError, MissingDependency
from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import version_of

OPTIONS = ("-std=c++20", "--ptxas-options=-v")
INSTALL = (
    "pip install 'nvidia-cuda-nvrtc>=13.0' 'nvidia-cuda-runtime>=13.0' 'nvidia-cuda-cccl>=13.0' "
    "'nvidia-cuda-crt>=13.0'"
)

_ERROR = r"^(?P<where>.+\(\d+\)): (?:catastrophic )?error(?: #[^:]*)?: (?P<what>.*)"
_USAGE = {
    "registers": r"Used (\d+) registers",
    "spill_bytes": r"(\d+) bytes spill stores",
    "static_shared_bytes": r"(\d+) bytes smem",
    "stack_bytes": r"(\d+) bytes stack frame",
}


@dataclass(frozen=True)
class CudaSource:
    """One instantiation of a kernel.

    Attributes
    ----------
    path : the file, relative to ``kernels/cuda`` (``gemm/wgmma.cu``) of the catalog or of a user's
        entries
    kernel : NVRTC name expression (``kernelcat::gemm_wgmma<128, 256, 64>``); only that instance is
        compiled, so one file may hold templates for several architectures
    definitions : preprocessor macros, name and value

    Includes are searched in ``kernels/cuda/include``, in the file's folder and in CUDA's headers.
    """

    path: str
    kernel: str
    definitions: tuple[tuple[str, str | int], ...] = ()

    language = "cuda"

    @property
    def file(self) -> Path:
        """The file with its folder."""
        return source.cuda_file(self.path)

    def place(self) -> str:
        return self.path

    def text(self) -> str:
        """Tokens of the file and of all catalog files that it includes."""
        return source.cuda_text(self.file)

    def files(self) -> list[Path]:
        return source.cuda_files(self.file)

    def instance(self) -> list[Any]:
        return [self.kernel, self.definitions, OPTIONS]

    def digest(self) -> str:
        return source.instance_digest(self.text(), self.instance())

    def toolchain(self) -> str:
        """Versions of NVRTC and of the headers it reads."""
        parts = [f"nvrtc {_nvrtc_version()}"]
        for wheel in ("runtime", "cccl", "crt"):
            parts.append(f"{wheel} {version_of(f'nvidia-cuda-{wheel}') or 'toolkit'}")
        return ", ".join(parts)

    def runtime(self) -> str:
        return ""

    def compile(self, arch: str) -> Artifact:
        """Compile for ``arch``.

        Raises
        ------
        CompileError
            The message is NVRTC's first error with file and line; ``log`` holds all of its output.
        MissingDependency
            NVRTC or CUDA's headers are missing, or this NVRTC is too old for ``arch``.
        """
        nvrtc = _nvrtc()
        _check_arch(nvrtc, arch)
        if not self.file.is_file():
            raise CompileError(f"there is no CUDA source {self.path} under kernels/cuda")
        folders = (source.cuda_root() / "include", self.file.parent, *header_folders())
        options = [f"--gpu-architecture={arch}", *OPTIONS]
        options += [f"-D{name}={value}" for name, value in self.definitions]
        options += [f"-I{folder}" for folder in folders]
        name, cubin, log = _compile(nvrtc, self, options)
        return Artifact("cuda", arch, name, cubin, cubin, _resources(log, name))


@cache
def header_folders() -> tuple[Path, ...]:
    """The folders of CUDA's headers: those of the PyPI wheels, else of an installed toolkit.

    Raises
    ------
    MissingDependency
        No group of folders has ``cuda_bf16.h``, ``crt`` and CCCL's ``cuda/std``.
    """
    for group in _header_candidates():
        folders = tuple(dict.fromkeys(f for root in group for f in (root, root / "cccl")))
        headers = ("cuda_bf16.h", "crt/mma.h", "cuda/std/cstdint")
        if all(any((folder / name).is_file() for folder in folders) for name in headers):
            return tuple(folder for folder in folders if folder.is_dir())
    raise MissingDependency(f"CUDA's headers are not installed: {INSTALL}")


def _header_candidates() -> list[list[Path]]:
    """Groups of folders; each group holds the headers of one version of CUDA."""
    groups = []
    for site in map(Path, dict.fromkeys(filter(None, sys.path))):
        nvidia = site / "nvidia"
        if nvidia.is_dir():
            groups += [[root / "include"] for root in sorted(nvidia.glob("cu[0-9]*"), reverse=True)]
            groups.append(sorted(nvidia.glob("cuda_*/include")))
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        groups += [[Path(root) / "include"]] if root else []
    return groups


@cache
def _nvrtc_version() -> str:
    wheel = version_of("nvidia-cuda-nvrtc")
    return wheel or ".".join(map(str, _nvrtc().nvrtcVersion()[1:]))


def _nvrtc() -> Any:
    """The bindings of NVRTC; raises ``MissingDependency``."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda.bindings raises RuntimeError and its own exception classes
        raise MissingDependency(f"CUDA C++ needs NVRTC ({error}): {INSTALL}") from error
    return nvrtc


def _check_arch(nvrtc: Any, arch: str) -> None:
    supported = nvrtc.nvrtcGetSupportedArchs()[1]
    if int(arch.removeprefix("sm_").rstrip("af")) not in supported:
        names = ", ".join(f"sm_{number}" for number in supported)
        raise MissingDependency(
            f"NVRTC {_nvrtc_version()} cannot compile for {arch}, only for {names}: "
            "pip install --upgrade nvidia-cuda-nvrtc"
        )


def _compile(nvrtc: Any, kernel: CudaSource, options: list[str]) -> tuple[str, bytes, str]:
    """Compile one instance: the kernel's mangled name, the cubin and the log."""
    text = kernel.file.read_bytes()
    program = _ok(nvrtc, nvrtc.nvrtcCreateProgram(text, kernel.path.encode(), 0, None, None))
    try:
        _ok(nvrtc, nvrtc.nvrtcAddNameExpression(program, kernel.kernel.encode()))
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _bytes(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_headline(kernel, status.name, log), log)
        name = _ok(nvrtc, nvrtc.nvrtcGetLoweredName(program, kernel.kernel.encode()))
        return name.decode(), _bytes(nvrtc, "CUBIN", program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(nvrtc: Any, what: str, program: Any) -> bytes:
    size = _ok(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = bytes(size)
    _ok(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


def _ok(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """The value of a call of NVRTC; ``CompileError`` where the call failed."""
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed: {result[0].name}")
    return result[1] if len(result) > 1 else None


def _headline(kernel: CudaSource, status: str, log: str) -> str:
    """One line: the first error with its file and line, the path relative to CUDA sources."""
    match = re.search(_ERROR, log, re.MULTILINE)
    if match is None:
        lines = (line.strip() for line in log.splitlines() if "error" in line or "fatal" in line)
        return f"{kernel.path}: {next(lines, status)}"
    where, what = match["where"], match["what"]
    if where.startswith("__nv_name_map"):  # the file that NVRTC makes from name expressions
        return f"{kernel.path}: error in {kernel.kernel!r}: {what}"
    for folder in (source.cuda_root(), *header_folders()):
        where = where.removeprefix(f"{folder}/")
    return f"{where}: error: {what}"


def _resources(log: str, kernel: str) -> dict[str, Any]:
    """Resource usage of ``kernel`` by ptxas, and warnings (serialized wgmma, ignored bounds)."""
    section = log.partition(f"entry function '{kernel}'")[2].partition("Compiling entry")[0]
    usage: dict[str, Any] = {}
    for name, pattern in _USAGE.items():
        match = re.search(pattern, section)
        usage[name] = int(match[1]) if match else 0
    notes = [li.strip() for li in log.splitlines() if "warning" in li or "Potential" in li]
    return {**usage, "warnings": notes}
