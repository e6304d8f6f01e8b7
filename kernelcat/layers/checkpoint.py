"""4-bit weights out of published checkpoints (safetensors), as `nvfp4_matmul` takes them.

Three ways of storing them are read; a linear layer or its experts are called ``NAME``:

    layout               codes               scales              global scale
    ModelOpt NVFP4       NAME.weight         NAME.weight_scale   NAME.weight_scale_2 (multiplies)
    compressed-tensors   NAME.weight_packed  NAME.weight_scale   NAME.weight_global_scale (divides)
    gpt-oss MXFP4        NAME_blocks         NAME_scales         none

Codes are uint8, (..., N, K / 2), the even element in the low half; gpt-oss splits the last axis
into (K / 32, 16). Scales are (..., N, K / 16) float8_e4m3fn or (..., N, K / 32) bytes of E8M0, in
linear order. ModelOpt's ``NAME.input_scale`` multiplies what activations are quantized to, as
weight_scale_2 does weights; compressed-tensors' ``NAME.input_global_scale`` is its inverse. Both
come out of here as factors that multiply.

Files are mapped, not read: a weight costs memory when it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kernelcat.errors import InvalidArgument, UnknownName, nearest
from kernelcat.layers.fp4 import BLOCKS

DTYPES = {
    "BF16": "bfloat16", "BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16", "I32": "int32", "I64": "int64", "I8": "int8", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "U8": "uint8",
}  # fmt: skip
"""Element types of safetensors -> ours."""

_SIZES = {"64": 8, "32": 4, "16": 2}
INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: element type by name, shape, and where its bytes lie."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def bytes(self) -> np.ndarray:
        """Its bytes as they lie in the file, mapped: one axis of uint8."""
        if self.end == self.begin:
            return np.zeros(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.begin, (self.end - self.begin,))


@dataclass(frozen=True)
class Fp4Weight:
    """Weights of a linear layer, or of its experts side by side.

    Attributes
    ----------
    format : ``nvfp4`` or ``mxfp4``
    w : uint8 (..., N, K / 2), pairs of codes
    scale : uint8 (..., N, K / 16 or 32), bytes of float8_e4m3fn or float8_e8m0fnu
    global_scale : float32 (...), NVFP4's; multiplies. None for MXFP4
    input_scale : float32 (...) or None; multiplies what activations were quantized to
    """

    format: str
    w: np.ndarray
    scale: np.ndarray
    global_scale: np.ndarray | None = None
    input_scale: np.ndarray | None = None

    def torch(self, device: str = "cuda", expert: int | None = None) -> dict[str, Any]:
        """Arguments of `nvfp4_matmul` and `nvfp4_dequantize` as torch tensors on ``device``.

        ``w`` float4_e2m1fn_x2, ``scale`` float8 and, of NVFP4, ``global_scale`` float32 (1,).
        ``expert`` picks one of experts stored side by side.
        """
        import torch

        elements = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
        pick: Any = ... if expert is None else expert

        def moved(array: np.ndarray) -> Any:
            return torch.from_numpy(np.array(array[pick], copy=True)).to(device)

        found = {
            "w": moved(self.w).view(torch.float4_e2m1fn_x2),
            "scale": moved(self.scale).view(elements[self.format]),
        }
        if self.global_scale is not None:
            found["global_scale"] = moved(self.global_scale).reshape(-1)
        return found


class Checkpoint:
    """The tensors of a safetensors file, or of a folder of them with or without an index.

    Raises
    ------
    InvalidArgument
        No such file, or a header that is not safetensors'.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Name -> tensor. Reads headers only."""
        found: dict[str, Stored] = {}
        for file in self._files():
            found |= _header(file)
        return found

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        index = self.path / INDEX
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            return [self.path / name for name in sorted(names)]
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise InvalidArgument(f"{self.path} is no safetensors file and no folder of them")
        return files

    def fp4_names(self) -> list[str]:
        """Names that :meth:`fp4` takes, sorted."""
        found = set()
        for name in self.tensors:
            for codes, scales in _KINDS:
                if name.endswith(codes) and name.removesuffix(codes) + scales in self.tensors:
                    found.add(name.removesuffix(codes))
        return sorted(found)

    def fp4(self, name: str) -> Fp4Weight:
        """The 4-bit weights called ``name`` (``model.layers.0.mlp.down_proj``).

        Raises
        ------
        UnknownName
            No such weights; tells the nearest names.
        InvalidArgument
            Tensors that are missing, or not of the types and shapes that belong together.
        """
        if f"{name}_blocks" in self.tensors:
            return self._gpt_oss(name)
        if f"{name}.weight_packed" in self.tensors:
            return self._nvfp4(name, "weight_packed", "weight_global_scale", inverse=True)
        if f"{name}.weight_scale" in self.tensors:
            return self._nvfp4(name, "weight", "weight_scale_2", inverse=False)
        raise UnknownName(f"{self.path} has no 4-bit {name!r}{nearest(name, self.fp4_names())}")

    def _nvfp4(self, name: str, codes: str, factor: str, inverse: bool) -> Fp4Weight:
        w = self._array(f"{name}.{codes}", "uint8")
        scale = self._array(f"{name}.weight_scale", "float8_e4m3fn")
        inputs = f"{name}.input_global_scale" if inverse else f"{name}.input_scale"
        _check_shapes(name, "nvfp4", w, scale)
        return Fp4Weight(
            "nvfp4",
            w,
            scale,
            self._factor(f"{name}.{factor}", inverse),
            self._factor(inputs, inverse) if inputs in self.tensors else None,
        )

    def _gpt_oss(self, name: str) -> Fp4Weight:
        blocks = self._array(f"{name}_blocks", "uint8")
        scale = self._array(f"{name}_scales", "uint8")
        if blocks.ndim < 3 or blocks.shape[-1] != 16:
            raise InvalidArgument(f"{name}_blocks must be (..., N, K/32, 16), not {blocks.shape}")
        w = blocks.reshape(*blocks.shape[:-2], -1)
        _check_shapes(name, "mxfp4", w, scale)
        return Fp4Weight("mxfp4", w, scale)

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            raise InvalidArgument(f"{self.path} has no {name}, which belongs to its weights")
        return self.tensors[name]

    def _array(self, name: str, dtype: str) -> np.ndarray:
        """Bytes of a tensor of one byte an element, in its shape."""
        stored = self._stored(name)
        if stored.dtype != dtype:
            raise InvalidArgument(f"{name} is {stored.dtype}; it must be {dtype}")
        return stored.bytes().reshape(stored.shape)

    def _factor(self, name: str, inverse: bool) -> np.ndarray:
        """A float32 scale that multiplies."""
        stored = self._stored(name)
        if stored.dtype != "float32":
            raise InvalidArgument(f"{name} is {stored.dtype}; it must be float32")
        value = stored.bytes().view("<f4").reshape(stored.shape)
        if not (np.isfinite(value) & (value > 0)).all():
            raise InvalidArgument(f"{name} must be positive and finite")
        return np.float32(1) / value if inverse else np.array(value)


