"""Settings of an engine: limits, the size of the caches, speculation, CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.speculation import Speculation

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes
    ----------
    limits : of requests and steps; the engine lowers ``context`` to the model's positions
    page_size : tokens of a page
    num_pages : pages of each layer group, the null page included; None for as many as the memory
        has room for
    memory : part of the GPU's memory that everything together may take
    cpu_cache_bytes : bytes of all pages on a CPU
    cache_dtype : element type of the caches, a name of torch (``float8_e4m3fn``); "" for the
        model's
    speculation : how drafts are made; None for no speculation
    has_prefix_cache : whether requests share pages of equal blocks
    host_cache_bytes : bytes of host memory for blocks that leave the prefix cache; 0 for none
    min_fetch : a prefix in host memory is computed anew if fetching saves fewer tokens
    is_overlapped : whether a step is planned and launched while the step before it runs; None for
        on a GPU
    batch_sizes : batches to which decode steps are padded, each a CUDA graph; () for no padding and
        no graphs; None for `BATCH_SIZES` on a GPU and () on a CPU
    has_graphs : whether padded decode steps are CUDA graphs; False to launch each kernel
    split_tokens : on several ranks steps of as many tokens are computed in halves, so that
        exchanges overlap with products; 0 for never, None for where it should pay
    is_lockstep : whether this engine is one of several ranks that run steps of one size together

    Raises
    ------
    InvalidArgument
        A value is out of range.
    """

    limits: Limits = field(default_factory=Limits)
    page_size: int = 64
    num_pages: tuple[int, ...] | None = None
    memory: float = 0.9
    cpu_cache_bytes: int = 384 << 20
    cache_dtype: str = ""
    speculation: Speculation | None = None
    has_prefix_cache: bool = True
    host_cache_bytes: int = 0
    min_fetch: int = 256
    is_overlapped: bool | None = None
    batch_sizes: tuple[int, ...] | None = None
    has_graphs: bool = True
    split_tokens: int | None = None
    is_lockstep: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.memory <= 1:
            raise InvalidArgument(f"memory={self.memory} must be greater than 0 and at most 1")
        if self.host_cache_bytes < 0 or self.min_fetch < 1:
            raise InvalidArgument(
                f"host_cache_bytes={self.host_cache_bytes} must not be negative, and "
                f"min_fetch={self.min_fetch} must be positive"
            )
        if (self.split_tokens or 0) < 0:
            raise InvalidArgument(f"split_tokens={self.split_tokens} must not be negative")
        if self.host_cache_bytes and not self.has_prefix_cache:
            raise InvalidArgument("host_cache_bytes needs the prefix cache")
        sizes = self.batch_sizes or ()
        if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
            raise InvalidArgument(f"batch_sizes={sizes} must be positive and ascending")
