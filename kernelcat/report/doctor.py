"""What this machine has, what it lacks, how to install that, and which entries run here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import starmap

from kernelcat import catalog
from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.runtime import gpu
from kernelcat.verify.sanitizer import sanitizer_path


@dataclass(frozen=True)
class Finding:
    """The state of one requirement.

    Attributes
    ----------
    what : the requirement
    found : whether this machine has it
    detail : version, path or number, or why it is missing
    remedy : what to run or install if it is missing
    """

    what: str
    found: bool
    detail: str
    remedy: str = ""


_MODULES = (
    ("NVRTC bindings", "cuda.bindings", "cuda-bindings", "pip install kernelcat"),
    ("NVRTC", None, "nvidia-cuda-nvrtc", "pip install nvidia-cuda-nvrtc"),
    ("CuPy", "cupy", "cupy-cuda13x", "pip install 'kernelcat[cupy]'"),
    ("Triton", "triton", "triton", catalog.INSTALL["triton"]),
    ("CuTe DSL", "cutlass", "nvidia-cutlass-dsl", catalog.INSTALL["cute"]),
    ("torch", "torch", "torch", "pip install 'kernelcat[torch]'"),
)


def examine() -> list[Finding]:
    """All findings, the GPU's first. Imports no compiler."""
    return [_gpu(), *starmap(_module, _MODULES), _sanitizer(), *_entries()]


def _gpu() -> Finding:
    try:
        detected = gpu.detect()
    except KernelcatError as error:
        return Finding("GPU", False, str(error), "without a GPU: kernelcat tune ENTRY --gpu h200")
    limits = f"{detected.sms} SMs, {detected.memory_bytes >> 30} GiB, {detected.power_w} W"
    return Finding("GPU", True, f"{detected.name} ({detected.sku}, {detected.arch}): {limits}")


def _module(what: str, module: str | None, package: str, remedy: str) -> Finding:
    present = module is None or catalog.installed(module)
    try:
        return Finding(what, present, metadata.version(package), "" if present else remedy)
    except metadata.PackageNotFoundError:
        return Finding(what, False, f"{package} is not installed", remedy)


def _sanitizer() -> Finding:
    path = sanitizer_path()
    remedy = "" if path else "install the CUDA toolkit (only receipts need it)"
    return Finding("compute-sanitizer", path is not None, path or "not found", remedy)


def _entries() -> Iterator[Finding]:
    """For each entry, the implementations that serve this GPU; without a GPU, all of them."""
    try:
        arch = gpu.detect().arch
    except MissingDependency:
        arch = None
    for name in catalog.names():
        serving = [
            i.name.removeprefix(f"{name}/")
            for i in catalog.implementations(name)
            if arch is None or i.serves(arch)
        ]
        where = f"on {arch}" if arch else "without a GPU: compile and predict only"
        yield Finding(f"entry {name}", bool(serving), f"{', '.join(serving) or 'nothing'} {where}")
