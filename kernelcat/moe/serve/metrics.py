"""Metrics for Prometheus: what the HTTP side counts, and what the engine says when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TPOT_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
LATENCY_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """All metrics of a server, in a registry of their own.

    Parameters
    ----------
    engine_state : name -> value of the engine's numbers; names that end in ``_total`` are counters.
        A table has a row for each layer; ``expert_assignments_total`` has a column for each expert

    Attributes
    ----------
    responses : by endpoint and HTTP status; ``499`` for clients that went away. The status of a
        stream is that of its beginning
    broken_streams : streams that ended without their last event, by reason
    ttft, tpot, latency : seconds of choices that were answered, from the arrival of the request;
        tpot is (end - first) / (tokens - 1)
    """

    def __init__(self, engine_state: Callable[[], dict[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.responses = Counter(
            "kernelcat_responses",
            "Responses by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.broken_streams = Counter(
            "kernelcat_broken_streams",
            "Streams that ended without their last event",
            ["reason"],
            registry=registry,
        )
        self.ttft = Histogram(
            "kernelcat_ttft_seconds", "Time to first token", buckets=TTFT_BUCKETS, registry=registry
        )
        self.tpot = Histogram(
            "kernelcat_tpot_seconds",
            "Time per output token of a request",
            buckets=TPOT_BUCKETS,
            registry=registry,
        )
        self.latency = Histogram(
            "kernelcat_latency_seconds",
            "Time from arrival to end",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        registry.register(_EngineCollector(engine_state))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's numbers, read when Prometheus reads them."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        for name, value in self._state().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            text = f"The engine's {name.removesuffix('_total').replace('_', ' ')}"
            if not isinstance(value, tuple):
                yield kind(f"kernelcat_{name}", text, value=value)
                continue
            family = kind(f"kernelcat_{name}", text, labels=["layer", name.partition("_")[0]])
            for layer, row in enumerate(value):
                for column, count in enumerate(row):
                    family.add_metric([str(layer), str(column)], count)
            yield family
