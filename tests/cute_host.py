"""CuTe device code on the host, lane by lane: as much of the DSL as a few kernels use.

These are `nvfp4_matmul`'s kernels, and `moe_gemm`'s but for its pipeline.

Importing this replaces the DSL in ``sys.modules``, so it belongs into a process of its own. Tensors
are views of NumPy memory that check their coordinates, inline PTX is computed by what it says, and
``gemm`` is mma.m16n8k16 by PTX's own table of fragments, lanes being threads that meet there. What
is checked is a kernel's own source: where it reads and writes, and every bit of its arithmetic.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from typing import Any, NamedTuple, Self
from unittest.mock import MagicMock

import numpy as np

from kernelcat import dtypes

here = threading.local()
"""``lane``: of the thread that runs."""


class Kind(str):
    """An element type by name; values of such elements are held as bits."""

    __slots__ = ("width",)

    def __new__(cls, name: str, width: int) -> Kind:
        self = str.__new__(cls, name)
        self.width = width
        return self


class Word(int):
    """A 32-bit unsigned integer."""

    most = 0xFFFFFFFF

    def __new__(cls, value: Any = 0) -> Self:
        return int.__new__(cls, int(value) & cls.most)

    def __lshift__(self, other: Any) -> Self:
        return type(self)(int(self) << int(other))

    def __rshift__(self, other: Any) -> Self:
        return type(self)(int(self) >> int(other))

    def __or__(self, other: Any) -> Self:
        return type(self)(int(self) | int(other))

    def __and__(self, other: Any) -> Self:
        return type(self)(int(self) & int(other))

    def __add__(self, other: Any) -> Self:
        return type(self)(int(self) + int(other))

    def __sub__(self, other: Any) -> Self:
        return type(self)(int(self) - int(other))

    def __invert__(self) -> Self:
        return type(self)(~int(self))


class Long(Word):
    """A 64-bit unsigned integer."""

    most = 0xFFFFFFFFFFFFFFFF


class Value(float):
    """A float32."""

    width, inf = 32, float("inf")

    def __new__(cls, value: Any = 0.0) -> Value:
        return float.__new__(cls, np.float32(value))

    def __add__(self, other: Any) -> Value:
        return Value(np.float32(self) + np.float32(other))

    def __sub__(self, other: Any) -> Value:
        return Value(np.float32(self) - np.float32(other))

    def __mul__(self, other: Any) -> Value:
        return Value(np.float32(self) * np.float32(other))

    def __truediv__(self, other: Any) -> Value:
        return Value(np.float32(self) / np.float32(other))

    __radd__ = __add__

    def to(self, element: str) -> Rounded:
        return Rounded(self, element)


class Rounded(Value):
    """A float32 that an element of ``kind`` holds exactly."""

    def __new__(cls, value: Value, kind: str) -> Rounded:
        bits = dtypes.encode(np.float32([value]), kind)
        self = Value.__new__(cls, dtypes.decode(bits, kind)[0])
        self.bits = bits.view(f"uint{8 * bits.itemsize}")[0]
        return self


# ---- tensors ------------------------------------------------------------------------------------


def size(shape: Any) -> int:
    return int(np.prod([size(s) for s in shape])) if isinstance(shape, tuple) else shape


def compact(shape: Any, step: int = 1) -> Any:
    """Strides of a column-major tensor, nested as the shape is."""
    if not isinstance(shape, tuple):
        return step
    strides = []
    for extent in shape:
        strides.append(compact(extent, step))
        step *= size(extent)
    return tuple(strides)


def leaves(nested: Any) -> list[int]:
    return [x for part in nested for x in leaves(part)] if isinstance(nested, tuple) else [nested]


class Pointer:
    def __init__(self, memory: np.ndarray, offset: int = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + int(offset))

    def align(self, num_bytes: int) -> Pointer:
        assert self.offset * self.memory.itemsize % num_bytes == 0
        return self


class Layout(NamedTuple):
    shape: Any
    stride: Any

    def with_ones(self, rank: int) -> Layout:
        more = rank - len(self.shape)
        return Layout(self.shape + (1,) * more, self.stride + (0,) * more)


SCALARS = {np.dtype("uint32").char: Word, np.dtype("float32").char: Value}


class Tensor:
    def __init__(self, iterator: Pointer, shape: Any, stride: Any = None) -> None:
        self.iterator = iterator
        if isinstance(shape, Layout):
            shape, stride = shape.shape, shape.stride
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        self.stride = compact(self.shape) if stride is None else stride

    def _at(self, coordinates: Any) -> tuple[Pointer, tuple, tuple]:
        offset, shape, stride = 0, [], []
        given = coordinates if isinstance(coordinates, tuple) else (coordinates,)
        assert len(given) == len(self.shape), (given, self.shape)
        for i, extent, step in zip(given, self.shape, self.stride, strict=True):
            if i is None:
                shape.append(extent)
                stride.append(step)
                continue
            if isinstance(extent, int):
                assert 0 <= i < extent, (coordinates, self.shape)
                offset += int(i) * step
                continue
            for x, most, by in zip(leaves(i), leaves(extent), leaves(step), strict=True):
                assert 0 <= x < most, (coordinates, self.shape)
                offset += int(x) * by
        return self.iterator + offset, tuple(shape), tuple(stride)

    def __getitem__(self, coordinates: Any) -> Any:
        if type(coordinates) is int and type(self.shape[0]) is int:  # the fast way for vectors
            assert len(self.shape) == 1 and 0 <= coordinates < self.shape[0], (
                coordinates, self.shape,
            )  # fmt: skip
            memory = self.iterator.memory
            value = memory[self.iterator.offset + coordinates * self.stride[0]]
            return SCALARS.get(memory.dtype.char, lambda v: v)(value)
        place, shape, stride = self._at(coordinates)
        if shape:
            return Tensor(place, shape, stride)
        value = place.memory[place.offset]
        return SCALARS.get(value.dtype.char, lambda v: v)(value)

    def __setitem__(self, coordinates: Any, value: Any) -> None:
        if type(coordinates) is int and type(self.shape[0]) is int:
            assert len(self.shape) == 1 and 0 <= coordinates < self.shape[0], (
                coordinates, self.shape,
            )  # fmt: skip
            place = self.iterator.offset + coordinates * self.stride[0]
            self.iterator.memory[place] = value
            return
        place, shape, _ = self._at(coordinates)
        assert not shape
        is_coded = isinstance(value, Rounded) and place.memory.dtype == value.bits.dtype
        place.memory[place.offset] = value.bits if is_coded else value

    @property
    def element_type(self) -> Any:
        return next(kind for kind, name in STORAGE.items() if name == self.iterator.memory.dtype)

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.stride)

    def places(self) -> list[int]:
        """Offsets of all elements in memory, in the order of their coordinates."""
        steps, coordinates = leaves(self.stride), [range(s) for s in reversed(leaves(self.shape))]
        return [
            self.iterator.offset + sum(i * s for i, s in zip(reversed(c), steps, strict=True))
            for c in itertools.product(*coordinates)
        ]

    def load(self) -> np.ndarray:
        return self.iterator.memory[self.places()]

    def store(self, values: Any) -> None:
        self.iterator.memory[self.places()] = values

    fill = store


def registers(shape: Any, element: Any) -> Tensor:
    """A tensor of zeros."""
    return Tensor(Pointer(np.zeros(size(shape), STORAGE[element])), shape)


def on(array: np.ndarray, shape: Any, stride: Any = None) -> Tensor:
    """A tensor over a copy of an array's bytes, as they are."""
    return Tensor(Pointer(np.ascontiguousarray(array).reshape(-1).copy()), shape, stride)


