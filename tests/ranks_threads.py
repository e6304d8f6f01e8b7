"""Ranks of an exchange of the CPU, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelcat.errors import KernelcatError
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.host_exchange import HostExchange


def together(folder: Path, ranks: Sequence[Callable[[Exchange], Any]]) -> list[Any]:
    """What a function for each rank returns, or the text of the error that it raised."""
    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            exchange = HostExchange(rank, len(ranks), folder / "ranks")
            results[rank] = ranks[rank](exchange)
            exchange.close()
        except KernelcatError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
