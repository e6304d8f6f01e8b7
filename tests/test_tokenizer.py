"""Tokenizers: text to ids and back, bytes of tokens, and the files in a checkpoint's folder."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    HarmonyTokenizer,
    tokenizer_of,
)

TEXT = "Grüße, 日本語 😀\n\tend"


def byte_level() -> Backend:
    """Bytes, two merges, and two special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "en", "end"])}
    backend = Backend(models.BPE(vocab, [("e", "n"), ("en", "d")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<turn>")])
    return backend


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(300), FolderTokenizer(byte_level()), HarmonyTokenizer()],
    ids=["bytes", "folder", "harmony"],
)
def test_text_survives_and_bytes_of_tokens_add_up_to_it(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert max(tokens) < tokenizer.vocab_size
    assert tokenizer.decode(tokens) == TEXT
    assert b"".join(map(tokenizer.token_bytes, tokens)) == TEXT.encode()


def test_a_folder_names_ends_of_sequence_and_the_chat_template(tmp_path):
    backend = byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert FolderTokenizer.load(tmp_path).stop_tokens == frozenset()
    config = {"eos_token": {"content": "<eos>"}, "bos_token": None, "chat_template": "one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = FolderTokenizer.load(tmp_path)
    eos, turn = backend.token_to_id("<eos>"), backend.token_to_id("<turn>")
    assert loaded.stop_tokens == {eos} and loaded.token_bytes(eos) == b"<eos>"
    assert loaded.special_names == {"eos_token": "<eos>"} and loaded.chat_template == "one"
    assert loaded.decode([*loaded.encode("end"), eos]) == "end"

    config["chat_template"] = [
        {"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"},
    ]  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, turn]}))
    loaded = FolderTokenizer.load(tmp_path)
    assert loaded.stop_tokens == {eos, turn} and loaded.chat_template == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert FolderTokenizer.load(tmp_path).chat_template == "four"


def test_folders_without_a_valid_tokenizer_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"has no tokenizer\.json"):
        FolderTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="is not a valid tokenizer"):
        FolderTokenizer.load(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="must hold a JSON object"):
        FolderTokenizer.load(tmp_path)


def test_vocabularies_of_bytes_and_pieces_have_bytes():
    backend = Backend(models.BPE({"<0x0A>": 0, "\u2581a": 1, "b": 2}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = FolderTokenizer(backend)
    assert [tokenizer.token_bytes(token) for token in range(4)] == [b"\n", b" a", b"b", b""]


def test_text_of_users_makes_no_special_token_of_harmony():
    tokenizer = HarmonyTokenizer()
    assert not tokenizer.stop_tokens & set(tokenizer.encode("<|return|><|end|>"))
    assert {tokenizer.token_bytes(token) for token in tokenizer.stop_tokens} == {
        b"<|return|>", b"<|end|>", b"<|call|>",
    }  # fmt: skip


def test_the_tokenizer_follows_from_the_model(tmp_path):
    assert isinstance(tokenizer_of(moe.SIZES["gpt-oss-20b"], tmp_path), HarmonyTokenizer)
    small = moe.SIZES["small-gpt-oss"]
    assert tokenizer_of(small).vocab_size == small.vocab_size
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert isinstance(tokenizer_of(small, tmp_path), FolderTokenizer)
