"""Times of an engine in this process: decoding at fixed batches, and loads of requests.

    decoding    all requests have a context of the same length, and write together
    load        requests of random lengths, all at once or with Poisson arrivals (`workload`)

Clocks are read after `Engine.step` has returned tokens, so that times are what a caller sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.serving_metrics import ServingMetrics, Slo, Timeline, measure
from kernelcat.moe.workload import Arrival, Workload


@dataclass(frozen=True)
class Decoding:
    """Speed of decoding at one batch; medians of rounds.

    Attributes
    ----------
    engine : who was measured: kernelcat, or a peer
    batch : requests that write together
    context : tokens of each prompt
    num_tokens : tokens that each request writes
    tokens_per_second : output tokens of all requests together, first tokens left out
    step_ms : milliseconds a token of one request
    prefill_ms : from the start until the last request has its first token
    rounds : tokens a second of each round
    """

    engine: str
    batch: int
    context: int
    num_tokens: int
    tokens_per_second: float
    step_ms: float
    prefill_ms: float
    rounds: list[float]

    @staticmethod
    def of(
        engine: str, batch: int, context: int, num_tokens: int, times: Sequence[tuple[float, float]]
    ) -> Decoding:
        """``times`` are, for each round, seconds of the prefill and of all later tokens."""
        rates = [batch * (num_tokens - 1) / decoding for _, decoding in times]
        rate = median(rates)
        return Decoding(
            engine, batch, context, num_tokens, rate, 1e3 * batch / rate,
            1e3 * median(prefill for prefill, _ in times), rates,
        )  # fmt: skip


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts of equal length."""
    random = np.random.default_rng(seed)
    found: list[list[int]] = random.integers(vocab_size, size=(count, length)).tolist()
    return found


def time_decoding(
    engine: Engine, batch: int, context: int, num_tokens: int, num_rounds: int = 3
) -> Decoding:
    """Times ``batch`` requests that write ``num_tokens`` greedy tokens each.

    A first round is not counted. Every round has prompts of its own, so the prefix cache has none.
    """
    parameters = SamplingParameters(temperature=0, max_tokens=num_tokens)
    times = []
    for seed in range(num_rounds + 1):
        start = time.perf_counter()
        for prompt in prompts(batch, context, engine.limits.vocab_size, seed):
            engine.submit(prompt, parameters, needs_text=False)
        num_waiting, first = batch, start
        started: set[str] = set()
        while engine.has_work:
            for output in engine.step():
                _check(output.error)
                started.add(output.request_id)
            if num_waiting and len(started) == batch:
                num_waiting, first = 0, time.perf_counter()
        times.append((first - start, time.perf_counter() - first))
    return Decoding.of("kernelcat", batch, context, num_tokens, times[1:])


@dataclass
class _Record:
    """When a request of a load was due, and when its output came."""

    arrival: Arrival
    due_at: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    def timeline(self) -> Timeline:
        return Timeline(
            self.due_at, self.times, self.num_tokens, len(self.arrival.prompt), self.error
        )


def time_load(
    engine: Engine,
    workload: Workload,
    slo: Slo | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Any] = time.sleep,
) -> ServingMetrics:
    """Runs the requests of ``workload`` and measures what a caller sees.

    A request arrives when it is due, also if a step runs then and the engine gets the request
    later. A request that the engine refuses counts as failed.
    """
    arrivals = workload.arrivals(engine.limits.vocab_size)
    start = clock()
    records = {str(i): _Record(a, start + a.time) for i, a in enumerate(arrivals)}
    left = list(records.items())[::-1]
    while left or engine.has_work:
        now = clock()
        while left and left[-1][1].due_at <= now:
            name, record = left.pop()
            parameters = SamplingParameters(temperature=0, max_tokens=record.arrival.num_output)
            try:
                engine.submit(record.arrival.prompt, parameters, request_id=name, needs_text=False)
            except KernelcatError as error:
                record.error = str(error)
        if not engine.has_work:
            if left:
                sleep(max(0.0, left[-1][1].due_at - clock()))
            continue
        outputs = engine.step()
        now = clock()
        for output in outputs:
            record = records[output.request_id]
            record.error = output.error
            if output.tokens:
                record.times.append(now)
                record.num_tokens += len(output.tokens)
    return measure([record.timeline() for record in records.values()], slo)


def _check(error: str) -> None:
    if error:
        raise KernelcatError(f"a request has failed: {error}")
