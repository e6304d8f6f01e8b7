"""Settings of an engine: limits, the size of the caches, speculation, CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.speculation import Speculation

GRAPH_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes
    ----------
    limits : of requests and steps; ``vocab_size`` 0 and a ``context`` beyond the model's positions
        are replaced by the model's
    page_size : tokens of a page
    num_pages : pages of each layer group; None for as many as ``memory`` leaves
    memory : part of the GPU's memory that weights, graphs, a step and the pages may take together
    cpu_cache_bytes : bytes of all pages on a CPU
    cache_dtype : element type of the caches, a name of torch (``float8_e4m3fn``); "" for the
        model's
    speculation : how drafts are made; None for no speculation
    has_prefix_cache : whether requests share pages of equal blocks
    is_overlapped : whether a step is planned and launched while the step before it runs
    graph_batches : batch sizes to which decode steps are padded, each a CUDA graph; () for none
    is_warmed_up : whether kernels are compiled for all sizes before the first request

    Raises
    ------
    InvalidArgument
        A value is out of range.
    """

    limits: Limits = field(default_factory=Limits)
    page_size: int = 64
    num_pages: tuple[int, ...] | None = None
    memory: float = 0.9
    cpu_cache_bytes: int = 1 << 30
    cache_dtype: str = ""
    speculation: Speculation | None = None
    has_prefix_cache: bool = True
    is_overlapped: bool = True
    graph_batches: tuple[int, ...] = GRAPH_BATCHES
    is_warmed_up: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.memory <= 1:
            raise InvalidArgument(f"memory={self.memory} must be greater than 0 and at most 1")
        if list(self.graph_batches) != sorted(set(self.graph_batches)) or 0 in self.graph_batches:
            raise InvalidArgument(
                f"graph_batches={self.graph_batches} must be positive and ascending"
            )
