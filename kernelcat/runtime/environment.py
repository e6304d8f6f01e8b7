"""The environment of a measurement: GPU, driver and compilers, as plain data."""

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
"""Version of a driver or compiler that is not in this machine."""

COMPILERS = {"cuda": "nvrtc", "triton": "triton", "cute": "cutlass-dsl"}
"""Language -> name of its compiler in an environment."""

_PACKAGES = {
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "triton": ("triton",),
    "cutlass-dsl": ("nvidia-cutlass-dsl",),
}


@dataclass(frozen=True)
class Environment:
    """Everything but the kernel that a measurement depends on.

    ``power_w`` is the power limit in watts, and ``mig`` the profile of a MIG slice or None.
    ``driver``, ``cuda`` (the version that the driver supports) and ``compilers`` are versions, or
    :data:`NONE`.
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
        """The environment of ``gpu`` with the software of this machine.

        ``device`` is the index of the GPU in this machine, or None for a GPU of another machine
        (cross-tuning): then the versions of driver and CUDA are :data:`NONE`.
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
        """The fields as a dictionary, as :class:`kernelcat.store.Measurement` stores them."""
        return asdict(self)


@cache
def compilers() -> dict[str, str]:
    """Compiler -> installed version. CuTe's also names the DSL's flavor: ``4.8.1+cu13``."""
    versions = {name: _version(*packages) for name, packages in _PACKAGES.items()}
    if versions["cutlass-dsl"] != NONE:
        versions["cutlass-dsl"] += f"+{cute.flavor()}"
    return versions


def other_compiler(language: str, then: Mapping[str, str]) -> str | None:
    """How the installed compiler of a language differs from that of ``then``; None for no change.

    ``then`` maps compilers to versions in another environment. A compiler that is missing in
    ``then`` or here counts as equal, and so does a version of ``then`` without a flavor.
    """
    name = COMPILERS[language]
    before, here = then.get(name, NONE), compilers()[name]
    if NONE in (before, here) or before in (here, here.partition("+")[0]):
        return None
    return f"{name} {before} then, {here} here"


def _version(*packages: str) -> str:
    """The version of the first of ``packages`` that is installed."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return NONE


@cache
def _driver_version() -> str:
    """The driver's version from NVML (``580.95.05``); some machines with CUDA have no NVML."""
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
    """The newest CUDA version that the driver supports (``13.0``)."""
    try:
        return driver.opened().version()
    except KernelcatError:
        return NONE
