"""Weights: tensors by their published names, from a checkpoint or random.

A model asks for each tensor by name and shape, and gets it on its device and in its element type.
So a checkpoint that is truncated or of another model is found at load, with the tensor's name.

    CheckpointWeights   the tensors of safetensors files
    RandomWeights       random tensors of the same names and shapes, at any size
    RecordedWeights     random ones that are also kept, to write a small checkpoint
    MetaWeights         shapes and types without memory, to count and to plan

Who has weights in another form writes a subclass with one method, :meth:`Weights.stored`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log2
from pathlib import Path
from zlib import crc32

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.layers import fp4
from kernelcat.layers.checkpoint import Checkpoint, Stored
from kernelcat.reference._fp4_tiles import TILE_COLS, TILE_ROWS

FP8_BLOCK = 128
"""Rows and columns of a float8 weight that share a scale, in DeepSeek's checkpoints."""
FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
MXFP4_BLOCK = fp4.BLOCKS["mxfp4"]
E2M1_DEVIATION = 2.93
"""Standard deviation of a random E2M1 code."""


@dataclass(frozen=True)
class ExpertShare:
    """The experts of each layer that rank ``rank`` of ``ranks`` holds, as many as any other."""

    rank: int = 0
    ranks: int = 1

    def of(self, count: int) -> range:
        """The numbers of the rank's experts among ``count``.

        Raises ``InvalidArgument`` if not every rank can hold as many.
        """
        if count % self.ranks:
            raise InvalidArgument(f"{count} experts cannot be divided among {self.ranks} ranks")
        local = count // self.ranks
        return range(self.rank * local, (self.rank + 1) * local)


ALL_EXPERTS = ExpertShare()


class Weights(ABC):
    """Tensors by name, on ``device``; those of floating point in ``dtype`` unless one is named.

    With ``fp8_experts`` the experts of Qwen3-MoE and DeepSeek are float8 with block scales. With
    ``dense_experts`` those of gpt-oss, which are stored in MXFP4, are decoded to ``dtype``. A model
    has the experts of ``share``.
    """

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        fp8_experts: bool = False,
        dense_experts: bool = False,
        share: ExpertShare = ALL_EXPERTS,
    ) -> None:
        self.device, self.dtype, self.share = torch.device(device), dtype, share
        self.fp8_experts, self.dense_experts = fp8_experts, dense_experts

    @abstractmethod
    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The tensor as it is stored. ``dtype`` is ``uint8``, or ``float32`` for any float type."""

    def part(
        self, name: str, shape: tuple[int, ...], dtype: str, axis: int, start: int, end: int
    ) -> torch.Tensor:
        """Elements ``start`` to ``end - 1`` of an axis of the tensor that has ``shape``."""
        return self.stored(name, shape, dtype).narrow(axis, start, end - start).clone()

    def held(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The rows of ``share``'s experts of a tensor that has a row for each expert."""
        if self.share == ALL_EXPERTS:
            return self.stored(name, shape, dtype)
        held = self.share.of(shape[0])
        return self.part(name, shape, dtype, 0, held.start, held.stop)

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor called ``name``, which must have this shape."""
        return self.stored(name, shape, "float32").to(self.device, dtype or self.dtype)

    def swiglu(self, gate: str, up: str, rows: int, cols: int) -> torch.Tensor:
        """Gates and the values that they gate in alternate rows: (2 * rows, cols)."""
        return torch.stack([self(name, rows, cols) for name in (gate, up)], 1).flatten(0, 1)

    def mxfp4(
        self, name: str, experts: int, n: int, k: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """MXFP4 weights of experts (n, k) in the order that `moe_mlp` reads fastest.

        Returns
        -------
        Codes (held, n', k' / 2) float4_e2m1fn_x2 and scales (held, n', k' / 32) float8_e8m0fnu of
        the experts of ``share``, packed by `fp4.prepack`, which pads n and k. With
        ``dense_experts`` the values (held, n, k) in ``dtype``, and None.
        """
        blocks, held = (experts, n, k // MXFP4_BLOCK), self.share.of(experts)
        codes = self.held(f"{name}_blocks", (*blocks, 16), "uint8").flatten(2)
        scales = self.held(f"{name}_scales", blocks, "uint8")
        if self.dense_experts:
            decoded = (
                {"w": _decoded(code.to(self.device), scale.to(self.device)).to(self.dtype)}
                for code, scale in zip(codes, scales, strict=True)
            )
            return stack(decoded, len(held))["w"], None
        pairs = (
            fp4.prepack(
                code.to(self.device).view(torch.float4_e2m1fn_x2),
                scale.to(self.device).view(torch.float8_e8m0fnu),
            )
            for code, scale in zip(codes, scales, strict=True)
        )
        tensors = stack(({"w": w, "scale": scale} for w, scale in pairs), len(held))
        return tensors["w"], tensors["scale"]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values (n, k) float32 of MXFP4 bytes (n, k / 2), the even column in the low half of a byte.

    ``scales`` (n, k / 32) uint8 are exponents with a bias of 127. Products are exact in bfloat16.
    """
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), -1).int()
    blocks = values[pairs].view(*scales.shape, MXFP4_BLOCK)
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return (blocks * powers[..., None]).flatten(1)


