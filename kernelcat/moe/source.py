"""Where a model comes from: a folder with a checkpoint, a download, or random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelcat import moe
from kernelcat.errors import InvalidArgument, UnknownName, nearest
from kernelcat.moe import config as configs
from kernelcat.moe import download
from kernelcat.moe.config import Config
from kernelcat.moe.engine.memory import fitting
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import on
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.followers import Followers
from kernelcat.moe.parallel.host_exchange import HostExchange
from kernelcat.moe.parallel.sharding import part_of
from kernelcat.moe.tokenizer import Tokenizer, tokenizer_of
from kernelcat.moe.upcycle import load_upcycled
from kernelcat.moe.weights import ALL_EXPERTS, ExpertShare, MetaWeights
from kernelcat.ranks.rendezvous import Watch


@dataclass(frozen=True)
class ModelSource:
    """A model that can be opened in any process.

    Attributes
    ----------
    model : a folder, or with ``has_random_weights`` a name of `moe.SIZES`
    device : ``cuda`` or ``cpu``
    upcycle : a way of `upcycle.WAYS` to run a Llama as a mixture of experts; "" for none
    tp : ranks that have a part of each layer; each is a process
    gpus : number of each rank's GPU; () for 0 to ``tp`` - 1
    """

    model: str
    device: str
    has_random_weights: bool = False
    upcycle: str = ""
    tp: int = 1
    gpus: tuple[int, ...] = ()

    @staticmethod
    def find(
        model: str,
        device: str = "",
        has_random_weights: bool = False,
        upcycle: str = "",
        tell: Callable[[str], object] = print,
        tp: int = 1,
    ) -> ModelSource:
        """The source of ``model``; a name of `download.PACKAGES` is downloaded on the first use.

        Parameters
        ----------
        device : "" for ``cuda`` where there is a GPU
        tell : gets a line about a download

        Raises
        ------
        InvalidArgument
            Random weights cannot be upcycled, and no upcycled model runs on several ranks; there
            are fewer GPUs than ranks.
        DownloadError
            The download has failed.
        """
        if has_random_weights and upcycle:
            raise InvalidArgument("only a checkpoint can be upcycled, and random weights are none")
        is_folder = (Path(model) / "config.json").is_file()
        if model in download.PACKAGES and not has_random_weights and not is_folder:
            model = str(download.ensure(model, tell))
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if tp < 1 or (tp > 1 and upcycle):
            raise InvalidArgument(f"tp={tp} must be positive, and 1 for an upcycled model")
        source = ModelSource(model, device, has_random_weights, upcycle, tp)
        source.check_gpus(tp)
        return source

    def check_gpus(self, ranks: int) -> None:
        """Raises ``InvalidArgument`` if ``ranks`` cannot have a GPU each, and none is named."""
        if self.device == "cuda" and not self.gpus and ranks > torch.cuda.device_count():
            raise InvalidArgument(
                f"{ranks} ranks need a GPU each, and {torch.cuda.device_count()} are visible"
            )

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

    def outline(self) -> Decoder:
        """The model without weights: its shapes, layers and limits."""
        return moe.build(self.config(), MetaWeights("meta", torch.bfloat16), on("cpu"))

    def open(self, dense_experts: bool = False) -> Decoder:
        """The model with its weights; see `moe.load` for ``dense_experts`` and errors.

        With ``tp`` this process becomes rank 0, and starts the others, which end with the thread
        that calls this; closing the model's ``exchange`` ends them before.

        Also raises ``InvalidArgument`` if the weights do not fit into the memory, or the model
        cannot be divided among the ranks, and ``RankFailed`` if another rank does not come.
        """
        if self.tp == 1:
            return self._opened(self.device, dense_experts)
        if dense_experts:
            raise InvalidArgument("decoded experts are for one rank")
        part_of(self.config(), self.tp)
        followers = Followers(self)
        try:
            exchange = self.join(0, followers.path, followers.check)
        except BaseException:
            followers.end()
            followers.wait(0.0)
            raise
        exchange.followers = followers
        try:
            return self.part(exchange)
        except BaseException:
            exchange.close()
            raise

    def join(self, rank: int, path: Path, watch: Watch | None = None, ranks: int = 0) -> Exchange:
        """The exchange of rank ``rank`` with the others, which meet at the socket ``path``.

        ``ranks`` is their number, by default ``tp``.
        """
        ranks = ranks or self.tp
        if self.device == "cpu":
            return HostExchange(rank, ranks, path, watch=watch)
        from kernelcat.moe.parallel.device_exchange import DeviceExchange

        return DeviceExchange(rank, ranks, path, self._gpu(rank), watch)

    def part(self, exchange: Exchange) -> Decoder:
        """The part of the model that a rank holds; all ranks have opened theirs when it returns."""
        decoder = self._opened(self._device_of(exchange.rank), exchange=exchange)
        exchange.gather(None)
        return decoder

    def share(self, exchange: Exchange) -> Decoder:
        """The model with the experts that a rank holds; all ranks have theirs when it returns."""
        share = ExpertShare(exchange.rank, exchange.ranks)
        decoder = self._opened(self._device_of(exchange.rank), share=share)
        exchange.gather(None)
        return decoder

    def _device_of(self, rank: int) -> str:
        """The device of a rank, which becomes this process's device if it is a GPU."""
        if self.device == "cpu":
            return self.device
        device = f"cuda:{self._gpu(rank)}"
        torch.cuda.set_device(device)
        return device

    def _gpu(self, rank: int) -> int:
        return self.gpus[rank] if self.gpus else rank

    def _opened(
        self,
        device: str,
        dense_experts: bool = False,
        exchange: Exchange | None = None,
        share: ExpertShare = ALL_EXPERTS,
    ) -> Decoder:
        with fitting(f"the weights of {self.name}", "take a smaller model, or a larger device"):
            options: Any = {"dense_experts": dense_experts, "exchange": exchange, "share": share}
            if self.has_random_weights:
                return moe.random_model(self.config(), device, **options)
            if self.upcycle:
                return load_upcycled(self.model, self.upcycle, device=device)
            return moe.load(self.model, device, **options)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; see `tokenizer_of` for errors."""
        folder = None if self.has_random_weights else self.model
        return tokenizer_of(self.config(), folder)
