"""Where a number was measured: GPU, driver and compilers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from kernelcat import __version__
from kernelcat.errors import KernelcatError
from kernelcat.jit import cute
from kernelcat.runtime import driver
from kernelcat.runtime.gpu import Gpu

NONE = "none"
"""What is not in this machine."""

COMPILERS = {"cuda": "nvrtc", "triton": "triton", "cute": "cutlass-dsl"}
"""Language -> its compiler, as an environment names it."""

_PACKAGES = {
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "triton": ("triton",),
    "cutlass-dsl": ("nvidia-cutlass-dsl",),
}


@dataclass(frozen=True)
class Environment:
    """What a measurement depends on besides the kernel.

    ``power_w`` is the power limit in watts and ``mig`` the slice's profile or None. ``driver``,
    ``cuda`` (the version the driver supports) and ``compilers`` are versions, ``none`` where
    there is none.
    """

    sku: str
    name: str
    sms: int
    memory_bytes: int
    power_w: int
    mig: str | None
    driver: str
    cuda: str
    compilers: Mapping[str, str] = field(hash=False)
    kernelcat: str

    @staticmethod
    def capture(gpu: Gpu, device: int | None = None) -> Environment:
        """The environment of ``gpu``.

        ``device`` is the index of the GPU in this machine, or None when ``gpu`` is not here
        (cross-tuning): driver and CUDA are then ``none``.
        """
        return Environment(
            sku=gpu.sku,
            name=gpu.name,
            sms=gpu.sms,
            memory_bytes=gpu.memory_bytes,
            power_w=gpu.power_w,
            mig=gpu.mig,
            driver=NONE if device is None else _driver_version(),
            cuda=NONE if device is None else _cuda_version(),
            compilers=compilers(),
            kernelcat=__version__,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, as :class:`kernelcat.store.Measurement` stores it."""
        return asdict(self)


@cache
def compilers() -> dict[str, str]:
    """Compiler -> the version installed here; ``4.8.1+cu13`` tells which of the DSL's compilers."""
    found = {name: _version(*packages) for name, packages in _PACKAGES.items()}
    if found["cutlass-dsl"] != NONE:
        found["cutlass-dsl"] += f"+{cute.flavor()}"
    return found


def other_compiler(language: str, then: Mapping[str, str]) -> str | None:
    """How a language's compiler differs from ``then``, in words; None where it does not.

    ``then`` are the versions of another environment; a compiler that is not among them, or not
    installed here, does not differ.
    """
    name = COMPILERS[language]
    before, here = then.get(name, NONE), compilers()[name]
    if NONE in (before, here) or before in (here, here.partition("+")[0]):
        return None
    return f"{name} {before} then, {here} here"


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return NONE


@cache
def _driver_version() -> str:
    """NVML's version of the driver (``580.95.05``); NVML is missing on some machines with CUDA."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        return NONE
    try:
        nvml.init_v2()
        return str(nvml.system_get_driver_version())
    except (RuntimeError, nvml.NvmlError):
        return NONE


def _cuda_version() -> str:
    """The newest CUDA the driver supports (``13.0``)."""
    try:
        return driver.opened().version()
    except KernelcatError:
        return NONE
