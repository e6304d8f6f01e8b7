"""4-bit weights from published checkpoints (safetensors), in the form that `nvfp4_matmul` takes.

Three layouts are read. ``NAME`` is the name of a linear layer, or of experts stored side by side:

    layout               codes               scales              global scale
    ModelOpt NVFP4       NAME.weight         NAME.weight_scale   NAME.weight_scale_2 (multiplies)
    compressed-tensors   NAME.weight_packed  NAME.weight_scale   NAME.weight_global_scale (divides)
    gpt-oss MXFP4        NAME_blocks         NAME_scales         none

Codes are uint8 (..., N, K / 2) with the even column in the low half; gpt-oss splits the last axis
into (K / 32, 16). Scales are (..., N, K / 16) float8_e4m3fn or (..., N, K / 32) bytes of E8M0, in
linear order. A global scale multiplies the values of a weight or divides them, as the table says.
Activations have such a factor too: ModelOpt's ``NAME.input_scale`` multiplies the quantized values,
compressed-tensors' ``NAME.input_global_scale`` divides them. This module returns all of them as
factors that multiply.

Files are mapped into memory, not read: a weight is read from disk when it is used.
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
"""Element types by their names in safetensors files -> by their names here."""

_SIZES = {"64": 8, "32": 4, "16": 2}
"""Last digits of an element type's name -> bytes; all other types have one byte."""
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
"""Files with a longer header are refused."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes
    ----------
    path : the file
    dtype : name of the element type
    shape : the tensor's shape
    begin, end : its bytes are ``begin`` to ``end - 1`` of the file
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def bytes(self) -> np.ndarray:
        """The tensor's bytes, mapped from the file: uint8 (end - begin,)."""
        if self.end == self.begin:
            return np.zeros(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.begin, (self.end - self.begin,))

    def torch(self, part: tuple[slice, ...] = ()) -> Any:
        """The tensor, or ``part`` of it, as a torch tensor on the CPU, read from the file."""
        import torch

        dtype = getattr(torch, self.dtype)
        elements = self.bytes().view(f"int{8 * dtype.itemsize}").reshape(self.shape)
        return torch.from_numpy(np.array(elements[part])).view(dtype)


@dataclass(frozen=True)
class Fp4Weight:
    """Weights of a linear layer, or of experts stored side by side.

    Attributes
    ----------
    format : ``nvfp4`` or ``mxfp4``
    w : uint8 (..., N, K / 2), E2M1 codes, two in a byte
    scale : uint8 (..., N, K / 16) bytes of float8_e4m3fn (NVFP4) or (..., N, K / 32) bytes of
        float8_e8m0fnu (MXFP4), linear
    global_scale : float32 (...), factor of the weights; None for MXFP4
    input_scale : float32 (...), factor of quantized activations; None if the checkpoint has none
    """

    format: str
    w: np.ndarray
    scale: np.ndarray
    global_scale: np.ndarray | None = None
    input_scale: np.ndarray | None = None

    def torch(self, device: str = "cuda", expert: int | None = None) -> dict[str, Any]:
        """Arguments of `nvfp4_matmul` and `nvfp4_dequantize` as torch tensors on ``device``.

        Parameters
        ----------
        device : name of a torch device
        expert : index of one of the experts stored side by side; None: all of the tensor

        Returns
        -------
        ``w`` (..., N, K / 2) float4_e2m1fn_x2, ``scale`` (..., N, K / 16 or K / 32) float8_e4m3fn
        or float8_e8m0fnu, and for NVFP4 ``global_scale`` float32, (1,) for a single weight.
        """
        import torch

        elements = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
        index: Any = ... if expert is None else expert

        def tensor(array: np.ndarray) -> Any:
            return torch.from_numpy(np.array(array[index], copy=True)).to(device)

        arguments = {
            "w": tensor(self.w).view(torch.float4_e2m1fn_x2),
            "scale": tensor(self.scale).view(elements[self.format]),
        }
        if self.global_scale is not None:
            arguments["global_scale"] = tensor(self.global_scale).reshape(-1)
        return arguments


