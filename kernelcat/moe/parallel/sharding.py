"""Tensor parallelism: which part of a model each rank holds.

Each rank has some heads of attention, some columns of the intermediate dimension of every MLP and
expert, and everything else whole: embedding, head, norms, routers, latents. Its part is a model of
its own with fewer heads and narrower MLPs, whose weights are parts of the published tensors. What a
rank makes of attention's results, or of an MLP's columns, is its part of a sum over all ranks.

Ranks have equal sizes, in whole blocks of columns that share a scale. Where the model has fewer
columns than that, the last ranks have zeros in their place: a gate and a value of zero give zero in
every activation.

Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe.config import Config
from kernelcat.moe.gpt_oss import GptOssConfig
from kernelcat.moe.weights import FP8_BLOCK, MXFP4_BLOCK, Weights

HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"
DENSE, ROUTED = "intermediate_size", "moe_intermediate_size"
"""Fields of a configuration that differ between a model and its parts."""
BLOCK_16 = 16
"""Columns of which a rank has a multiple, where weights have 16 bits: 32 bytes."""

ONCE = -1
"""In place of an axis: rank 0 has the tensor, and all others have zeros."""

ATTENTION = {
    "q_proj.weight": (0, HEADS), "q_proj.bias": (0, HEADS), "q_b_proj.weight": (0, HEADS),
    "k_proj.weight": (0, KV_HEADS), "k_proj.bias": (0, KV_HEADS),
    "v_proj.weight": (0, KV_HEADS), "v_proj.bias": (0, KV_HEADS),
    "kv_b_proj.weight": (0, HEADS), "sinks": (0, HEADS),
    "o_proj.weight": (1, HEADS), "o_proj.bias": (ONCE, HEADS),
}  # fmt: skip
"""The last words of a tensor's name -> the axis that ranks divide, and the field that it counts."""
MLP = {
    "gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1,
    "w1.weight": 0, "w3.weight": 0, "w2.weight": 1,
    "gate_up_proj_blocks": 1, "gate_up_proj_scales": 1, "gate_up_proj_bias": 1,
    "down_proj_blocks": 2, "down_proj_scales": 2, "down_proj_bias": ONCE,
}  # fmt: skip
"""The last words of the name of a tensor of an MLP or of experts -> the axis that ranks divide: the
columns of the intermediate dimension."""


def part_of(config: Config, ranks: int, has_fp8_experts: bool = False) -> Config:
    """The configuration of a rank's part of the model of ``config``, the same on all ranks.

    Raises
    ------
    InvalidArgument
        The heads cannot be divided among so many ranks.
    """
    heads, kv_heads = (int(getattr(config, name)) for name in (HEADS, KV_HEADS))
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise InvalidArgument(
            f"{heads} heads with {kv_heads} heads of keys and values cannot be divided among "
            f"{ranks} ranks evenly"
        )
    block = MXFP4_BLOCK if isinstance(config, GptOssConfig) else BLOCK_16
    step = ranks * (FP8_BLOCK if has_fp8_experts else block)
    sizes = {name: -(-getattr(config, name) // step) * step // ranks
             for name in (DENSE, ROUTED) if hasattr(config, name)}  # fmt: skip
    sizes |= {HEADS: heads // ranks, KV_HEADS: max(kv_heads // ranks, 1)}
    return replace(config, **sizes)


class Cut(NamedTuple):
    """What a rank has of a tensor: of ``axis``, which has ``whole`` elements, those from ``start``.

    With ``axis`` `ONCE` all of it, or zeros.
    """

    axis: int
    whole: int = 0
    start: int = 0


class ShardedWeights(Weights):
    """The part of ``whole`` that rank ``rank`` of ``ranks`` holds, by the published names.

    Parameters
    ----------
    whole : weights of the model
    config : of the model

    Attributes
    ----------
    config : of the part
    """

    def __init__(self, whole: Weights, config: Config, rank: int, ranks: int) -> None:
        super().__init__(whole.device, whole.dtype, whole.fp8_experts, whole.dense_experts)
        self._whole, self._model, self._rank, self._ranks = whole, config, rank, ranks
        self.config = part_of(config, ranks, whole.fp8_experts)

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The part of the tensor ``name``; ``shape`` is the part's."""
        cut = self._cut(name, shape)
        if cut is None:
            return self._whole.stored(name, shape, dtype)
        axis, whole, start = cut
        if axis == ONCE:
            tensor = self._whole.stored(name, shape, dtype)
            return tensor if self._rank == 0 else torch.zeros_like(tensor)
        end = min(start + shape[axis], whole)
        published = (*shape[:axis], whole, *shape[axis + 1 :])
        tensor = self._whole.part(name, published, dtype, axis, min(start, whole), end)
        missing = shape[axis] - tensor.shape[axis]
        if not missing:
            return tensor
        zeros = tensor.new_zeros((*shape[:axis], missing, *shape[axis + 1 :]))
        return torch.cat((tensor, zeros), axis)

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Which part this rank has of the tensor ``name``, as ``shape``; None for all of it."""
        words = name.split(".")
        ends = [end for end in (words[-1], ".".join(words[-2:])) if end in ATTENTION or end in MLP]
        if not ends:
            return None
        axis, field = ATTENTION.get(ends[0]) or (MLP[ends[0]], self._width_of(words))
        if axis == ONCE:
            return Cut(ONCE)
        part, whole = (int(getattr(config, field)) for config in (self.config, self._model))
        size, first = shape[axis], self._rank * part
        if field == KV_HEADS:  # ranks may share a head
            first = self._rank * whole // self._ranks
        return Cut(axis, size * whole // part, first * size // part)

    def _width_of(self, words: list[str]) -> str:
        """The field that an MLP's columns count."""
        is_routed = hasattr(self._model, ROUTED) and any("experts" in word for word in words)
        return ROUTED if is_routed else DENSE
