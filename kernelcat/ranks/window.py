"""Windows: memory of one rank that other processes map, by the driver's virtual memory management.

The owner exports its memory as a file descriptor; another process of the host imports it. The two
processes may share a GPU. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_size_t, c_ubyte, c_uint64, c_ulonglong, c_ushort, c_void_p

from kernelcat.runtime import driver

WINDOW_BYTES, ERROR_OFFSET = 302057600, 2048
"""Size of a ``Window`` of ``kernelcat/window.cuh``, and where its ``error`` is."""

_PINNED, _POSIX_FILE, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 1, 3  # CUmem... enumerations


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort),
                ("reserved", c_ubyte * 4))  # fmt: skip


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (("type", c_int), ("handle_types", c_int), ("location", _Location),
                ("win32", c_void_p), ("flags", _Flags))  # fmt: skip


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", c_int))


class Memory:
    """Memory that GPU ``device`` reads and writes at ``address``: its own, or another rank's.

    ``handle`` is the driver's handle of the allocation. Raises ``LaunchError`` where the driver
    refuses.
    """

    def __init__(self, handle: c_ulonglong, size: int, device: int) -> None:
        cuda, address = driver.opened(), c_uint64()
        self.handle, self.size, self.device = handle, size, device
        access = _Access(_Location(_ON_DEVICE, device), _READ_AND_WRITE)
        with cuda.using(device):
            cuda.call("cuMemAddressReserve", ctypes.byref(address), c_size_t(size), c_size_t(0),
                      c_uint64(0), c_ulonglong(0))  # fmt: skip
            cuda.call("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_ulonglong(0))
            cuda.call("cuMemSetAccess", address, c_size_t(size), ctypes.byref(access), c_size_t(1))
        self.address = address.value

    @staticmethod
    def allocated(size: int, device: int) -> Memory:
        """New memory of GPU ``device``, zeros, of at least ``size`` bytes."""
        cuda, handle, step = driver.opened(), c_ulonglong(), c_size_t()
        location = _Location(_ON_DEVICE, device)
        properties = _Properties(_PINNED, _POSIX_FILE, location)
        with cuda.using(device):
            cuda.call("cuMemGetAllocationGranularity", ctypes.byref(step),
                      ctypes.byref(properties), c_int(0))  # fmt: skip
            size = -(-size // step.value) * step.value
            cuda.call("cuMemCreate", ctypes.byref(handle), c_size_t(size),
                      ctypes.byref(properties), c_ulonglong(0))  # fmt: skip
            memory = Memory(handle, size, device)
            cuda.call("cuMemsetD8_v2", c_uint64(memory.address), c_ubyte(0), c_size_t(size))
            cuda.call("cuCtxSynchronize")
        return memory

    @staticmethod
    def imported(fd: int, size: int, device: int) -> Memory:
        """The memory that another process exported as ``fd``; closes ``fd``."""
        cuda, handle = driver.opened(), c_ulonglong()
        try:
            with cuda.using(device):
                cuda.call("cuMemImportFromShareableHandle", ctypes.byref(handle), c_void_p(fd),
                          c_int(_POSIX_FILE))  # fmt: skip
        finally:
            os.close(fd)
        return Memory(handle, size, device)

    def exported(self) -> int:
        """A new file descriptor that stands for this memory."""
        cuda, fd = driver.opened(), c_int()
        with cuda.using(self.device):
            cuda.call("cuMemExportToShareableHandle", ctypes.byref(fd), self.handle,
                      c_int(_POSIX_FILE), c_ulonglong(0))  # fmt: skip
        return fd.value

    def free(self) -> None:
        """Unmap; the memory itself lives until every rank has unmapped it."""
        cuda = driver.opened()
        with cuda.using(self.device):
            cuda.call("cuMemUnmap", c_uint64(self.address), c_size_t(self.size))
            cuda.call("cuMemAddressFree", c_uint64(self.address), c_size_t(self.size))
            cuda.call("cuMemRelease", self.handle)