_KINDS = (
    (".weight", ".weight_scale_2"),
    (".weight_packed", ".weight_global_scale"),
    ("_blocks", "_scales"),
)
"""Endings of what 4-bit weights are known by."""


def _check_shapes(name: str, format: str, w: np.ndarray, scale: np.ndarray) -> None:
    size = BLOCKS[format]
    wanted = (*w.shape[:-1], 2 * w.shape[-1] // size)
    if w.ndim < 2 or 2 * w.shape[-1] % size or scale.shape != wanted:
        raise InvalidArgument(
            f"{name}: codes of {w.shape} in {format} take scales of {wanted}, not {scale.shape}"
        )


def _header(path: Path) -> dict[str, Stored]:
    """Tensors of one file: 8 bytes of the header's length, the header in JSON, then the data."""
    if not path.is_file():
        raise InvalidArgument(f"{path} does not exist")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(LONGEST_HEADER, path.stat().st_size - 8):
            raise InvalidArgument(f"{path} does not begin as a safetensors file does")
        try:
            header = json.loads(file.read(length))
            return dict(_tensors(path, header, 8 + length))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{path} has a broken header: {error}") from error


def _tensors(path: Path, header: dict[str, Any], start: int) -> Iterator[tuple[str, Stored]]:
    size = path.stat().st_size
    for name, told in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = DTYPES.get(told["dtype"], told["dtype"]), tuple(map(int, told["shape"]))
        begin, end = (start + int(offset) for offset in told["data_offsets"])
        item = next((n for bits, n in _SIZES.items() if dtype.endswith(bits)), 1)
        if not start <= begin <= end <= size:
            raise ValueError(f"{name} lies outside of the file")
        if told["dtype"] in DTYPES and end - begin != item * math.prod(shape):
            raise ValueError(f"{name} has {end - begin} bytes, not {item * math.prod(shape)}")
        yield name, Stored(path, dtype, shape, begin, end)
