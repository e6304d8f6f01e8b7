"""Configurations of models, as the `config.json` of a Hugging Face checkpoint has them.

Each model has a frozen dataclass whose fields have the names of `config.json`. Fields without a
default must be in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from kernelcat.errors import InvalidArgument
from kernelcat.moe.rope import Rope

_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "tuple[str, ...]": list}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every model has.

    Attributes
    ----------
    architecture, model_type : the model's names in `config.json`
    other_names : names that some files have for a field -> the field
    also_published : further content of `config.json`, which the dataclass does not need
    rope : RoPE's parameters, of several fields of `config.json`
    """

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    other_names: ClassVar[Mapping[str, str]] = {}
    also_published: ClassVar[Mapping[str, Any]] = {}

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = field(default_factory=Rope)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The configuration that ``content`` of a `config.json` describes.

        Raises
        ------
        InvalidArgument
            Fields are missing, have another type, or ask for something that is not supported.
        """
        by_field = {cls.other_names.get(name, name): value for name, value in content.items()}
        by_field["rope"] = Rope.of(content)
        required = [f.name for f in fields(cls) if f.default is MISSING and f.name != "rope"]
        missing = [name for name in required if by_field.get(name) is None]
        if missing:
            raise InvalidArgument(f"config.json of {cls.architecture} lacks {', '.join(missing)}")
        names = [f.name for f in fields(cls) if by_field.get(f.name) is not None]
        values = {name: by_field[name] for name in names}
        for f in fields(cls):
            value, kind = values.get(f.name), _KINDS.get(str(f.type), object)
            if value is not None and (
                not isinstance(value, kind) or _is_misplaced_bool(value, kind)
            ):
                raise InvalidArgument(f"config.json: {f.name}={value!r} must be of type {f.type}")
            if kind is int and value is not None and value < 0:
                raise InvalidArgument(f"config.json: {f.name}={value} must not be negative")
            if isinstance(value, list):
                values[f.name] = tuple(value)
        config = cls(**values)
        if reason := config.unsupported(content):
            raise InvalidArgument(f"config.json of {cls.architecture}: {reason}")
        return config

    def unsupported(self, content: Mapping[str, Any]) -> str | None:
        """What in ``content`` of a `config.json` the model does not support, or None."""
        act = content.get("hidden_act", "silu")
        return f"hidden_act={act!r} must be silu" if act != "silu" else None

    def published(self) -> dict[str, Any]:
        """The content of a `config.json`, in the types of JSON; the inverse of :meth:`of`."""
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name != "rope"
        }
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        types = {"torch_dtype": "bfloat16", "hidden_act": "silu"}
        return {**names, **types, **values, **self.rope.published(), **self.also_published}


def _is_misplaced_bool(value: object, kind: object) -> bool:
    """Whether ``value`` is a boolean where a number is needed: Python takes booleans for ints."""
    return isinstance(value, bool) and kind not in (bool, object)


def read(path: str | Path) -> dict[str, Any]:
    """The content of `config.json` in folder ``path``.

    Raises ``InvalidArgument`` if there is no such file, or if it is no JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise InvalidArgument(f"{file} does not exist; a checkpoint is a folder with a config.json")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{file} must be a JSON object, not a {type(content).__name__}")
    return content