def copy(source: Tensor, target: Tensor) -> None:
    start, end = source.places(), target.places()
    assert len(start) == len(end)
    target.iterator.memory[end] = source.iterator.memory[start]


def predicated_copy(source: Tensor, target: Tensor, pred: Tensor | None) -> None:
    """cp.async, which writes zeros where the predicate is false."""
    if pred is None or pred[0]:
        copy(source, target)
    else:
        target.fill(0)


def as_words(fragment: Tensor) -> Tensor:
    """A fragment of 16-bit elements as words: its first mode's first extent, 2, becomes 1."""
    assert fragment.iterator.offset == 0
    if fragment.shape[0] == 2:
        memory = fragment.iterator.memory.view(np.uint32)
        return Tensor(Pointer(memory), fragment.shape[1:])
    assert fragment.shape[0][0] == 2
    shape = ((1, *fragment.shape[0][1:]), *fragment.shape[1:])
    stride = (
        (0, *(s // 2 for s in fragment.stride[0][1:])),
        *(s // 2 for s in fragment.stride[1:]),
    )
    return Tensor(Pointer(fragment.iterator.memory.view(np.uint32)), shape, stride)


# ---- instructions -------------------------------------------------------------------------------


def widened(bits: Any, kind: str) -> np.ndarray:
    """Float32 of the 16-bit floats in a word, the low one first."""
    halves = np.array([int(bits) & 0xFFFF, int(bits) >> 16 & 0xFFFF], np.uint16)
    return dtypes.decode(halves.view(dtypes.STORAGE[kind]), kind)


def narrowed(values: Any, kind: str) -> Word:
    low, high = dtypes.encode(np.float32(values), kind).view("uint16")
    return Word(int(low) | int(high) << 16)


def fma2(text: str, x: int, y: int) -> Word:
    """Which must be exact here: -0 is what is added."""
    kind = "float16" if ".f16x2" in text else "bfloat16"
    exact = widened(x, kind).astype("float64") * widened(y, kind)
    found = narrowed(exact, kind)
    assert (widened(found, kind) == exact).all()
    return found


def permuted(text: str, x: int, y: int) -> tuple[Word, ...]:
    eight = x.to_bytes(4, "little") + y.to_bytes(4, "little")
    found = []
    for selector in re.findall(r"prmt\.b32 \{\$w\d\}, \{\$r0\}, \{\$r1\}, (0x\w+);", text):
        chosen = bytes(eight[int(selector, 16) >> 4 * i & 7] for i in range(4))
        found.append(Word(int.from_bytes(chosen, "little")))
    return tuple(found)


def e4m3(word: int, count: int) -> np.ndarray:
    return dtypes.decode(np.frombuffer(word.to_bytes(4, "little"), np.uint8), "float8_e4m3fn")[
        :count
    ]


def inline_ptx(text: str, write_only_types: Any, read_only_args: Any) -> Any:
    if text == "mov.b32 {$w0}, {$r0};":
        bits = np.float32(read_only_args[0]) if write_only_types[0] is Word else None
        if bits is not None:
            return Word(bits.view(np.uint32))
        return Value(np.uint32(int(read_only_args[0])).view(np.float32))
    words = [int(value) for value in read_only_args]
    if "fma.rn." in text:
        return fma2(text, *words)
    if "prmt.b32" in text:
        return permuted(text, *words)
    if "cvt.rn.bf16x2.f32 {$w0}, y1, y0" in text:
        four = e4m3(words[0], 4)
        return narrowed(four[:2], "bfloat16"), narrowed(four[2:], "bfloat16")
    if "cvt.f32.f16 {$w0}, low" in text:
        return Value(e4m3(words[0], 1)[0])
    assert "cvt.rn.f16x2.f32 {$w0}, y, x" in text, text
    scale = np.uint32(words[1]).view(np.float32)
    return narrowed(widened(words[0], "float16") * scale, "float16")


class Mma:
    """mma.m16n8k16 of a warp; ``kind`` is the operands' element type."""

    def __init__(self, kind: str) -> None:
        self.kind, self.barrier = kind, threading.Barrier(32)
        self.lanes: list[Any] = [None] * 32

    def partition_shape_A(self, shape: Any) -> Any:
        return (2, 2, 2), shape[0] // 16, shape[1] // 16

    def partition_shape_B(self, shape: Any) -> Any:
        return (2, 2), shape[0] // 8, shape[1] // 16

    def partition_shape_C(self, shape: Any) -> Any:
        return (2, 2), shape[0] // 16, shape[1] // 8

    def make_fragment_A(self, shape: Any) -> Tensor:
        return registers(shape, self.kind)

    make_fragment_B = make_fragment_A

    def multiply(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        self.lanes[here.lane] = acc, a, b
        self.barrier.wait()
        if here.lane == 0:
            for i, j in itertools.product(range(a.shape[1]), range(b.shape[1])):
                self._add(i, j)
        self.barrier.wait()

    def _add(self, i: int, j: int) -> None:
        a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        pairs = list(itertools.product(range(2), repeat=2))
        for lane, (_, left, right) in enumerate(self.lanes):
            group, col = lane // 4, lane % 4 * 2
            for c, half in pairs:
                b[col + c + 8 * half, group] = self._value(right[(c, half), j])
                for low in range(2):
                    a[group + 8 * low, col + c + 8 * half] = self._value(left[(c, low, half), i])
        d = a @ b
        for lane, (acc, _, _) in enumerate(self.lanes):
            for c, half in pairs:
                place = (c, half), i, j
                acc[place] = acc[place] + d[lane // 4 + 8 * half, lane % 4 * 2 + c]

    def _value(self, bits: Any) -> Any:
        return dtypes.decode(np.array([bits]), self.kind)[0]


# ---- the DSL ------------------------------------------------------------------------------------

cutlass, cute = MagicMock(), MagicMock()
cutlass.cute, cutlass.range_constexpr, cutlass.const_expr = cute, range, lambda value: value
cutlass.range = lambda *bounds, unroll=0: range(*bounds)
cutlass.Uint32, cutlass.Float32, cutlass.Int32, cutlass.Int64 = Word, Value, int, int
cutlass.Uint8, cutlass.Uint16, cutlass.Uint64 = np.uint8, np.uint16, Long
cutlass.BFloat16, cutlass.Float16 = Kind("bfloat16", 16), Kind("float16", 16)
cutlass.Float8E4M3FN, cutlass.Boolean = Kind("float8_e4m3fn", 8), bool
cutlass.min, cutlass.max = min, max
cutlass.select_ = lambda condition, value, other: value if condition else other
STORAGE = {Word: "uint32", Value: "float32", np.uint8: "uint8", np.uint16: "uint16",
           "bfloat16": "uint16", "float16": "float16", int: "int32", np.int16: "int16",
           bool: "bool", "float32": "float32"}  # fmt: skip
cute.jit = cute.kernel = lambda function: function
cute.make_rmem_tensor, cute.autovec_copy = registers, copy
cute.recast_tensor = lambda fragment, word: as_words(fragment)
cute.copy = lambda atom, source, target, pred=None: predicated_copy(source, target, pred)
cute.append_ones = Layout.with_ones
cute.make_layout = lambda shape, stride=None: shape if stride is None else Layout(shape, stride)
cute.assume = lambda value, divby: value
cute.make_tensor = Tensor
cute.local_tile = lambda tensor, tile, at: Tensor(tensor.iterator + tile[0] * at[0], tile)
cute.size = lambda tensor, mode=None: size(tensor.shape[mode[0]] if mode else tensor.shape)
cute.ceil_div = lambda x, y: -(-x // y)
cute.gemm = lambda mma, d, a, b, c: mma.multiply(d, a, b)
cute.arch.inline_ptx = inline_ptx
cute.arch.lane_idx = lambda: here.lane
sys.modules |= {"cutlass": cutlass, "cutlass.cute": cute}
MOCKED = (
    "cutlass.cute.nvgpu", "cutlass.memory", "cutlass.pipeline", "cutlass.tensor_utils",
    "cutlass.utils", "cutlass.utils.hopper_helpers", "cuda", "cuda.bindings.driver",
)  # fmt: skip
for name in MOCKED:
    sys.modules[name] = MagicMock()
sys.modules["cuda.bindings"] = sys.modules["cuda"].bindings
