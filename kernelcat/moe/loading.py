"""Models from checkpoints, or with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName, nearest
from kernelcat.moe import config as configs
from kernelcat.moe.config import Config
from kernelcat.moe.deepseek_v3 import DeepseekV3
from kernelcat.moe.gpt_oss import GptOss
from kernelcat.moe.llama import Llama
from kernelcat.moe.mixtral import Mixtral
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import Ops, on
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.sharding import ShardedWeights
from kernelcat.moe.qwen3_moe import Qwen3Moe
from kernelcat.moe.sizes import SIZES
from kernelcat.moe.weights import (
    ALL_EXPERTS,
    CheckpointWeights,
    ExpertShare,
    RandomWeights,
    RecordedWeights,
    Weights,
)

MODELS: dict[str, type[Decoder]] = {
    model.config_type.architecture: model
    for model in (DeepseekV3, GptOss, Llama, Mixtral, Qwen3Moe)
}
"""Architecture in `config.json` -> model."""


def config_of(content: Mapping[str, Any]) -> Config:
    """The configuration that ``content`` of a `config.json` describes.

    Raises
    ------
    UnknownName
        The architecture is unknown; the message lists the known ones.
    InvalidArgument
        Fields are missing or not supported.
    """
    names = content.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise InvalidArgument(f"config.json: architectures={names!r} must be a list of one name")
    if names[0] not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise UnknownName(f"architecture {names[0]} is not supported; known: {known}")
    return MODELS[names[0]].config_type.of(content)


def build(
    config: Config,
    weights: Weights,
    ops: Ops | None = None,
    max_positions: int | None = None,
    exchange: Exchange | None = None,
) -> Decoder:
    """The model of ``config`` with ``weights``, on their device and in their element type.

    With ``exchange`` it is this rank's part of the model.
    """
    model = MODELS[config.architecture]
    if exchange is not None:
        weights = ShardedWeights(weights, config, exchange.rank, exchange.ranks)
        config = weights.config
    return model(config, weights, ops or on(weights.device), max_positions, exchange)


def load(
    path: str | Path,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    fp8_experts: bool = False,
    dense_experts: bool = False,
    exchange: Exchange | None = None,
    share: ExpertShare = ALL_EXPERTS,
) -> Decoder:
    """The model in folder ``path``: a `config.json` and safetensors files, as published.

    Parameters
    ----------
    device : ``cuda`` runs kernels, ``cpu`` the catalog's oracles
    dtype : bfloat16 or float16; float32 on a CPU, where it stands for them and nothing is
        rounded. The default is bfloat16 on a GPU and float32 on a CPU.
    max_positions : tokens that a sequence may have, at most and by default those of the model
    fp8_experts : the experts of Qwen3-MoE and DeepSeek-V3 become float8, with a scale for each 128
        x 128 elements. DeepSeek's published scales do not serve: gates and values alternate here,
        and have scales of their own there, so weights are quantized again.
    dense_experts : the experts of gpt-oss are decoded from MXFP4 to ``dtype``
    exchange : with the ranks that have the other parts of the model; only this part is read
    share : the experts that this process holds, if ranks divide them (`moe.parallel`)

    Raises
    ------
    UnknownName
        The architecture is unknown.
    InvalidArgument
        A file is missing or invalid, or a tensor is missing or has another shape or type.
    """
    config = config_of(configs.read(path))
    dtype = dtype or default_type(device)
    weights = CheckpointWeights(path, device, dtype, fp8_experts, dense_experts, share)
    return build(config, weights, max_positions=max_positions, exchange=exchange)


def random_model(
    config: Config | str,
    device: str | torch.device = "cuda",
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    seed: int = 0,
    fp8_experts: bool = False,
    dense_experts: bool = False,
    exchange: Exchange | None = None,
    share: ExpertShare = ALL_EXPERTS,
) -> Decoder:
    """A model with random weights; ``config`` may be a name of `SIZES`, the rest as in `load`."""
    dtype = dtype or default_type(device)
    weights = RandomWeights(device, dtype, seed, fp8_experts, dense_experts, share)
    return build(_named(config), weights, max_positions=max_positions, exchange=exchange)


def write_checkpoint(path: str | Path, config: Config | str, seed: int = 0) -> Path:
    """Writes a valid checkpoint of random weights to folder ``path``, which it makes.

    It holds the weights of ``random_model(config, "cpu", seed=seed)`` as published checkpoints
    store them. Raises ``MissingDependency`` without the package ``safetensors``.
    """
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "writing checkpoints needs: pip install 'kernelcat[moe]'"
        ) from error
    config, weights, folder = _named(config), RecordedWeights(seed), Path(path)
    build(config, weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.published(), indent=2) + "\n")
    save_file(weights.tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def default_type(device: str | torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, where it stands for 16 bits."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def _named(config: Config | str) -> Config:
    if isinstance(config, Config):
        return config
    if config not in SIZES:
        raise UnknownName(f"there is no model called {config!r}{nearest(config, list(SIZES))}")
    return SIZES[config]
