"""Where a model comes from: a folder with a checkpoint, a download, or random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernelcat import moe
from kernelcat.errors import InvalidArgument, UnknownName, nearest
from kernelcat.moe import config as configs
from kernelcat.moe import download
from kernelcat.moe.config import Config
from kernelcat.moe.engine.memory import fitting
from kernelcat.moe.model import Decoder
from kernelcat.moe.tokenizer import Tokenizer, tokenizer_of
from kernelcat.moe.upcycle import load_upcycled


@dataclass(frozen=True)
class ModelSource:
    """A model that can be opened in any process.

    Attributes
    ----------
    model : a folder, or with ``has_random_weights`` a name of `moe.SIZES`
    device : ``cuda`` or ``cpu``
    upcycle : a way of `upcycle.WAYS` to run a Llama as a mixture of experts; "" for none
    """

    model: str
    device: str
    has_random_weights: bool = False
    upcycle: str = ""

    @staticmethod
    def find(
        model: str,
        device: str = "",
        has_random_weights: bool = False,
        upcycle: str = "",
        tell: Callable[[str], object] = print,
    ) -> ModelSource:
        """The source of ``model``; a name of `download.PACKAGES` is downloaded on the first use.

        Parameters
        ----------
        device : "" for ``cuda`` where there is a GPU
        tell : gets a line about a download

        Raises
        ------
        InvalidArgument
            Random weights cannot be upcycled.
        DownloadError
            The download has failed.
        """
        if has_random_weights and upcycle:
            raise InvalidArgument("only a checkpoint can be upcycled, and random weights are none")
        is_folder = (Path(model) / "config.json").is_file()
        if model in download.PACKAGES and not has_random_weights and not is_folder:
            model = str(download.ensure(model, tell))
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return ModelSource(model, device, has_random_weights, upcycle)

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
        """The model with its weights; see `moe.load` for errors.

        Also raises ``InvalidArgument`` if the weights do not fit into the memory.
        """
        with fitting(f"the weights of {self.name}", "take a smaller model, or a larger device"):
            if self.has_random_weights:
                return moe.random_model(self.config(), self.device)
            if self.upcycle:
                return load_upcycled(self.model, self.upcycle, device=self.device)
            return moe.load(self.model, self.device)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; see `tokenizer_of` for errors."""
        folder = None if self.has_random_weights else self.model
        return tokenizer_of(self.config(), folder)
