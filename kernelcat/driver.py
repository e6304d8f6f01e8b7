"""What the NVIDIA driver says about the GPUs of this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kernelcat.errors import LaunchError, MissingDependency


@dataclass(frozen=True)
class Facts:
    """One GPU as its driver describes it. Bytes, hertz, bytes a second, watts.

    ``mig`` is the profile (``1g.10gb``) when the device is a MIG slice; ``power_w`` is the
    enforced limit, None where NVML does not tell.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    clock_hz: float
    mig: str | None = None
    power_w: int | None = None


def call(function: Any, *args: Any) -> Any:
    """Call a ``cuda.bindings.driver`` function; raise ``LaunchError`` unless it succeeded."""
    from cuda.bindings import driver as cu

    status, *values = function(*args)
    if status != cu.CUresult.CUDA_SUCCESS:
        text = cu.cuGetErrorString(status)[1]
        detail = text.decode() if isinstance(text, bytes) else "unknown error"
        raise LaunchError(f"{function.__name__}: {status.name} ({detail})")
    return values[0] if len(values) == 1 else tuple(values) or None


def count() -> int:
    """How many CUDA devices there are; 0 without a driver."""
    try:
        return int(call(initialized().cuDeviceGetCount))
    except MissingDependency:
        return 0


def initialized() -> Any:
    """``cuda.bindings.driver`` after ``cuInit``.

    Raises
    ------
    MissingDependency
        Without a driver or a device; one line.
    """
    try:
        from cuda.bindings import driver as cu

        call(cu.cuInit, 0)
    except ModuleNotFoundError as error:
        raise MissingDependency("CUDA needs cuda-bindings: pip install cuda-bindings") from error
    except LaunchError as error:
        raise MissingDependency(f"no usable NVIDIA GPU in this machine: {error}") from error
    except RuntimeError as error:  # cuda.pathfinder: libcuda.so was not found
        raise MissingDependency(
            "no NVIDIA driver in this machine: install one, or name a GPU with --gpu to cross-tune"
        ) from error
    return cu


def facts(index: int = 0) -> Facts:
    """Facts of device ``index``; ``MissingDependency`` where there is none."""
    cu = initialized()
    available = call(cu.cuDeviceGetCount)
    if index >= available:
        raise MissingDependency(f"there is no GPU {index}: this machine has {available}")
    device = call(cu.cuDeviceGet, index)
    attributes = cu.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(call(cu.cuDeviceGetAttribute, getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"),
                        device))  # fmt: skip

    full_name = call(cu.cuDeviceGetName, 128, device).split(b"\0")[0].decode()
    name, mig = split_mig(full_name)
    bus_bytes = attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return Facts(
        name=name,
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sms=attribute("MULTIPROCESSOR_COUNT"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(call(cu.cuDeviceTotalMem, device)),
        bandwidth=2e3 * attribute("MEMORY_CLOCK_RATE") * bus_bytes,
        clock_hz=1e3 * attribute("CLOCK_RATE"),
        mig=mig,
        power_w=_power_limit(cu, device),
    )


def split_mig(name: str) -> tuple[str, str | None]:
    """``("NVIDIA H100 80GB HBM3", "1g.10gb")`` from the name the driver gives a MIG slice."""
    match = re.fullmatch(r"(?P<name>.*?)\s+MIG\s+(?P<mig>\S+)", name)
    return (match["name"], match["mig"]) if match else (name, None)


def _power_limit(cu: Any, device: Any) -> int | None:
    """The enforced power limit in watts, or None where NVML does not tell (MIG, no NVML)."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        bus_id = call(cu.cuDeviceGetPCIBusId, 32, device).split(b"\0")[0].decode()
        handle = nvml.device_get_handle_by_pci_bus_id_v2(bus_id)
        return round(nvml.device_get_enforced_power_limit(handle) / 1000)
    except (ImportError, RuntimeError, LaunchError, AttributeError, nvml_error()):
        return None


def nvml_error() -> type[Exception]:
    """NVML's exception class, or one that is never raised where NVML's bindings are missing."""
    try:
        from cuda.bindings import nvml

        found: type[Exception] = nvml.NvmlError
        return found
    except (ImportError, AttributeError):
        return NotImplementedError
