"""Pages that an engine sends to another one: which ones a step completes, and where they go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelcat.moe.cache import CacheLayer, KvCache
from kernelcat.moe.engine.pages import NULL_PAGE

if TYPE_CHECKING:
    import torch

    from kernelcat.moe.engine.step import Step
    from kernelcat.moe.engine.streams import Event


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the pages of a prompt go.

    Attributes
    ----------
    pages : for each layer group, the receiver's page of each block; `NULL_PAGE` for blocks that the
        receiver has, or does not need
    """

    pages: list[list[int]]


@dataclass(slots=True)
class PageMoves:
    """Pages that move from one cache to another: ``sources[i]`` becomes ``dests[i]``."""

    sources: list[int]
    dests: list[int]


def page_moves(step: Step, num_groups: int, page_size: int) -> list[PageMoves]:
    """What a step that was planned last sends, for each layer group.

    A block is sent by the step that completes it, or that ends the prompt; blocks of the prefix
    cache by the request's first step. The requests count what was sent.
    """
    moves = [PageMoves([], []) for _ in range(num_groups)]
    for chunk in step.chunks:
        request, table = chunk.request, chunk.request.table
        if request.destination is None or table is None:
            continue
        is_last = chunk.end >= len(request.prompt)
        end = -(-len(request.prompt) // page_size) if is_last else chunk.end // page_size
        for g, pages in enumerate(request.destination.pages):
            for block in range(request.num_sent, end):
                if pages[block] != NULL_PAGE:
                    moves[g].sources.append(int(table.pages[g, block]))
                    moves[g].dests.append(pages[block])
        request.num_sent = max(request.num_sent, end)
    return moves


class Link(ABC):
    """The way from this engine's cache to that of another engine, which has as many pages."""

    @abstractmethod
    def agree(self, pages: Sequence[int]) -> list[int]:
        """Pages of each layer group that both engines have room for; both call this together.

        Raises ``RankFailed`` if the other engine has failed.
        """

    @abstractmethod
    def allocate(
        self,
        layers: Sequence[CacheLayer],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
    ) -> KvCache:
        """This engine's cache, of zeros; both engines call this together, with equal arguments."""

    @abstractmethod
    def begin(self, moves: Sequence[PageMoves]) -> None:
        """A step that sends ``moves`` of each layer group is about to run."""

    @abstractmethod
    def send(self, layer: int) -> None:
        """Sends the pages of a layer, which the work in the current stream writes."""

    @abstractmethod
    def end(self) -> Event:
        """The point at which the pages of the step have arrived."""

    @abstractmethod
    def receive(self, destination: Destination) -> None:
        """Pages that the other engine has sent are in place; no step runs on the host meanwhile."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits on the host until all pages have arrived; raises what a kernel has raised."""
