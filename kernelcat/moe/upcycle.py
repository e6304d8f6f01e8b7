"""Upcycling: a mixture of experts that computes what a dense Llama computes.

    copies     each expert is a copy of the MLP. The weights of the chosen experts sum to 1, so any
               router gives the dense model's logits.
    columns    each expert has a part of the MLP's inner columns, and every expert is chosen. The
               router is zero, so each weight is 1 / experts, and the experts' last projections are
               multiplied by their number, a power of two. A wrong expert or a wrong weight changes
               the logits.

So real text passes the experts' path, and the dense model says what the text must be.

Source: Komatsuzaki et al., "Sparse upcycling: training mixture-of-experts from dense checkpoints",
2023, for copies.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe import config as configs
from kernelcat.moe.llama import LlamaConfig
from kernelcat.moe.loading import build, config_of, default_type
from kernelcat.moe.mixtral import MLP_NAMES, MixtralConfig
from kernelcat.moe.model import Decoder
from kernelcat.moe.weights import CheckpointWeights, RandomWeights, Weights

WAYS = ("copies", "columns")
_LLAMA_NAMES = dict(zip(MLP_NAMES, ("gate_proj", "up_proj", "down_proj"), strict=True))
_EXPERT = re.compile(r"(.*)block_sparse_moe\.experts\.(\d+)\.(w\d)\.weight")


def upcycled_config(config: LlamaConfig, way: str, num_experts: int, top_k: int) -> MixtralConfig:
    """The configuration of the mixture of experts.

    Raises
    ------
    InvalidArgument
        ``way`` is unknown, the model has biases, or the numbers do not fit the way.
    """
    if way not in WAYS or config.attention_bias:
        raise InvalidArgument(f"way={way!r} must be one of {', '.join(WAYS)}, for no biases")
    inter = config.intermediate_size
    if way == "columns":
        if top_k != num_experts or num_experts & (num_experts - 1) or inter % num_experts:
            raise InvalidArgument(
                f"columns need top_k={top_k} = num_experts={num_experts}, a power of two that "
                f"divides intermediate_size={inter}"
            )
        inter //= num_experts
    common = {
        name: value
        for name, value in asdict(config).items()
        if name in MixtralConfig.__dataclass_fields__ and name not in ("rope", "intermediate_size")
    }
    return MixtralConfig(
        **common, rope=config.rope, intermediate_size=inter, num_local_experts=num_experts,
        num_experts_per_tok=top_k,
    )  # fmt: skip


class UpcycledWeights(Weights):
    """The weights of the mixture of experts, made of those of a Llama.

    Parameters
    ----------
    dense : weights of the Llama
    config : of the Llama
    way : one of `WAYS`
    num_experts : experts of a layer
    """

    def __init__(self, dense: Weights, config: LlamaConfig, way: str, num_experts: int) -> None:
        super().__init__(dense.device, dense.dtype)
        self._dense, self._inter, self._hidden = dense, config.intermediate_size, config.hidden_size
        self._has_columns, self._num_experts = way == "columns", num_experts
        self._routers = RandomWeights(dense.device, dense.dtype)

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The tensor of the Llama, a part of one, or a router."""
        if name.endswith("block_sparse_moe.gate.weight"):
            router = self._routers.stored(name, shape, dtype)
            return torch.zeros_like(router) if self._has_columns else router
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._dense.stored(name, shape, dtype)
        prefix, expert, kind = match[1], int(match[2]), match[3]
        is_down = kind == "w2"
        whole = (self._hidden, self._inter) if is_down else (self._inter, self._hidden)
        tensor = self._dense.stored(f"{prefix}mlp.{_LLAMA_NAMES[kind]}.weight", whole, dtype)
        if not self._has_columns:
            return tensor
        part = tensor.chunk(self._num_experts, 1 if is_down else 0)[expert]
        return part * self._num_experts if is_down else part


def load_upcycled(
    path: str | Path,
    way: str,
    num_experts: int = 4,
    top_k: int = 0,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
) -> Decoder:
    """The mixture of experts made of the Llama in folder ``path``; for errors see `moe.load`.

    Parameters
    ----------
    way : one of `WAYS`
    top_k : experts that a token uses; 0 for all with columns, for half of them with copies
    device, dtype, max_positions : as in `moe.load`
    """
    config = config_of(configs.read(path))
    if not isinstance(config, LlamaConfig):
        raise InvalidArgument(f"{path} is a {config.architecture}; only a Llama can be upcycled")
    if not top_k:
        top_k = num_experts if way == "columns" else max(1, num_experts // 2)
    moe_config = upcycled_config(config, way, num_experts, top_k)
    dense = CheckpointWeights(path, device, dtype or default_type(device))
    weights = UpcycledWeights(dense, config, way, num_experts)
    return build(moe_config, weights, max_positions=max_positions)
