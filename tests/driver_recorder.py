"""A stand-in for the CUDA driver, which records the launches of `test_launcher.py`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Recorder:
    """The functions of ``kernelcat.runtime.driver``; each call is recorded in a list.

    ``formats`` has a letter of the module ``struct`` for each parameter of the kernel; ``m`` is a
    TMA tensor map.
    """

    def __init__(self) -> None:
        self.formats = ""
        self.launches: list[dict[str, Any]] = []
        self.limits: list[tuple[int, int]] = []
        self.loaded: list[tuple[bytes, str, int]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.alive: dict[int, int] = {}
        self.statuses: list[int] = []
        self.contexts: list[str] = []
        self.has_context = True

    def launch(self, config: Any, function: Any, params: Any, extra: None) -> int:
        config = config._obj
        values = [self._value(*pair) for pair in zip(self.formats, params, strict=True)]
        attributes = [config.attributes[i] for i in range(config.num_attributes)]
        self.launches.append(
            {
                "function": function.value,
                "params": values,
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream or 0,
                "attributes": {a.id: tuple(a.value[:3]) for a in attributes},
                "extra": extra,
            }
        )
        return self.statuses.pop(0) if self.statuses else 0

    def _value(self, letter: str, address: int) -> Any:
        if letter == "m":
            assert address % 64 == 0
            return struct.unpack("<Q", ctypes.string_at(address, 128)[:8])[0]
        return struct.unpack(letter, ctypes.string_at(address, struct.calcsize(letter)))[0]

    def function(self, code: bytes, name: str, device: int) -> ctypes.c_void_p:
        self.loaded.append((code, name, device))
        return ctypes.c_void_p(0xF00 + len(self.loaded))

    def raise_limit(self, function: Any, attribute: int, value: int, device: int) -> None:
        self.limits.append((attribute, value))

    def allocate(self, size: int, device: int) -> int:
        address = 0x1000000 * (len(self.alive) + 1)
        self.alive[address] = size
        return address

    def free(self, pointer: int, device: int) -> None:
        self.alive[pointer] = 0

    def encode_tiled(self, descriptor: int, *arguments: Any) -> None:
        self.encoded.append(arguments)
        ctypes.memmove(descriptor, struct.pack("<Q120x", arguments[1]), 128)

    def describe(self, status: int) -> str:
        return f"CUDA_ERROR_{status} (as text)"

    def adopt(self, device: int) -> bool:
        adopted, self.has_context = not self.has_context, True
        return adopted

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        self.contexts.append("push")
        yield
        self.contexts.append("pop")
