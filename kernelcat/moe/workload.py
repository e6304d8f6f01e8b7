"""A load of requests: how long they are, when they arrive. The same seed gives the same load."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from kernelcat.errors import InvalidArgument


@dataclass(frozen=True)
class Arrival:
    """A request of a load: ``prompt`` token ids, tokens to write, seconds after the start."""

    prompt: tuple[int, ...]
    num_output: int
    time: float


@dataclass(frozen=True)
class Workload:
    """Random prompts with lengths uniform in ranges, and Poisson arrivals.

    The defaults are the offline habit: 256 requests, lengths of input and output uniform in [100,
    1024], all there at once. Each request writes ``num_output`` tokens, so the end of sequence must
    be ignored.

    Attributes
    ----------
    num_requests : requests
    input_range, output_range : first and last length
    rate : requests a second on average; inf for all at once
    seed : of everything that is random

    Raises
    ------
    InvalidArgument
        A number is out of range.
    """

    num_requests: int = 256
    input_range: tuple[int, int] = (100, 1024)
    output_range: tuple[int, int] = (100, 1024)
    rate: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or not self.rate > 0:
            raise InvalidArgument(
                f"num_requests={self.num_requests} and rate={self.rate} must be positive"
            )
        for name in ("input_range", "output_range"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InvalidArgument(f"{name}={low},{high} must be 1 <= first <= last")

    def arrivals(self, vocab_size: int) -> list[Arrival]:
        """The requests in the order of arrival; token ids are less than ``vocab_size``."""
        random = np.random.default_rng(self.seed)
        count = self.num_requests
        inputs = random.integers(*self.input_range, count, endpoint=True)
        outputs = random.integers(*self.output_range, count, endpoint=True)
        gaps = np.zeros(count) if self.rate == inf else random.exponential(1 / self.rate, count)
        times = np.cumsum(gaps) - gaps[0]
        return [
            Arrival(tuple(random.integers(vocab_size, size=n).tolist()), int(out), float(time))
            for n, out, time in zip(inputs, outputs, times, strict=True)
        ]