class Checkpoint:
    """The tensors of a safetensors file, or of a folder of such files with or without an index.

    Files are opened when :attr:`tensors` is first read.

    Parameters
    ----------
    path : the file or the folder
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Name -> tensor; only the headers of files are read.

        Raises
        ------
        InvalidArgument
            There is no such file, a file has no valid safetensors header, or the index is invalid
            or names a file outside of the folder.
        """
        tensors: dict[str, Stored] = {}
        for file in self._files():
            tensors |= _header(file)
        return tensors

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        index = self.path / INDEX
        if index.is_file():
            return [self.path / name for name in _shards(index)]
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise InvalidArgument(f"{self.path} is neither a safetensors file nor a folder of them")
        return files

    def fp4_names(self) -> list[str]:
        """The names that :meth:`fp4` takes, sorted."""
        names = set()
        for tensor in self.tensors:
            for codes, scales in _LAYOUTS:
                name = tensor.removesuffix(codes)
                if tensor.endswith(codes) and name + scales in self.tensors:
                    names.add(name)
        return sorted(names)

    def fp4(self, name: str) -> Fp4Weight:
        """The 4-bit weights called ``name``, for example ``model.layers.0.mlp.down_proj``.

        Raises
        ------
        UnknownName
            There are no such weights; the message has the nearest names.
        InvalidArgument
            A tensor of the weights is missing, or has another element type or shape than the
            layout prescribes.
        """
        if f"{name}_blocks" in self.tensors:
            return self._gpt_oss(name)
        if f"{name}.weight_packed" in self.tensors:
            return self._nvfp4(name, "weight_packed", "weight_global_scale", inverse=True)
        if f"{name}.weight_scale" in self.tensors:
            return self._nvfp4(name, "weight", "weight_scale_2", inverse=False)
        raise UnknownName(
            f"{self.path} has no 4-bit weights {name!r}{nearest(name, self.fp4_names())}"
        )

    def _nvfp4(self, name: str, codes: str, factor: str, inverse: bool) -> Fp4Weight:
        w = self._bytes(f"{name}.{codes}", "uint8")
        scale = self._bytes(f"{name}.weight_scale", "float8_e4m3fn")
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
        blocks = self._bytes(f"{name}_blocks", "uint8")
        scale = self._bytes(f"{name}_scales", "uint8")
        if blocks.ndim < 3 or blocks.shape[-1] != 16:
            raise InvalidArgument(f"{name}_blocks must be (..., N, K/32, 16), not {blocks.shape}")
        w = blocks.reshape(*blocks.shape[:-2], -1)
        _check_shapes(name, "mxfp4", w, scale)
        return Fp4Weight("mxfp4", w, scale)

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            raise InvalidArgument(f"{self.path} has no tensor {name}, which the weights need")
        return self.tensors[name]

    def _bytes(self, name: str, dtype: str) -> np.ndarray:
        """A tensor whose elements have one byte, as uint8 of its shape; it must have ``dtype``."""
        stored = self._stored(name)
        if stored.dtype != dtype:
            raise InvalidArgument(f"{name} is {stored.dtype}; it must be {dtype}")
        return stored.bytes().reshape(stored.shape)

    def _factor(self, name: str, inverse: bool) -> np.ndarray:
        """A float32 factor; ``inverse`` if the file has the number that divides."""
        stored = self._stored(name)
        if stored.dtype != "float32":
            raise InvalidArgument(f"{name} is {stored.dtype}; it must be float32")
        value = stored.bytes().view("<f4").reshape(stored.shape)
        if not (np.isfinite(value) & (value > 0)).all():
            raise InvalidArgument(f"{name} must be positive and finite")
        return np.float32(1) / value if inverse else np.array(value)


_LAYOUTS = (
    (".weight", ".weight_scale_2"),
    (".weight_packed", ".weight_global_scale"),
    ("_blocks", "_scales"),
)
"""Endings of the two tensors by which 4-bit weights of a layout are recognized."""


def _check_shapes(name: str, format: str, w: np.ndarray, scale: np.ndarray) -> None:
    block = BLOCKS[format]
    scale_shape = (*w.shape[:-1], 2 * w.shape[-1] // block)
    if w.ndim < 2 or 2 * w.shape[-1] % block or scale.shape != scale_shape:
        raise InvalidArgument(
            f"{name}: {format} codes of shape {w.shape} need scales of shape {scale_shape}, "
            f"not {scale.shape}"
        )


def _shards(index: Path) -> list[Path]:
    """The files that an index names, sorted: paths inside of the index's folder."""
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{index} is no index of safetensors files: {error!r}") from error
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise InvalidArgument(f"{index} names {name!r}, a file outside of its folder")
    return [Path(name) for name in sorted(names)]


def _header(path: Path) -> dict[str, Stored]:
    """Tensors of one file, which has the header's length (8 bytes), a JSON header, and the data."""
    if not path.is_file():
        raise InvalidArgument(f"{path} does not exist")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise InvalidArgument(
                f"{path} is no safetensors file: its first 8 bytes are no header length"
            )
        try:
            header = json.loads(file.read(length))
            return dict(_tensors(path, header, 8 + length))
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise InvalidArgument(f"{path} has an invalid header: {error}") from error


def _tensors(path: Path, header: dict[str, Any], start: int) -> Iterator[tuple[str, Stored]]:
    """Names and tensors that ``header`` describes; the data begins at byte ``start``."""
    file_bytes = path.stat().st_size
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = DTYPES.get(fields["dtype"], fields["dtype"]), fields["shape"]
        begin, end = (start + int(offset) for offset in fields["data_offsets"])
        if not start <= begin <= end <= file_bytes:
            raise ValueError(f"{name} is at {begin} to {end}, the data at {start} to {file_bytes}")
        stored = Stored(path, dtype, tuple(map(int, shape)), begin, end)
        itemsize = next((size for bits, size in _SIZES.items() if dtype.endswith(bits)), 1)
        num_bytes = itemsize * math.prod(stored.shape)
        if fields["dtype"] in DTYPES and end - begin != num_bytes:
            raise ValueError(f"{name} has {end - begin} bytes, but its shape needs {num_bytes}")
        yield name, stored
