"""Exchanges: entries of several ranks as calls on the tensors of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernelcat.errors import RankFailed
from kernelcat.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from kernelcat.moe.parallel.followers import Followers
    from kernelcat.moe.parallel.messages import Message

Tensors = Sequence[torch.Tensor | None]

ANSWER_S = 6.0
"""Seconds in which all ranks must have come to an exchange."""
START_S = 600.0
"""Seconds in which all ranks must have prepared something that takes long: weights, compilation."""
END_S = 10.0
"""Seconds in which the process of a rank ends by itself, or is killed."""


@dataclass(frozen=True)
class Dispatched:
    """What has come to a rank: outputs of `moe_dispatch`, the part of this rank.

    Attributes
    ----------
    rows, gates : (ranks * tokens, hidden) and (ranks * tokens, top_k) float32; rows after the last
        one that has come have no values
    row_of : int32 (ranks, tokens), what `Exchange.combine` takes
    source_offsets, offsets, order, position : int32 (ranks + 1,), (local_experts + 1,),
        (ranks * tokens * top_k,), (ranks * tokens, top_k): maps of grouped products
    scale : (ceil(hidden / 128), ranks * tokens) float32 where rows are float8, or None
    """

    rows: torch.Tensor
    gates: torch.Tensor
    row_of: torch.Tensor
    source_offsets: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    position: torch.Tensor
    scale: torch.Tensor | None


class Exchange(ABC):
    """Rank ``rank`` of ``ranks`` processes that compute together.

    All ranks call the same methods in the same order, with tensors of the same shapes and types. A
    rank that dies, hangs or does not agree is ``RankFailed`` on all others, in less than 10
    seconds; an exchange that has failed once fails always.

    Attributes
    ----------
    followers : the processes of the other ranks, where this process has started them
    sms : SMs of each GPU that an exchange may take; None for all
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.rank, self.ranks = rendezvous.rank, rendezvous.ranks
        self.followers: Followers | None = None
        self.sms: int | None = None
        self._has_started = False
        self._failure = ""

    # ---- tensors --------------------------------------------------------------------------------

    @contextmanager
    def within(self, sms: int) -> Iterator[None]:
        """Exchanges take at most ``sms`` SMs of each GPU, on all ranks, and are slower for it."""
        self.sms = sms
        try:
            yield
        finally:
            self.sms = None

    def run(self, name: str, inputs: Tensors, out: Tensors, **axes: Any) -> None:
        """Compute the entry ``name`` of several ranks; the host does not wait for a GPU.

        Tensors on the device ``meta`` are outlines of a step, for which nothing is computed.

        Parameters
        ----------
        inputs, out : this rank's parts of the entry's tensors, without the axis of ranks; None for
            absent ones
        axes : those that no tensor has, but for the number of ranks

        Raises
        ------
        RankFailed
            A rank does not answer, or calls something else.
        InvalidArgument, Unsupported
            The tensors do not fit the entry; no kernel serves them on this GPU.
        """
        if any(tensor is not None and tensor.is_meta for tensor in out):
            return
        try:
            self._run(name, inputs, out, axes)
        except RankFailed as error:
            self.fail(str(error))
            raise

    @abstractmethod
    def _run(self, name: str, inputs: Tensors, out: Tensors, axes: Mapping[str, Any]) -> None:
        """`run` of tensors that have values."""

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + the sum of x (tokens, hidden) over all ranks: the entry `all_reduce`.

        The residual is the same on all ranks; the sum has the same bits on all of them.
        """
        out = torch.empty_like(x)
        self.run("all_reduce", (x, residual, None), (out, None))
        return out

    def all_reduce_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`all_reduce`, and the RMSNorm of its rows with ``eps`` and ``weight`` (hidden,).

        ``out`` gets both; None for new tensors.
        """
        summed, normed = out or (torch.empty_like(x), torch.empty_like(x))
        self.run("all_reduce", (x, residual, weight), (summed, normed), eps=eps)
        return summed, normed

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Few numbers of all ranks, int32 (rows, ranks, n), of each rank's x (rows, n).

        Bytes travel as numbers of 16 bits, to which the other ranks add zero.
        """
        data = x.new_zeros((len(x), self.ranks, 4 * x.shape[1]), dtype=torch.bfloat16)
        data[:, self.rank] = x.view(torch.uint8)
        summed = self.all_reduce(data.flatten(1)).to(torch.uint8)
        return summed.view(torch.int32).view(len(x), self.ranks, -1)

    def dispatch(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        local_experts: int,
        act_dtype: torch.dtype | None = None,
        offsets: torch.Tensor | None = None,
    ) -> Dispatched:
        """Tokens to the ranks of their experts: `moe_dispatch`.

        Parameters
        ----------
        x : (tokens, hidden) of this rank
        expert_ids, weights : (tokens, top_k) int32 and float32; an id counts the experts of all
            ranks, -1 is none
        local_experts : experts of each rank
        act_dtype : float8_e4m3fn to quantize rows; None for the type of x
        offsets : int32 (local_experts + 1,) for the offsets; None for a new tensor
        """
        (tokens, hidden), top_k = x.shape, expert_ids.shape[1]
        rows, dtype = self.ranks * tokens, act_dtype or x.dtype

        def int32(*shape: int) -> torch.Tensor:
            return x.new_empty(shape, dtype=torch.int32)

        is_float8 = dtype == torch.float8_e4m3fn
        scale = x.new_empty((-(-hidden // 128), rows), dtype=torch.float32) if is_float8 else None
        result = Dispatched(
            x.new_empty((rows, hidden), dtype=dtype),
            x.new_empty((rows, top_k), dtype=torch.float32),
            int32(self.ranks, tokens),
            int32(self.ranks + 1),
            int32(local_experts + 1) if offsets is None else offsets,
            int32(rows * top_k),
            int32(rows, top_k),
            scale,
        )
        self.run(
            "moe_dispatch", (x, expert_ids, weights), tuple(vars(result).values()),
            local_experts=local_experts,
        )  # fmt: skip
        return result

    def combine(
        self,
        sums: torch.Tensor,
        row_of: torch.Tensor,
        expert_ids: torch.Tensor,
        local_experts: int,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sums of a token's experts on all ranks, on its own rank: `moe_combine`.

        Parameters
        ----------
        sums : (ranks * tokens, hidden), weighted sums of this rank's experts for the rows that came
        row_of, expert_ids : those of the dispatch
        residual : (tokens, hidden) of this rank's tokens, added first
        out : (tokens, hidden) for the result; None for a new tensor
        """
        if out is None:
            out = sums.new_empty((len(expert_ids), sums.shape[1]))
        self.run(
            "moe_combine", (sums, row_of, expert_ids, residual), (out,),
            local_experts=local_experts,
        )  # fmt: skip
        return out

    def shared_bytes(self, size: int) -> list[torch.Tensor]:
        """Memory of each rank, uint8 (size,), which all ranks read and write until `close`.

        All ranks call this together. Raises ``RankFailed`` where a rank does not.
        """
        self.gather(None)  # the others may still load weights
        return self._shared_bytes(size)

    @abstractmethod
    def _shared_bytes(self, size: int) -> list[torch.Tensor]:
        """`shared_bytes`, which all ranks have called."""

    # ---- what hosts agree on --------------------------------------------------------------------

    def gather(self, value: Any, limit_s: float = START_S) -> list[Any]:
        """The values of all ranks in their order; a value is anything that JSON holds.

        Raises ``RankFailed`` where a rank has not called this within ``limit_s`` seconds.
        """
        self.check()
        try:
            return self.rendezvous.gather(value, limit_s=limit_s)[0]
        except RankFailed as error:
            self.fail(str(error))
            raise

    def broadcast(self, value: Any, limit_s: float = START_S) -> Any:
        """The value of rank 0, on all ranks; as in `gather`."""
        return self.gather(value if self.rank == 0 else None, limit_s)[0]

    def tell(self, message: Message) -> None:
        """Send a message to the ranks that follow; raises ``RankFailed`` if one takes none."""
        assert self.followers is not None
        try:
            self.followers.send(message)
        except RankFailed as error:
            self.fail(str(error))
            raise

    def prepare(self) -> None:
        """From now on, as at first, ranks may be minutes apart: one compiles what another finds."""
        self._has_started = False

    def start(self) -> None:
        """Wait until all ranks have prepared what they will run: who is late then has failed."""
        self.gather(None)
        self._has_started = True

    def check(self) -> None:
        """Raise ``RankFailed`` if a rank has failed, or did not answer a kernel in time."""
        if self._failure:
            raise RankFailed(self._failure)

    def fail(self, reason: str) -> None:
        """Every exchange from now on fails for this ``reason``, on all ranks."""
        if not self._failure:
            self._failure = reason
            self.rendezvous.fail(reason)

    def close(self) -> None:
        """Leave; the others see that this rank has ended, and processes that follow end."""
        if self.followers is not None:
            self.followers.end()
        self._leave()
        if self.followers is not None:
            self.followers.wait(0.0 if self._failure else END_S)

    def _leave(self) -> None:
        self.rendezvous.close()
