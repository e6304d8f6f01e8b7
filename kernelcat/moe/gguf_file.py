"""GGUF files of Llama models: their weights, configuration and tokenizer, as a checkpoint folder.

The folder has the files of a published checkpoint (`config.json`, `model.safetensors`,
`tokenizer.json` and others), so that everything else reads one format. Quantized weights become
bfloat16.

GGUF stores the rows of q and k in another order: rotary pairs are neighbours there, and half a head
apart here. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernelcat.errors import InvalidArgument, MissingDependency, needs_extra
from kernelcat.moe.config import Config
from kernelcat.moe.llama import LlamaConfig
from kernelcat.moe.loading import build
from kernelcat.moe.rope import Rope
from kernelcat.moe.weights import Weights

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Published name -> name in GGUF; layers have a prefix."""
CONTROL_TOKEN = 3
PRE_TOKENIZERS = ("smollm",)
"""Kinds of tokenizers that are read: digits one by one, then GPT-2's words."""


def convert(path: str | Path, folder: str | Path) -> Path:
    """Writes the model in the GGUF file ``path`` to ``folder`` as a checkpoint.

    The folder appears when everything is written; one that is there is replaced.

    Raises
    ------
    InvalidArgument
        The file is no GGUF file, or its architecture or tokenizer is not supported.
    MissingDependency
        The package gguf, tokenizers or safetensors is not installed.
    """
    try:
        from gguf import GGUFReader
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{error}: GGUF files need: pip install 'kernelcat[moe]'"
        ) from error
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise InvalidArgument(f"{path} is no GGUF file: {error}") from error
    folder = Path(folder)
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        weights = GgufWeights(reader)
        build(weights.config, weights)
        save_file(weights.tensors, part / "model.safetensors", {"format": "pt"})
        _write_texts(reader, weights.config, part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _value(reader: GGUFReader, name: str) -> Any:
    """A field of the file, or InvalidArgument."""
    field = reader.get_field(name)
    if field is None:
        raise InvalidArgument(f"the GGUF file lacks {name}")
    return field.contents()


def config_of(reader: GGUFReader) -> LlamaConfig:
    """The configuration of a Llama in a GGUF file."""
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise InvalidArgument(f"the GGUF file's architecture {architecture!r} must be llama")

    def value(name: str) -> Any:
        return _value(reader, f"llama.{name}")

    names = {tensor.name for tensor in reader.tensors}
    head_dim = reader.get_field("llama.attention.key_length")
    return LlamaConfig(
        hidden_size=value("embedding_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        vocab_size=value("vocab_size"),
        intermediate_size=value("feed_forward_length"),
        head_dim=head_dim.contents() if head_dim else 0,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=round(value("attention.layer_norm_rms_epsilon"), 9),
        tie_word_embeddings="output.weight" not in names,
        rope=Rope(rope_theta=value("rope.freq_base")),
    )


class GgufWeights(Weights):
    """Weights of a GGUF file by their published names, in bfloat16 on the CPU.

    Attributes
    ----------
    config : the model's configuration
    tensors : what has been read
    """

    def __init__(self, reader: GGUFReader) -> None:
        super().__init__("cpu", torch.bfloat16)
        self.config = config_of(reader)
        self.tensors: dict[str, torch.Tensor] = {}
        self._stored = {tensor.name: tensor for tensor in reader.tensors}

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The tensor, dequantized; raises ``InvalidArgument`` if it is absent or has another
        shape."""
        from gguf.quants import dequantize

        own = gguf_name(name)
        if own not in self._stored:
            raise InvalidArgument(f"the GGUF file has no tensor {own} ({name})")
        tensor = self._stored[own]
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.shape != shape:
            raise InvalidArgument(f"{own} is {values.shape}; the configuration needs {shape}")
        for kind, heads in (
            ("attn_q.", self.config.num_attention_heads),
            ("attn_k.", self.config.num_key_value_heads),
        ):
            if kind in own:
                pairs = values.reshape(heads, -1, 2, shape[-1])
                values = pairs.swapaxes(1, 2).reshape(shape)
        self.tensors[name] = torch.from_numpy(np.array(values, order="C")).to(self.dtype)
        return self.tensors[name]


def gguf_name(name: str) -> str:
    """What GGUF calls the tensor with this published name."""
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{_NAMES[stem]}.{kind}"


# ---- tokenizer -----------------------------------------------------------------------------------


def _write_texts(reader: GGUFReader, config: Config, folder: Path) -> None:
    """Writes all files but the weights."""
    tokens = _value(reader, "tokenizer.ggml.tokens")

    def special(name: str) -> str:
        return str(tokens[_value(reader, f"tokenizer.ggml.{name}_token_id")])

    template = reader.get_field("tokenizer.chat_template")
    contents: dict[str, dict[str, Any]] = {
        "config.json": config.published(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special("bos"),
            "eos_token": special("eos"),
            "model_max_length": config.max_position_embeddings,
            "chat_template": template.contents() if template else "",
        },
        "generation_config.json": {
            "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
            "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    _tokenizer(reader, tokens).save(str(folder / "tokenizer.json"))


def _tokenizer(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer from its vocabulary and merges."""
    with needs_extra("moe"):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    kind = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if kind[0] != "gpt2" or kind[1] not in PRE_TOKENIZERS:
        raise InvalidArgument(
            f"the GGUF file's tokenizer {kind} must be gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    control = (text for text, type_ in zip(tokens, types, strict=True) if type_ == CONTROL_TOKEN)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    return tokenizer
