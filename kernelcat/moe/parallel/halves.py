"""A step's tokens in two halves: exchanges of one half overlap with products of the other.

Kernels of products are persistent: a thread block for each SM takes every n-th tile, and has all
registers of its SM. Beside such a kernel an exchange would wait for its end, or, if it came first,
make some thread blocks begin later, and with them the end of all. So while both run, products leave
`spare` SMs to the exchange, and the exchange takes no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernelcat.moe.parallel.beside import Beside, Mark, Result
from kernelcat.moe.parallel.exchange import Exchange

SPLIT_TOKENS = 4096
"""Tokens of a rank's step from which it is computed in halves.

Halves read weights twice, may have a wave of tiles more, and have twice as many exchanges, each of
which takes about 6 us beside its bytes. An output projection of 4,096 x 2880 x 2048 is three waves
of tiles of 128 x 256, and its halves are two each: 23 us more, where overlap saves 36 (predicted).
Of 8,192 tokens the halves are three waves each and the whole is six: 1.7 times as fast on two H100
(measured, docs/measured.md)."""
EXPERT_RANKS = 4
"""Ranks from which divided experts are computed in halves: on four H100 1.15 times as fast
as the whole. On two H100 halves take 1.06 times as long, with overlap and without. (Measured,
docs/measured.md.)"""
EXPERT_SMS = 20
"""SMs for `moe_dispatch` and `moe_combine`: 40 thread blocks, 32 for rows and 8 for index maps."""
REDUCE_SMS = 32
"""SMs for `all_reduce`: 64 thread blocks, the fewest that its kernels with a norm have."""
SMALL_LAUNCHES = 4
"""Launches of about 1 us each before an exchange that has SMs of its own. On two H200 a product
began up to 3.1 us behind its mark. After one small launch the exchange was there first in one of
ten runs, with a thread block on each of 64 SMs: the product took 1,087 us for 760."""
SPARED_WIDTH = 4096
"""Columns of a rank's output projection from which its product leaves SMs to an exchange. On two
H200 4,096 tokens of 2,880 are exchanged in 219 us on 32 SMs and in 107 on all. The product of 2,048
columns takes 92, too little to hide 219: halves take 403 us with SMs shared out, 355 in sequence
and 338 on two streams that share nothing out (measured, docs/measured.md)."""
ALIGNED_TOKENS = 8
"""The first half is a multiple of so many tokens, so that all parts of rows begin at 16 bytes."""


@dataclass(frozen=True)
class Halves:
    """Divides steps of at least ``min_tokens`` tokens; 0 for none.

    Attributes
    ----------
    exchange : whose calls `start` puts beside products
    beside : the stream of these calls
    min_tokens : the same on all ranks, which run steps of one size
    has_spare : whether products and exchanges share the SMs out; False to measure what that brings
    """

    exchange: Exchange
    beside: Beside
    min_tokens: int = SPLIT_TOKENS
    has_spare: bool = True

    def first(self, tokens: int) -> int:
        """Tokens of the first half of a step, or 0 if the step stays whole."""
        if not self.min_tokens or tokens < self.min_tokens:
            return 0
        half = -(-tokens // (2 * ALIGNED_TOKENS)) * ALIGNED_TOKENS
        return half if half < tokens else 0

    def of_width(self, width: int) -> Halves:
        """As these, and no SMs are shared out beside a product of fewer columns than pay."""
        return self if width >= SPARED_WIDTH else replace(self, has_spare=False)

    def spare(self, sms: int) -> int:
        """SMs that products beside an exchange on ``sms`` SMs leave to it."""
        return sms if self.has_spare else 0

    def start(self, exchange: Callable[[], Result], sms: int, after: Mark) -> Callable[[], Result]:
        """Starts an exchange behind ``after`` on ``sms`` SMs, beside what was launched since then.

        Exchanges of all ranks run in one order: the caller joins each before the next.
        """

        def run() -> Result:
            self._wait_for_products()
            if not self.has_spare:
                return exchange()
            with self.exchange.within(sms):
                return exchange()

        return self.beside.start(run, after)

    def _wait_for_products(self) -> None:
        """Small launches: products that begin at the same mark take their SMs before these end."""
        if self.beside.device.type == "cuda":
            for _ in range(SMALL_LAUNCHES):
                torch.zeros(1, device=self.beside.device)


def split_tokens(asked: int | None, ranks: int, has_divided_experts: bool) -> int:
    """`Halves.min_tokens` of a model: what was ``asked`` for, else what should pay."""
    if asked is not None:
        return asked
    return 0 if has_divided_experts and ranks < EXPERT_RANKS else SPLIT_TOKENS