def stack(each: Iterable[dict[str, torch.Tensor]], count: int) -> dict[str, torch.Tensor]:
    """Tensors (count, ...) by name, of ``count`` dictionaries of tensors.

    Each tensor is copied when it comes, so that not all experts are in memory twice. Bytes are
    copied, because types of 4 bits have no copy.
    """
    stacks: dict[str, torch.Tensor] = {}
    for i, tensors in enumerate(each):
        for name, tensor in tensors.items():
            if name not in stacks:
                stacks[name] = tensor.new_empty((count, *tensor.shape))
            stacks[name].view(torch.uint8)[i] = tensor.view(torch.uint8)
    return stacks


class CheckpointWeights(Weights):
    """The tensors of a published checkpoint.

    Weights in float8 with a ``weight_scale_inv`` for 128 x 128 elements (DeepSeek) are converted.
    """

    def __init__(
        self,
        path: str | Path,
        device: str | torch.device,
        dtype: torch.dtype,
        fp8_experts: bool = False,
        dense_experts: bool = False,
        share: ExpertShare = ALL_EXPERTS,
    ) -> None:
        super().__init__(device, dtype, fp8_experts, dense_experts, share)
        self.checkpoint = Checkpoint(path)

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The tensor; raises ``InvalidArgument`` if it is absent, or has another shape or type."""
        record = self._record(name, shape, dtype)
        tensor = record.torch().to(self.device)
        if record.dtype != "float8_e4m3fn":
            return tensor
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        scale = self.stored(f"{name}_scale_inv", blocks, "float32").float()
        scale = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return tensor.float() * scale[: shape[0], : shape[1]]

    def part(
        self, name: str, shape: tuple[int, ...], dtype: str, axis: int, start: int, end: int
    ) -> torch.Tensor:
        """The part, which alone is read from the file; a tensor with scales is read whole."""
        record = self._record(name, shape, dtype)
        if record.dtype == "float8_e4m3fn":
            return super().part(name, shape, dtype, axis, start, end)
        index = (slice(None),) * axis + (slice(start, end),)
        return record.torch(index).to(self.device)

    def _record(self, name: str, shape: tuple[int, ...], dtype: str) -> Stored:
        """The tensor in its file."""
        tensors, path = self.checkpoint.tensors, self.checkpoint.path
        if name not in tensors:
            raise InvalidArgument(f"{path} has no tensor {name}: it is truncated, or another model")
        record = tensors[name]
        if record.shape != shape:
            raise InvalidArgument(f"{path}: {name} is {record.shape}; config.json needs {shape}")
        if record.dtype not in (FLOATS if dtype == "float32" else (dtype,)):
            raise InvalidArgument(f"{path}: {name} is {record.dtype}; it must be {dtype}")
        return record


class RandomWeights(Weights):
    """Random tensors; rows of matrices have a norm of about 1.

    A tensor is a function of its name, its shape, ``seed``, and the kind of device.
    """

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        fp8_experts: bool = False,
        dense_experts: bool = False,
        share: ExpertShare = ALL_EXPERTS,
    ) -> None:
        super().__init__(device, dtype, fp8_experts, dense_experts, share)
        self.seed = seed

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Norms are near 1, vectors near 0, and matrices keep the magnitude of what they multiply.

        MXFP4 scales are made for rows of as many elements as ``shape`` says.
        """
        generator = torch.Generator(self.device).manual_seed(crc32(name.encode()) ^ self.seed)
        if name.endswith("_scales"):
            exponent = floor(log2((shape[-1] * MXFP4_BLOCK) ** -0.5 / E2M1_DEVIATION))
            return self._integers(generator, shape, 126 + exponent, 129 + exponent)
        if dtype == "uint8":
            return self._integers(generator, shape, 0, 256)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif len(shape) == 1 or name.endswith("bias"):
            values = 0.1 * values
        elif not name.endswith("embed_tokens.weight"):
            values = values * shape[-1] ** -0.5
        return values.bfloat16()

    def _integers(
        self, generator: torch.Generator, shape: tuple[int, ...], low: int, high: int
    ) -> torch.Tensor:
        """Random bytes from ``low`` to ``high - 1``."""
        return torch.randint(
            low, high, shape, generator=generator, device=self.device, dtype=torch.uint8
        )


class RecordedWeights(RandomWeights):
    """Random weights; ``tensors`` has all that a model asked for, as a checkpoint stores them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("cpu", torch.float32, seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A random tensor, which is kept."""
        self.tensors[name] = super().stored(name, shape, dtype)
        return self.tensors[name]


class MetaWeights(Weights):
    """Tensors without memory, on the device ``meta``: their shapes and types are right."""

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor without memory."""
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def mxfp4(self, name: str, experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors without memory; see `Weights.mxfp4`."""
        held = len(self.share.of(experts))
        rows, cols = -(-n // TILE_ROWS) * TILE_ROWS, -(-k // TILE_COLS) * TILE_COLS
        codes, scales = (
            self.stored(name, (held, rows, width), "uint8")
            for width in (cols // 2, cols // MXFP4_BLOCK)
        )
        return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
