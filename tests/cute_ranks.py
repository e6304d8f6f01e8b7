"""CuTe kernels of several ranks on the host (``cute_threads``): windows are memory by its address.

Importing this replaces the DSL, so it belongs into a process of its own.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

import cute_threads  # noqa: F401  (replaces the DSL)
import numpy as np
from cute_host import STORAGE, Pointer, Value, Word, cute, cutlass, here, narrowed, size, widened

from kernelcat import dtypes
from kernelcat.catalog.implementation import Float32, Program
from kernelcat.catalog.implementation import Pointer as PointerParam

POLL_S = 1e-4
"""Between two looks at a word that another process writes."""


class Signed(int):
    """A 32-bit signed integer, also from the bits of an unsigned one."""

    def __new__(cls, value: Any = 0) -> Signed:
        return int.__new__(cls, (int(value) + (1 << 31)) % (1 << 32) - (1 << 31))


STORAGE[Signed] = "int32"
cutlass.Int32 = Signed
cute.size = lambda x, mode=None: size(x.shape[mode[0]] if mode else x.shape)
cute.math = SimpleNamespace(
    absf=lambda x: Value(abs(np.float32(x))), rsqrt=lambda x: Value(1 / np.sqrt(np.float32(x)))
)
cute.arch.warp_reduction_max = lambda value, threads_in_group: max(
    here.warp.exchange("max", value)[here.lane // threads_in_group * threads_in_group :][
        :threads_in_group
    ]
)


def words_at(address: int, count: int) -> Any:
    return (ctypes.c_uint32 * count).from_address(int(address))


def load(count: int, address: int) -> tuple[Word, ...]:
    words = tuple(map(Word, words_at(address, count)))
    if not all(words):
        time.sleep(POLL_S)
    return words


def store(address: int, *words: int) -> None:
    for i, word in enumerate(words):
        words_at(address, len(words))[i] = int(word)


def load_flagged(address: int) -> tuple[Word, Word]:
    both = ctypes.c_uint64.from_address(int(address)).value
    if both >> 32 == 0:
        time.sleep(POLL_S)
    return Word(both), Word(both >> 32)


def store_flagged(address: int, word: int, flag: int) -> None:
    ctypes.c_uint64.from_address(int(address)).value = int(flag) << 32 | int(word)


def e4m3x4(values: Any) -> Word:
    codes = dtypes.encode(np.float32([values[i] for i in range(4)]), "float8_e4m3fn")
    return Word(int.from_bytes(codes.tobytes(), "little"))


def replace(name: str, **functions: Any) -> None:
    """Replace functions of a module of kernels/cute/common, before others import them."""
    module = import_module(f"kernelcat.kernels.cute.common.{name}")
    for key, function in functions.items():
        assert hasattr(module, key)
        setattr(module, key, function)


replace(
    "windows", load_word=lambda address: load(1, address)[0], store_word=store,
    load_words=lambda address: load(4, address), store_words=store,
    load_flagged=load_flagged, store_flagged=store_flagged,
)  # fmt: skip
replace(
    "pairs", halves=lambda word, dtype: tuple(map(Value, widened(word, dtype))),
    joined=lambda low, high, dtype: narrowed([low, high], dtype),
)  # fmt: skip
replace("quantize", divide=lambda x, y: Value(np.float32(x) / np.float32(y)), e4m3x4=e4m3x4)
cutlass.__spec__ = PathFinder.find_spec("cutlass")  # as of an installed package
for entry in ("all_reduce", "moe_dispatch"):
    import_module(f"kernelcat.kernels.cute.{entry}").THREADS = 64  # type: ignore[attr-defined]
for kernel in ("all_reduce.slots", "moe_dispatch.send", "moe_dispatch.arrive",
               "moe_dispatch.receive"):  # fmt: skip
    import_module(f"kernelcat.kernels.cute.{kernel}")
for mocked in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
    del sys.modules[mocked]  # kernels in CUDA C++ need the real one


def run(program: Program, arrays: Mapping[str, Any]) -> None:
    """All launches of a program, in place; workspaces begin as garbage."""
    memory = {name: array.reshape(-1) for name, array in arrays.items()}
    for name, num_bytes in program.workspaces.items():
        memory[name] = np.full(num_bytes, 0xCD, "uint8")
    nothing = np.zeros(0, "uint8")

    def value(param: Any, kind: str) -> Any:
        if isinstance(param, PointerParam):
            return Pointer(memory.get(param.tensor, nothing).view(kind[1:]))
        return Value(param.value) if isinstance(param, Float32) else param.value

    for step in program.steps:
        kernel = getattr(import_module(step.source.module), step.source.builder)
        values = map(value, step.params, step.source.params)
        kernel(**dict(step.source.constants))(*values, stream=None)
