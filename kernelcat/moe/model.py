"""What all models share: embedding, the loop over layers, the last norm, and the head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe.batch import Batch
from kernelcat.moe.cache import CacheLayer, KvCache
from kernelcat.moe.config import Config
from kernelcat.moe.ops import Ops, launchers_of
from kernelcat.moe.ranges import span
from kernelcat.moe.weights import Weights

if TYPE_CHECKING:
    from kernelcat.moe.parallel.exchange import Exchange
    from kernelcat.moe.parallel.expert_layer import DividedExperts
    from kernelcat.moe.parallel.halves import Halves


class Decoder(ABC):
    """A decoder whose weights are on one device.

    ``model(batch, cache)`` writes the new tokens to the cache and returns the hidden states of the
    rows that need logits; ``logits`` and ``best`` apply the head to them. Shapes follow from the
    shapes of the batch's tensors and from ``max_q`` alone, and nothing is read on the host: a call
    can be captured in a CUDA graph.

    Attributes
    ----------
    config, ops, dtype, device, exchange : as the constructor got them; on several ranks ``config``
        is that of the rank's part, and the model runs on all ranks together
    max_positions : tokens that a sequence may have
    cache_layers : what each layer caches of a token
    cos_sin : (max_positions, rotary_dim) float32
    layers : weights of each layer
    divided : the experts, if ranks hold some of each layer; None where this process holds all
    halves : divides steps of many tokens, so that exchanges overlap with products; None for never
    """

    config_type: ClassVar[type[Config]]
    divided: DividedExperts | None = None
    halves: Halves | None = None

    def __init__(
        self,
        config: Any,
        weights: Weights,
        ops: Ops,
        max_positions: int | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.config, self.ops, self.exchange = config, ops, exchange
        self.dtype, self.device = weights.dtype, weights.device
        self.max_positions = max_positions or config.max_position_embeddings
        if self.max_positions > config.max_position_embeddings:
            raise InvalidArgument(
                f"max_positions={max_positions} exceeds the model's "
                f"{config.max_position_embeddings} positions"
            )
        vocabulary = config.vocab_size, config.hidden_size
        self.embed = weights("model.embed_tokens.weight", *vocabulary)
        self.layers = [
            self.read_layer(weights, f"model.layers.{i}.", i)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = weights("model.norm.weight", config.hidden_size)
        is_tied = config.tie_word_embeddings
        self.head = self.embed if is_tied else weights("lm_head.weight", *vocabulary)
        self.cache_layers = [self.cache_layer(i) for i in range(config.num_hidden_layers)]
        self.cos_sin = config.rope.table(self.rotary_dim, self.max_positions).to(self.device)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE rotates: all, if the model says nothing else."""
        return int(self.config.head_dim)

    @abstractmethod
    def read_layer(self, weights: Weights, prefix: str, index: int) -> Any:
        """The weights of layer ``index``, whose published names begin with ``prefix``."""

    def cache_layer(self, index: int) -> CacheLayer:
        """What layer ``index`` caches of a token: keys and values, and all tokens are seen."""
        return CacheLayer(((self.config.num_key_value_heads, self.config.head_dim),) * 2)

    @abstractmethod
    def forward(
        self,
        layer: Any,
        x: torch.Tensor,
        kv: tuple[torch.Tensor, ...],
        table: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """The residual stream after a layer; x (tokens, hidden) before it may be overwritten.

        ``kv`` are the layer's tensors of the cache, ``table`` is the block table of its group.
        """

    def __call__(
        self, batch: Batch, cache: KvCache, after_layer: Callable[[int], object] | None = None
    ) -> torch.Tensor:
        """Hidden states (rows, hidden) of ``batch.rows``, normalized; the cache gets all tokens.

        ``after_layer`` gets the number of each layer as soon as it has been launched.
        """
        x = self.ops.embedding(batch.tokens, self.embed)
        parts = zip(self.layers, cache.layers, cache.groups, strict=True)
        for i, (layer, kv, group) in enumerate(parts):
            with span("layer", i):
                x = self.forward(layer, x, kv, batch.block_tables[group], batch)
            if after_layer is not None:
                after_layer(i)
        if self.divided is not None:
            self.divided.end_step()
        return self.normalized(x.index_select(0, batch.rows), self.norm)

    @property
    def head_part(self) -> torch.Tensor:
        """The rows of the head that this rank reads to find the largest logit."""
        rank = 0 if self.exchange is None else self.exchange.rank
        return self.head.split(self._head_rows)[rank]

    @property
    def _head_rows(self) -> int:
        """Rows of all ranks' parts of the head but the last one."""
        ranks = 1 if self.exchange is None else self.exchange.ranks
        return -(-len(self.head) // ranks)

    @property
    def peers(self) -> Exchange | None:
        """The exchange with the other ranks, whatever they divide; None without any."""
        return self.exchange if self.divided is None else self.divided.exchange

    def launchers(self) -> list[Any]:
        """What a CUDA graph with captured calls needs to stay alive: kernels and workspaces."""
        return self.ops.launchers() + launchers_of(self.divided)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocab) float32 of hidden states x (rows, hidden)."""
        logits: torch.Tensor = self.ops.lm_head(x, self.head, top_k=1, has_logits=True)[2]
        return logits

    def best(self, x: torch.Tensor, top_k: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``top_k`` largest logits (rows, top_k) float32, falling, and their tokens, int32."""
        if self.exchange is not None and top_k == 1:
            return self._best_of_ranks(self.exchange, x)
        values, ids, _ = self.ops.lm_head(x, self.head, top_k=top_k)
        return values, ids

    def _best_of_ranks(
        self, exchange: Exchange, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`best`, for which each rank reads its rows of the head; ranks exchange their best."""
        values, ids, _ = self.ops.lm_head(x, self.head_part, top_k=1)
        ids += exchange.rank * self._head_rows
        found = torch.cat((values.view(torch.int32), ids), 1)
        every = exchange.all_gather(found)
        values, place = every[:, :, 0].contiguous().view(torch.float32).max(1, keepdim=True)
        return values, every[:, :, 1].gather(1, place)

    def normalized(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the rows of x (rows, N), times ``weight`` (N,)."""
        y: torch.Tensor = self.ops.rms_norm(x, weight, eps=self.config.rms_norm_eps)[0]
        return y
