"""Links between this machine's GPUs, which are named by their PCI bus ids."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import byref, c_int

from kernelcat.runtime import driver
from kernelcat.runtime.devices import VISIBLE

_NATIVE_ATOMICS = 3  # CUdevice_P2PAttribute: NVLink has atomic operations, PCIe has not


def _numbers() -> dict[str, int]:
    """Bus id -> number of the GPU in this process."""
    cuda = driver.opened()
    return {cuda.pci_bus_id(number): number for number in range(cuda.count())}


def why_no_access(number: int, bus_ids: Iterable[str]) -> str | None:
    """Why GPU ``number`` cannot write to the memory of the GPUs ``bus_ids``, or None."""
    cuda, numbers = driver.opened(), _numbers()
    for bus_id in bus_ids:
        if bus_id not in numbers:
            return f"GPU {bus_id} of another rank is not visible here: see {VISIBLE}"
        can = c_int(numbers[bus_id] == number)
        if not can.value:
            cuda.call("cuDeviceCanAccessPeer", byref(can), c_int(number), c_int(numbers[bus_id]))
        if not can.value:
            return f"GPU {cuda.pci_bus_id(number)} has no peer access to GPU {bus_id}"
    return None


def are_nvlink(number: int, bus_ids: Iterable[str]) -> bool:
    """Whether NVLink, not PCIe, connects GPU ``number`` with all other GPUs of ``bus_ids``."""
    numbers = _numbers()
    others = [numbers[bus_id] for bus_id in bus_ids if numbers[bus_id] != number]
    value = c_int()
    for other in others:
        driver.opened().call("cuDeviceGetP2PAttribute", byref(value), c_int(_NATIVE_ATOMICS),
                             c_int(number), c_int(other))  # fmt: skip
        if not value.value:
            return False
    return True
