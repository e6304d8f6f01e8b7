"""Times of an engine in this process: decoding at fixed batches, and loads of requests.

    decoding       all requests have a context of the same length, and write together
    first token    one request alone, whose prompt begins as an earlier one did
    load           requests of random lengths, all at once or with Poisson arrivals (`workload`)

Clocks are read after `Engine.step` has returned tokens, so that times are what a caller sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.engine.engine import RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.serving_metrics import ServingMetrics, Slo, Timeline, measure
from kernelcat.moe.workload import Arrival, Workload


class Stepped(Protocol):
    """What is timed: an `Engine`, or engines of several ranks with its interface."""

    limits: Limits

    def submit(
        self,
        prompt: Sequence[int],
        parameters: SamplingParameters | None = None,
        *,
        request_id: str | None = None,
        needs_text: bool = True,
    ) -> Any:
        """Adds a request."""

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""

    def step(self) -> list[RequestOutput]:
        """Waits for outputs, and returns what is new."""


class Round(NamedTuple):
    """Seconds of the prefill, of decoding, and the tokens that were written meanwhile."""

    prefill: float
    decoding: float
    num_decoded: int


@dataclass(frozen=True)
class Decoding:
    """Speed of decoding at one batch; medians of rounds.

    Attributes
    ----------
    engine : who was measured: kernelcat, or a peer
    batch : requests that write together
    context : tokens of each prompt
    num_tokens : tokens that each request writes
    tokens_per_second : output tokens of all requests together while all of them write
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
        engine: str, batch: int, context: int, num_tokens: int, rounds: Sequence[Round]
    ) -> Decoding:
        """The medians of ``rounds``."""
        rates = [one.num_decoded / one.decoding for one in rounds]
        rate = median(rates)
        return Decoding(
            engine, batch, context, num_tokens, rate, 1e3 * batch / rate,
            1e3 * median(one.prefill for one in rounds), rates,
        )  # fmt: skip


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts of equal length."""
    random = np.random.default_rng(seed)
    found: list[list[int]] = random.integers(vocab_size, size=(count, length)).tolist()
    return found


def time_decoding(
    engine: Stepped, batch: int, context: int, num_tokens: int, num_rounds: int = 3
) -> Decoding:
    """Times ``batch`` requests that write ``num_tokens`` greedy tokens each.

    A first round is not counted. Every round has prompts of its own, so the prefix cache has none.

    Raises
    ------
    InvalidArgument
        The tokens are too few: a request has ended before all others wrote.
    """
    check_num_tokens(num_tokens, batch, context, engine.limits)
    rounds = [_round(engine, batch, context, num_tokens, seed) for seed in range(num_rounds + 1)]
    return Decoding.of("kernelcat", batch, context, num_tokens, rounds[1:])


def check_num_tokens(num_tokens: int, batch: int, context: int, limits: Limits) -> None:
    """Raises InvalidArgument if the first of ``batch`` requests ends before the last one writes.

    A step takes a limited number of tokens: one of each request that writes, and then of prompts,
    one prompt after the other. So the last request writes many steps after the first one.
    """
    first = ceil(context / (limits.max_chunk or limits.step_tokens))
    num_steps = num_read = 0
    while num_read < batch * context:
        num_read += max(limits.step_tokens - num_read // context, 1)
        num_steps += 1
    if num_tokens < (fewest := num_steps - first + 2):
        raise InvalidArgument(
            f"{num_tokens} tokens are too few for {batch} prompts of {context} tokens in steps of "
            f"{limits.step_tokens}: the first request ends before the last one writes. Take at "
            f"least {fewest}"
        )


def _round(engine: Stepped, batch: int, context: int, num_tokens: int, seed: int) -> Round:
    """Decoding lasts from the last request's first token until the first request ends."""
    parameters = SamplingParameters(temperature=0, max_tokens=num_tokens)
    texts = prompts(batch, context, engine.limits.vocab_size, seed)
    started: set[str] = set()
    first = last = num_decoded = 0.0
    start = time.perf_counter()
    for prompt in texts:
        engine.submit(prompt, parameters, needs_text=False)
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            _check(output.error)
        if last:
            continue
        now = time.perf_counter()
        if first:
            num_decoded += sum(len(output.tokens) for output in outputs)
        started.update(output.request_id for output in outputs)
        if not first and len(started) == batch:
            first = now
        if any(output.finish_reason for output in outputs):
            last = now
    if not first or last <= first:
        raise InvalidArgument(
            f"{num_tokens} tokens are too few: with {batch} prompts of {context} tokens a request "
            "has ended before all of them wrote"
        )
    return Round(first - start, last - first, int(num_decoded))


SHARED = 0.75
"""Part of a prompt that an earlier request had too, where the time to the first token is taken."""


def time_first_token(engine: Stepped, context: int, num_rounds: int = 3) -> float:
    """Milliseconds to the first token of a request alone; the median of ``num_rounds``.

    The first three quarters of its prompt of ``context`` tokens are those of an earlier request.
    They cost nothing where the engine has a prefix cache, and as much as others where it has none.
    """
    shared = prompts(1, int(SHARED * context), engine.limits.vocab_size, seed=1 << 20)[0]
    rest = prompts(num_rounds + 2, context - len(shared), engine.limits.vocab_size, seed=1 << 21)
    times = [first_token(engine, shared + own) for own in rest]
    return 1e3 * median(times[2:])  # the first request fills the cache, the second one compiles


def first_token(engine: Stepped, prompt: list[int]) -> float:
    """Seconds from the submission of a request until it has written a token, its only one."""
    start = time.perf_counter()
    engine.submit(prompt, SamplingParameters(temperature=0, max_tokens=1), needs_text=False)
    first = 0.0
    while engine.has_work:
        for output in engine.step():
            _check(output.error)
            if output.tokens and not first:
                first = time.perf_counter()
    return first - start


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
    engine: Stepped,
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
