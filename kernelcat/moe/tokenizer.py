"""Tokenizers: text to token ids and back, which tokens end a text, and the chat template.

FolderTokenizer    the `tokenizer.json` of a checkpoint, by the package `tokenizers`
HarmonyTokenizer   gpt-oss, by `openai-harmony`
ByteTokenizer      a token is a byte: for random weights without a tokenizer
"""

from __future__ import annotations

import gzip
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kernelcat.errors import InvalidArgument, MissingDependency
from kernelcat.moe.config import Config

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding
    from tokenizers import Tokenizer as Backend


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes
    ----------
    vocab_size : ids are less
    stop_tokens : tokens that end a text
    chat_template : Jinja template of a chat, "" without one
    special_names : what the template calls special tokens (``bos_token``) -> their text
    """

    vocab_size: int
    stop_tokens: frozenset[int] = frozenset()
    chat_template: str = ""
    special_names: Mapping[str, str] = {}

    @abstractmethod
    def encode(self, text: str, adds_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``, after the tokens with which every text of the model begins.

        Chat templates write such tokens themselves.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without special tokens; U+FFFD for bytes that are no character."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; for special tokens those of their names."""


class ByteTokenizer(Tokenizer):
    """Ids below 256 are bytes of UTF-8; other ids have the text U+FFFD. No token ends a text.

    The chat template writes roles as plain text.
    """

    chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "assistant:"
    )

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 256:
            raise InvalidArgument(f"vocab_size={vocab_size} must be at least 256, one for a byte")
        self.vocab_size = vocab_size

    def encode(self, text: str, adds_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else "\ufffd".encode()


class FolderTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`.

    Parameters
    ----------
    backend : the tokenizer
    stop_tokens, chat_template, special_names : as in `Tokenizer`
    """

    def __init__(
        self,
        backend: Backend,
        stop_tokens: frozenset[int] = frozenset(),
        chat_template: str = "",
        special_names: Mapping[str, str] | None = None,
    ) -> None:
        self.backend, self.stop_tokens = backend, stop_tokens
        self.chat_template, self.special_names = chat_template, dict(special_names or {})
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        decoder = json.loads(backend.to_str())["decoder"] or {}
        self._is_byte_level = '"ByteLevel"' in json.dumps(decoder)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The tokenizer in the folder of a checkpoint.

        Reads `tokenizer.json`, and where they are there `tokenizer_config.json`,
        `chat_template.jinja` and `generation_config.json`.

        Raises
        ------
        InvalidArgument
            There is no `tokenizer.json`, or a file is not valid.
        MissingDependency
            The package `tokenizers` is not installed.
        """
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError as error:
            raise MissingDependency(
                "tokenizer.json needs the package tokenizers: pip install 'kernelcat[moe]'"
            ) from error
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgument(f"{folder} has no tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises no narrower class
            raise InvalidArgument(f"{path} is not a valid tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        names = {
            name: value if isinstance(value, str) else value.get("content", "")
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        template = folder / "chat_template.jinja"
        text = template.read_text() if template.is_file() else _template(config)
        return cls(backend, _stop_tokens(folder, backend, names), text, names)

    def encode(self, text: str, adds_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=adds_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.backend.decode(tokens, skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        name = self.backend.id_to_token(token)
        if name is None:
            return b""
        if self._is_byte_level:
            return bytes(byte for letter in name for byte in _letter_bytes(letter))
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return str(name).replace("\u2581", " ").encode()


class HarmonyTokenizer(Tokenizer):
    """The vocabulary o200k with the special tokens of gpt-oss's chat format."""

    vocab_size = 201088

    def __init__(self) -> None:
        self.encoding = harmony_encoding()
        self.stop_tokens = frozenset(self.encoding.stop_tokens())

    def encode(self, text: str, adds_special_tokens: bool = True) -> list[int]:
        return self.encoding.encode(text, disallowed_special=())

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        return bytes(self.encoding._inner.decode_bytes([token]))


def tokenizer_of(config: Config, folder: str | Path | None = None) -> Tokenizer:
    """The tokenizer of the model that ``config`` describes.

    gpt-oss has harmony. Other models have the tokenizer in ``folder``, or bytes where there is no
    folder, because their weights are random.

    Raises
    ------
    InvalidArgument
        The folder has no valid tokenizer, or the model has too few tokens.
    MissingDependency
        A package is not installed.
    """
    if config.model_type == "gpt_oss" and config.vocab_size >= HarmonyTokenizer.vocab_size:
        return HarmonyTokenizer()
    return ByteTokenizer(config.vocab_size) if folder is None else FolderTokenizer.load(folder)


@cache
def harmony_encoding() -> HarmonyEncoding:
    """gpt-oss's chat format with its vocabulary.

    The vocabulary is read from the folder `TIKTOKEN_ENCODINGS_BASE`; without that variable the file
    in the package `bpe-openai` is unpacked into kernelcat's cache folder.

    Raises
    ------
    MissingDependency
        A package is not installed.
    """
    try:
        if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(_unpacked_vocabulary())
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "gpt-oss's text needs openai-harmony and bpe-openai: pip install 'kernelcat[moe]'"
        ) from error
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def _unpacked_vocabulary() -> Path:
    """A folder with `o200k_base.tiktoken`, unpacked from the package `bpe-openai`."""
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("kernelcat")) / "vocabularies"
    path = folder / "o200k_base.tiktoken"
    if not path.is_file():
        package = find_spec("bpe_openai")  # the file is enough: its library takes 70 MB
        if package is None or package.origin is None:
            raise ModuleNotFoundError("bpe_openai")
        packed = Path(package.origin).parent / "data" / "o200k_base.tiktoken.gz"
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(gzip.decompress(packed.read_bytes()))
        part.replace(path)
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file ``path``; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} must hold a JSON object")
    return content


def _template(config: Mapping[str, Any]) -> str:
    """The chat template in `tokenizer_config.json`, the default one of several."""
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        by_name = {item["name"]: item["template"] for item in template}
        template = by_name.get("default", "")
    return str(template)


def _stop_tokens(folder: Path, backend: Backend, names: Mapping[str, str]) -> frozenset[int]:
    """The ends of sequence in `generation_config.json`, else those of the tokenizer."""
    ids = _read_json(folder / "generation_config.json").get("eos_token_id")
    if ids is None and "eos_token" in names:
        ids = backend.token_to_id(names["eos_token"])
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list) else frozenset([ids])


def _letter_bytes(letter: str) -> bytes:
    """What a letter of a byte-level vocabulary stands for."""
    byte = _byte_letters().get(letter)
    return letter.encode() if byte is None else bytes([byte])


@cache
def _byte_letters() -> dict[str, int]:
    """Letter -> byte in byte-level vocabularies (GPT-2).

    Bytes that are printable in Latin-1 stand for themselves, all others follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
