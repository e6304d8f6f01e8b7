"""Serving numbers: from the times of requests to percentiles, throughput and goodput.

    TTFT        time to first token: from the request's arrival to its first token
    TPOT        time per output token of a request: (end - first) / (tokens - 1)
    ITL         inter-token latency: all gaps of all requests, pooled
    latency     from the request's arrival to its last token
    throughput  output tokens, or requests, a second
    goodput     requests a second that meet every service level objective (SLO)

The functions are pure and take times of any clock in seconds. `moe bench` uses them for the engine
inside of a process and for a server behind a URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kernelcat.errors import InvalidArgument


@dataclass(frozen=True)
class Timeline:
    """When a request arrived, and when its output came.

    Attributes
    ----------
    arrived_at : seconds. Under Poisson load the time at which the request was due, also if the
        client sent it later: a slow client must not look like a fast server.
    times : seconds at which output came, ascending. A server may send several tokens at once;
        their time is there once, so that ITL is what a reader sees.
    num_tokens : output tokens
    num_prompt_tokens : tokens of the prompt
    error : why the request failed; "" if it did not
    """

    arrived_at: float
    times: Sequence[float] = ()
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the request did not fail and has output."""
        return not self.error and bool(self.times)

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.times[0] - self.arrived_at

    @property
    def latency(self) -> float:
        """Seconds from the arrival to the last token."""
        return self.times[-1] - self.arrived_at

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one output and the next."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True)
class Slo:
    """Service level objectives of a request, in milliseconds; None for no objective.

    A request with fewer than two tokens meets every objective for TPOT.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads ``ttft=200,tpot=20,latency=5000``, in milliseconds.

        Raises
        ------
        InvalidArgument
            A name is unknown or repeated, or a value is not a positive number.
        """
        objectives: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = (word.strip() for word in part.partition("="))
            field_name = f"{name}_ms"
            try:
                number = float(value)
            except ValueError:
                number = 0.0
            is_known = field_name in cls.__dataclass_fields__ and field_name not in objectives
            if not is_known or not number > 0:
                raise InvalidArgument(
                    f"{part!r} is no objective; write ttft=200,tpot=20,latency=5000 (milliseconds)"
                )
            objectives[field_name] = number
        return cls(**objectives)

    def is_met(self, timeline: Timeline) -> bool:
        """Whether the request is complete and within every objective."""
        if not timeline.is_complete:
            return False
        pairs = [
            (timeline.ttft, self.ttft_ms),
            (timeline.tpot, self.tpot_ms),
            (timeline.latency, self.latency_ms),
        ]
        return all(value is None or limit is None or value * 1e3 <= limit for value, limit in pairs)


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds of a distribution; ``count`` is the number of values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """Percentiles of values in seconds, interpolated linearly; None without values."""
        if not seconds:
            return None
        values = np.asarray(seconds, np.float64) * 1e3
        p50, p90, p95, p99 = map(float, np.percentile(values, (50, 90, 95, 99)))
        return cls(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))


@dataclass(frozen=True)
class ServingMetrics:
    """What a load of requests measured.

    Attributes
    ----------
    duration_s : from the first arrival to the last output
    num_prompt_tokens, num_output_tokens : of complete requests
    output_throughput, request_throughput : output tokens and complete requests a second
    goodput : requests a second that meet every objective in ``slo``
    errors : message -> how many requests failed with it
    """

    num_requests: int
    num_complete: int
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    output_throughput: float
    request_throughput: float
    goodput: float
    slo: Slo
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    latency_ms: Percentiles | None
    errors: dict[str, int] = field(default_factory=dict)


def measure(timelines: Sequence[Timeline], slo: Slo | None = None) -> ServingMetrics:
    """The metrics of a load.

    Failed requests count in ``num_requests`` and ``errors``; their tokens and times count nowhere.

    Raises
    ------
    InvalidArgument
        There is no request.
    """
    if not timelines:
        raise InvalidArgument("there is no request to measure")
    slo = slo or Slo()
    complete = [timeline for timeline in timelines if timeline.is_complete]
    start = min(timeline.arrived_at for timeline in timelines)
    duration = max((timeline.times[-1] for timeline in complete), default=start) - start
    num_tokens = sum(timeline.num_tokens for timeline in complete)
    errors: dict[str, int] = {}
    for timeline in timelines:
        if not timeline.is_complete:
            message = timeline.error or "no output"
            errors[message] = errors.get(message, 0) + 1

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    return ServingMetrics(
        num_requests=len(timelines),
        num_complete=len(complete),
        duration_s=duration,
        num_prompt_tokens=sum(timeline.num_prompt_tokens for timeline in complete),
        num_output_tokens=num_tokens,
        output_throughput=rate(num_tokens),
        request_throughput=rate(len(complete)),
        goodput=rate(sum(map(slo.is_met, timelines))),
        slo=slo,
        ttft_ms=Percentiles.of([timeline.ttft for timeline in complete]),
        tpot_ms=Percentiles.of([t.tpot for t in complete if t.tpot is not None]),
        itl_ms=Percentiles.of([gap for timeline in complete for gap in timeline.gaps]),
        latency_ms=Percentiles.of([timeline.latency for timeline in complete]),
        errors=errors,
    )
