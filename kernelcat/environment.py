"""Where a number was measured: GPU, driver and compilers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from kernelcat.gpu import Gpu

NONE = "none"
"""What is not in this machine."""

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
            compilers={name: _version(*packages) for name, packages in _PACKAGES.items()},
            kernelcat=_version("kernelcat"),
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, as :class:`kernelcat.store.Measurement` stores it."""
        return asdict(self)


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


@cache
def _cuda_version() -> str:
    """The newest CUDA the driver supports (``13.0``)."""
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):
        return NONE
    return f"{version // 1000}.{version % 1000 // 10}" if int(status) == 0 else NONE
