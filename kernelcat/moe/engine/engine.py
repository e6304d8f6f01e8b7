"""The engine: runs a model over the steps that the scheduler plans.

    >>> engine = Engine(moe.load("gpt-oss-20b"), decode=tokenizer.decode)
    >>> engine.submit(tokenizer.encode("Hello"), SamplingParameters(max_tokens=20))
    >>> while engine.has_work:
    ...     for output in engine.step():
    ...         print(output.text, end="")

All methods but `step` and `close` may be called from any thread while one thread runs `step`.
`AsyncEngine` owns such a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.engine.building import build
from kernelcat.moe.engine.constraint import Constraint
from kernelcat.moe.engine.memory import fitting
from kernelcat.moe.engine.pages_out import Destination, Link
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason, Request, describe
from kernelcat.moe.engine.runner import Run
from kernelcat.moe.engine.sampling import TokenLogprob
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.statistics import Counters, Statistics
from kernelcat.moe.engine.step import Output, Step
from kernelcat.moe.engine.step_sizes import Size
from kernelcat.moe.engine.text import TextStream
from kernelcat.moe.model import Decoder
from kernelcat.moe.ranges import span

Decode = Callable[[Sequence[int]], str]


class EngineError(KernelcatError):
    """The engine cannot run any more: its device is lost, or the engine is closed."""


@dataclass(slots=True)
class RequestOutput:
    """What a step adds to a request.

    Attributes
    ----------
    request_id : the request's id
    tokens : new tokens, a stop token included
    text : text that became final; "" for requests without text
    logprobs : one for each new token; empty where the request asks for none
    finish_reason : why the request has ended, or None
    num_cached : tokens of the prompt that were found in the prefix cache
    error : what went wrong, where ``finish_reason`` is ERROR or CANCELLED
    """

    request_id: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    error: str = ""

    def extend(self, later: RequestOutput) -> None:
        """Appends the next output of the same request."""
        self.tokens += later.tokens
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish_reason, self.error = later.finish_reason, later.error
        self.num_cached = later.num_cached

    @staticmethod
    def of(output: Output, error: str = "") -> RequestOutput:
        """What the scheduler returned, for people who know no scheduler."""
        request = output.request
        wants_logprobs = request.parameters.logprobs is not None
        return RequestOutput(
            request.id,
            output.tokens,
            output.text,
            output.logprobs if wants_logprobs else [],
            output.finish_reason,
            request.num_cached or 0,
            error or request.error,
        )


class Planned(NamedTuple):
    """A step, and the size that it is padded to."""

    step: Step
    size: Size


class Engine:
    """A model with caches, a scheduler and sampling.

    Parameters
    ----------
    model : on ``cuda``, or on ``cpu`` for tests and small models
    settings : limits, memory, speculation, graphs
    decode : the text of token ids (`Tokenizer.decode`); None where nobody needs text
    link : the way to the cache of another engine, which opens at the same time; None for no other

    Attributes
    ----------
    limits : of requests, as far as the model allows them
    scheduler_type : what plans the steps
    is_stalled : whether the last `step` had nothing to run: no request can run now

    Raises
    ------
    InvalidArgument
        The memory is too small for the weights and one request, or a setting is not possible.
    RankFailed
        The engine at the other end of ``link`` could not be opened.
    """

    scheduler_type = Scheduler

    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings | None = None,
        decode: Decode | None = None,
        link: Link | None = None,
    ) -> None:
        self.model, self.settings = model, settings or EngineSettings()
        with fitting("caches and CUDA graphs", "lower memory or the limits"):
            self._scheduler, self._runner = build(model, self.settings, link, self.scheduler_type)
        self.limits = self._scheduler.limits
        is_overlapped = self.settings.is_overlapped
        self._is_overlapped = self._runner.is_cuda if is_overlapped is None else is_overlapped
        self._decode = decode
        self._runs: deque[Run] = deque()
        self._counters = Counters()
        self._lock = threading.Lock()  # of everything that the scheduler knows
        self._ids = itertools.count()
        self._broken = ""
        self._is_idle = False  # no step runs, and none could be planned
        self.is_stalled = False

    # ---- requests -------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        parameters: SamplingParameters | None = None,
        *,
        request_id: str | None = None,
        needs_text: bool = True,
        constraint: Constraint | None = None,
        salt: str = "",
        destination: Destination | None = None,
    ) -> Request:
        """Adds a request that waits.

        Parameters
        ----------
        prompt : token ids
        request_id : unique among requests that have not ended; None for a new one
        needs_text : whether the engine turns tokens into text, if it has ``decode``; stop strings
            are found in text
        constraint : which tokens may come next; None for all
        salt : requests with different salts share no page of the prefix cache
        destination : where the pages of the prompt go, over ``link``; None for nowhere

        Raises
        ------
        QueueFull
            Too many requests wait.
        InvalidArgument
            The request does not fit into the limits, or has stop strings and no text.
        EngineError
            The engine is closed, or its device is lost.
        """
        parameters = parameters or SamplingParameters()
        text = None
        if needs_text and self._decode is not None:
            text = TextStream(self._decode, parameters.stop)
        elif parameters.stop:
            raise InvalidArgument(f"stop={parameters.stop} needs text, and the request has none")
        is_constrained = constraint is not None or parameters.has_penalty
        with self._lock:
            if self._broken:
                raise EngineError(self._broken)
            name = f"request-{next(self._ids)}" if request_id is None else request_id
            request = Request(
                name, prompt, parameters, text, salt, is_constrained, constraint, destination
            )
            self._scheduler.submit(request)
            self._counters.count_request()
        return request

    def cancel(self, request_id: str) -> bool:
        """Ends a request in any state and frees its pages; False if there is no such request.

        No output follows.
        """
        with self._lock:
            return self._scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step has no result yet."""
        return self._scheduler.has_work or bool(self._runs)

    @property
    def is_healthy(self) -> bool:
        """Whether steps can run."""
        return not self._broken

    @property
    def failure(self) -> str:
        """Why steps cannot run any more; "" while they can."""
        return self._broken

    # ---- steps ----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plans and launches a step, waits for the oldest one in flight, returns what is new.

        A step that fails ends its requests with an output of finish reason ERROR; all others go
        on. If the device is lost, all requests end so.
        """
        outputs: list[RequestOutput] = []
        num_before = len(self._runs)
        try:
            self._end_transfers()
        except Exception as lost:
            outputs += self._end_all(FinishReason.ERROR, f"the device is lost: {describe(lost)}")
        if not self._broken:
            outputs += self._launch()
        is_ahead = self._is_overlapped and len(self._runs) > num_before
        self.is_stalled = not self._runs
        while len(self._runs) > is_ahead:
            outputs += self._collect()
        return outputs

    def _end_transfers(self) -> None:
        """Ends transfers whose copies have ended; waits for one where nothing else can go on."""
        copies = self._runner.copies
        if copies is None or self._broken:
            return
        if self._is_idle:
            copies.wait()
        with self._lock:
            for transfer in copies.ended():
                self._scheduler.end_transfer(transfer)

    def _launch(self) -> list[RequestOutput]:
        """Plans and launches a step, if a request can run; returns outputs of what fails."""
        run, outputs = None, list[RequestOutput]()
        try:
            with span("schedule"), self._lock:
                planned = self._plan()
                self._runner.move(self._scheduler.transfers())
                self._is_idle = planned is None and not self._runs
                if planned is None:
                    return []
                run = Run(planned.step)
                self._runs.append(run)
                self._runner.prepare(run, planned.size)
                for request, message in run.choices.failed:
                    outputs.append(RequestOutput.of(self._scheduler.fail_request(request, message)))
            self._runner.launch(run)
        except Exception as error:
            if run is None:
                raise
            while self._runs and self._runs[0] is not run:
                outputs += self._collect()
            return outputs + (self._fail(error) if self._runs else [])
        return outputs

    def _plan(self) -> Planned | None:
        """The next step, or None if no request can run; the caller has the lock."""
        step = self._scheduler.schedule()
        return None if step is None else Planned(step, self._runner.sizes.of(step))

    def _collect(self) -> list[RequestOutput]:
        """Waits for the oldest step in flight."""
        run = self._runs[0]
        try:
            with span("wait"):
                tokens, logprobs = self._runner.collect(run)
        except Exception as error:
            return self._fail(error)
        with span("output"), self._lock:
            self._runs.popleft()
            outputs = self._scheduler.update(run.step, tokens, logprobs)
            self._counters.count_step(run.step, outputs)
            return [RequestOutput.of(output) for output in outputs]

    def _fail(self, error: Exception) -> list[RequestOutput]:
        """Ends the requests of the oldest step in flight, or all if the device is lost."""
        message = describe(error)
        try:
            self._runner.synchronize()
            self._end_transfers()
        except Exception as lost:
            return self._end_all(FinishReason.ERROR, f"the device is lost: {describe(lost)}")
        with self._lock:
            outputs = self._scheduler.fail(self._runs.popleft().step)
            self._scheduler.manager.forget_blocks()  # the step may have spoiled what others wrote
            self._counters.count_failure()
        return [RequestOutput.of(output, message) for output in outputs]

    def _end_all(self, reason: FinishReason, message: str) -> list[RequestOutput]:
        """Ends all requests, and refuses new ones."""
        with self._lock:
            self._broken = message
            for _ in self._runs:
                self._counters.count_failure()
            self._runs.clear()
            outputs = self._scheduler.end_all(reason)
        return [RequestOutput.of(output, message) for output in outputs]

    # ---- state ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Proves that pages, queues and requests agree.

        Raises
        ------
        IntegrityError
            The message lists all contradictions.
        """
        with self._lock:
            self._scheduler.check_integrity()

    def statistics(self) -> Statistics:
        """Numbers at this moment."""
        with self._lock:
            return self._counters.read(self._scheduler)

    def abort(self, error: Exception) -> list[RequestOutput]:
        """Ends all requests, because ``error`` shows that the engine itself is wrong."""
        return self._end_all(FinishReason.ERROR, f"the engine is wrong: {describe(error)}")

    def close(self) -> list[RequestOutput]:
        """Ends all requests and frees caches and graphs; the model stays.

        Nobody runs `step` meanwhile. Returns an output of finish reason CANCELLED for each request
        that had not ended.
        """
        with contextlib.suppress(Exception):  # the device may be lost
            self._runner.synchronize()
        outputs = self._end_all(FinishReason.CANCELLED, self._broken or "the engine is closed")
        self._runner.close()
        return outputs
