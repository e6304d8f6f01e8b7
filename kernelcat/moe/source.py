"""Where a model comes from: a folder with a checkpoint, or a name and random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelcat import moe
from kernelcat.errors import UnknownName, nearest
from kernelcat.moe import config as configs
from kernelcat.moe.config import Config
from kernelcat.moe.model import Decoder
from kernelcat.moe.tokenizer import Tokenizer, tokenizer_of


@dataclass(frozen=True)
class ModelSource:
    """A model that can be opened in any process.

    Attributes
    ----------
    model : a folder, or with ``has_random_weights`` a name of `moe.SIZES`
    device : ``cuda`` or ``cpu``
    """

    model: str
    device: str
    has_random_weights: bool = False

    @property
    def name(self) -> str:
        """A short name."""
        return Path(self.model).resolve().name if not self.has_random_weights else self.model

    def config(self) -> Config:
        """The model's configuration.

        Raises
        ------
        InvalidArgument
            The folder has no valid `config.json`.
        UnknownName
            The architecture or the name is unknown.
        """
        if not self.has_random_weights:
            return moe.config_of(configs.read(self.model))
        if self.model not in moe.SIZES:
            hint = nearest(self.model, list(moe.SIZES))
            raise UnknownName(f"there is no model called {self.model!r}{hint}")
        return moe.SIZES[self.model]

    def open(self) -> Decoder:
        """The model with its weights; see `moe.load` for errors."""
        if self.has_random_weights:
            return moe.random_model(self.config(), self.device)
        return moe.load(self.model, self.device)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; see `tokenizer_of` for errors."""
        folder = None if self.has_random_weights else self.model
        return tokenizer_of(self.config(), folder)
