"""The entries that models are built from, bound once for a device.

A model's code is the same on a GPU and on a CPU. On a GPU ``ops.gemm`` is
``kernelcat.get("gemm")``. On a CPU it is ``kernelcat.reference("gemm")``, the definition that every
kernel is checked against: slow, and meant for tests and small models. Which of the two serves
follows from the device that the caller names, and from nothing else: a GPU call that no kernel
serves is an error, it never runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

import kernelcat
from kernelcat.errors import InvalidArgument

Call = Callable[..., Any]

FUSED_TOKENS = 64
"""What `out_router` is made for."""
PROJECTED_TOKENS = 128
"""The tokens of a tile of `qkv_rope_write/cuda/products`. Three products apart, of which those to
keys and values have few tiles, take longer. (Predicted, docs/measured.md.)"""


@dataclass(frozen=True)
class Ops:
    """Entries of the catalog, by name.

    ``projected_tokens`` and ``fused_tokens`` are the largest numbers of tokens for which a layer
    runs `qkv_rope_write` and `out_router`, which read each weight once and suit few tokens. Beyond
    them, and everywhere where they are 0, `gemm`, `rms_norm` and `kv_write` do the same work.
    """

    embedding: Call
    flashmla: Call
    fp8_quantize: Call
    gemm: Call
    kv_write: Call
    lm_head: Call
    mla_kv_write: Call
    moe_mlp: Call
    out_router: Call
    paged_attn: Call
    qkv_rope_write: Call
    rms_norm: Call
    sample: Call
    fused_tokens: int = FUSED_TOKENS
    projected_tokens: int = PROJECTED_TOKENS

    def launchers(self) -> list[Any]:
        """What a CUDA graph with captured calls needs to stay alive: kernels and workspaces."""
        return launchers_of(*(getattr(self, field.name) for field in fields(self)))


@cache
def on(
    device: str | torch.device,
    fused_tokens: int = FUSED_TOKENS,
    projected_tokens: int = PROJECTED_TOKENS,
) -> Ops:
    """The entries for tensors on ``device``: kernels on ``cuda``, oracles on ``cpu``.

    Raises ``InvalidArgument`` for another kind of device.
    """
    names = [field.name for field in fields(Ops) if not field.name.endswith("_tokens")]
    return Ops(
        **{name: bind(name, device) for name in names},
        fused_tokens=fused_tokens,
        projected_tokens=projected_tokens,
    )


def bind(name: str, device: str | torch.device) -> Call:
    """One entry for tensors on ``device``, also one that no model needs by itself; as in `on`."""
    kind = torch.device(device).type
    binders: dict[str, Call] = {"cuda": kernelcat.get, "cpu": kernelcat.reference}
    if kind not in binders:
        raise InvalidArgument(f"device {device} is not supported; use cuda or cpu")
    call: Call = binders[kind](name)
    return call


def launchers_of(*calls: Any) -> list[Any]:
    """The launchers of ``calls``; entries on a GPU have some, and so has what is made of them."""
    return [each for call in calls if hasattr(call, "launchers") for each in call.launchers()]


def leaving(call: Call, sms: int) -> Call:
    """``call`` with launches that leave ``sms`` SMs to others; what is no kernel takes none."""
    return call.leaving(sms) if hasattr(call, "leaving") else call


def activation_type(dtype: torch.dtype) -> str:
    """The name of the 16-bit element type that ``dtype`` is, or that float32 stands for."""
    return "float16" if dtype == torch.float16 else "bfloat16"
