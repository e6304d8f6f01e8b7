"""Time to the first token of a request whose prefix comes from host memory, beside other ways.

    recomputed  nobody knows the prefix: all tokens are computed
    shared      the prefix is in pages of the device
    fetched     the prefix is in host memory only

All three are taken in turn, in one engine, with the same prefix and `NUM_OWN` tokens after it that
nobody had before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import median

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.bench import first_token, prompts
from kernelcat.moe.cache import windows
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.model import Decoder

NUM_OWN = 16
"""Tokens of a prompt after its prefix."""


@dataclass(frozen=True)
class FetchTimes:
    """Times to the first token; medians of rounds.

    Attributes
    ----------
    num_tokens : tokens of the prefix
    recomputed_ms, shared_ms, fetched_ms : milliseconds from the request until its first token
    speedup : of fetching: ``recomputed_ms / fetched_ms``
    num_bytes : bytes that a fetch copies
    bandwidth : bytes a second of a copy from host memory to pages, measured alone
    """

    num_tokens: int
    recomputed_ms: float
    shared_ms: float
    fetched_ms: float
    speedup: float
    num_bytes: int
    bandwidth: float


def fetch_settings(
    model: Decoder, num_tokens: int, step_tokens: int, host_bytes: int, cache_dtype: str = ""
) -> EngineSettings:
    """Settings of an engine for `time_fetch`, whose pages hold two prompts, so that old ones leave.

    ``host_bytes`` must hold the prefix and the prompts that drive it out.

    Raises ``InvalidArgument`` if ``num_tokens`` are no full pages.
    """
    if num_tokens % EngineSettings.page_size:
        raise InvalidArgument(
            f"a prefix of {num_tokens} tokens must be a multiple of {EngineSettings.page_size}, "
            "the tokens of a page"
        )
    context = num_tokens + NUM_OWN + 1
    limits = Limits(step_tokens, max_running=1, context=context)
    pages = 2 * (ceil((context + 2 * step_tokens) / EngineSettings.page_size) + 1)
    num_pages = (pages,) * len(windows(model.cache_layers))
    return EngineSettings(
        limits, num_pages=num_pages, cache_dtype=cache_dtype, host_cache_bytes=host_bytes,
        min_fetch=1,
    )  # fmt: skip


def time_fetch(engine: Engine, num_tokens: int, num_rounds: int = 5) -> FetchTimes:
    """Times prompts that begin with ``num_tokens`` tokens; a first round is not counted.

    Parameters
    ----------
    engine : an engine with `fetch_settings`
    num_tokens : a multiple of the tokens of a page

    Raises
    ------
    KernelcatError
        A prefix was not where it should be: host memory is too small, for example.
    """
    rounds = [_round(engine, num_tokens, seed) for seed in range(num_rounds + 1)][1:]
    recomputed, shared, fetched, num_bytes = zip(*rounds, strict=True)
    recomputed_ms, fetched_ms = 1e3 * median(recomputed), 1e3 * median(fetched)
    return FetchTimes(
        num_tokens, recomputed_ms, 1e3 * median(shared), fetched_ms, recomputed_ms / fetched_ms,
        num_bytes[0], engine.statistics().host_bandwidth,
    )  # fmt: skip


def _round(engine: Engine, num_tokens: int, seed: int) -> tuple[float, float, float, int]:
    """Seconds of the three ways, and the bytes of the fetch."""
    num_pages = max(engine.settings.num_pages or ())
    num_others = ceil(num_pages * engine.settings.page_size / num_tokens)
    vocab_size = engine.limits.vocab_size
    [prefix] = prompts(1, num_tokens, vocab_size, seed=1 << 22 | seed)
    own = prompts(3, NUM_OWN, vocab_size, seed=1 << 23 | seed)
    others = prompts(num_others, num_tokens, vocab_size, seed=1 << 24 | seed)
    recomputed, _ = _timed(engine, prefix + own[0], num_cached=0, num_fetched=0)
    shared, _ = _timed(engine, prefix + own[1], num_cached=num_tokens, num_fetched=0)
    for other in others:  # they take all pages
        first_token(engine, other)
    fetched, num_bytes = _timed(engine, prefix + own[2], num_tokens, num_fetched=num_tokens)
    return recomputed, shared, fetched, num_bytes


def _timed(
    engine: Engine, prompt: list[int], num_cached: int, num_fetched: int
) -> tuple[float, int]:
    """Seconds to the first token, and the bytes that were fetched for it."""
    before = engine.statistics()
    seconds = first_token(engine, prompt)
    after = engine.statistics()
    cached = after.cached_tokens_total - before.cached_tokens_total
    fetched = after.fetched_tokens_total - before.fetched_tokens_total
    if (cached, fetched) != (num_cached, num_fetched):
        raise KernelcatError(
            f"{cached} tokens of the prompt were known and {fetched} of them fetched from host "
            f"memory, where {num_cached} and {num_fetched} should be: host memory of "
            f"{engine.settings.host_cache_bytes} bytes may be too small"
        )
    return seconds, after.fetched_bytes_total - before.fetched_bytes_total
