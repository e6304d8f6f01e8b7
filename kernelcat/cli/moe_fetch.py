"""``moe bench --fetch``: a prefix from host memory beside its recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelcat.cli.output import echo

if TYPE_CHECKING:
    from kernelcat.moe.fetch import FetchTimes
    from kernelcat.moe.model import Decoder


def bench_fetch(model: Decoder, options: dict[str, Any]) -> FetchTimes:
    """Times of a prefix in host memory, by an engine of its own."""
    import gc

    import torch

    from kernelcat.moe.engine.engine import Engine
    from kernelcat.moe.fetch import fetch_settings, time_fetch

    settings = fetch_settings(
        model, options["fetch"], options["step_tokens"], options["host_cache"],
        options["cache_dtype"],
    )  # fmt: skip
    engine = Engine(model, settings)
    times = time_fetch(engine, options["fetch"])
    echo(fetch_line(times), err=True)
    engine.close()
    del engine
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return times


def fetch_line(fetch: FetchTimes) -> str:
    """The times of a fetch, in words."""
    return (
        f"first token after a prefix of {fetch.num_tokens} tokens: recomputed "
        f"{fetch.recomputed_ms:.2f} ms, fetched from host memory {fetch.fetched_ms:.2f} ms "
        f"({fetch.speedup:.1f} times as fast), shared in pages {fetch.shared_ms:.2f} ms; a fetch "
        f"copies {fetch.num_bytes / 1e6:.1f} MB, alone at {fetch.bandwidth / 1e9:.1f} GB/s"
    )
