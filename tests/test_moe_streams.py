"""Steps whose work is late: copies and kernels run in any order that events allow.

On a CPU the engine's streams do their work at once, so nothing is overwritten while it is in use.
Here they keep work until somebody waits, and then do it in a random order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from kernelcat import moe
from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.host_cache import HostCache, Transfer
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.statistics import Statistics
from kernelcat.moe.engine.streams import DeviceStream
from kernelcat.moe.rungs import Setup

Job = tuple[Callable[[], object], Any, "LateEvent"]


class LateEvent:
    """The end of a job; ``synchronize`` runs jobs until this one has ended."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.has_ended = device, False

    def synchronize(self) -> None:
        while not self.has_ended:
            self.device.run_one()

    def query(self) -> bool:
        return self.has_ended


class LateDevice:
    """Streams; ``keeps_order`` says whether jobs wait for events of other streams."""

    def __init__(self, dice: random.Random, keeps_order: bool = True) -> None:
        self.dice, self.keeps_order = dice, keeps_order
        self.streams = [LateStream(self) for _ in range(5)]

    def run_one(self) -> None:
        ready = [
            stream for stream in self.streams if stream.jobs and self.may_run(stream.jobs[0][1])
        ]
        work, _, event = self.dice.choice(ready).jobs.popleft()
        work()
        event.has_ended = True

    def may_run(self, after: LateEvent | None) -> bool:
        return after is None or after.has_ended or not self.keeps_order


class LateStream(DeviceStream):
    """A stream of a `LateDevice`; some work is not late."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(torch.device("cpu"))
        self.owner, self.jobs = device, deque[Job]()

    def run(self, work: Callable[[], object], after: Any = None) -> Any:
        event = LateEvent(self.owner)
        self.jobs.append((work, after, event))
        for _ in range(self.owner.dice.choice((0, 0, 0, 1, 2))):
            if any(stream.jobs for stream in self.owner.streams):
                self.owner.run_one()
        return event

    def wait(self, event: Any) -> None:
        self.jobs.append((lambda: None, event, LateEvent(self.owner)))

    def synchronize(self) -> None:
        while self.jobs:
            self.owner.run_one()


@cache
def model() -> moe.Decoder:
    """In plain torch, which is faster than the oracles."""
    made = moe.random_model("small-gpt-oss", "cpu", torch.float32, 128, dense_experts=True)
    made.ops = Setup().ops(made)
    return made


def engine(num_pages: int, **settings: Any) -> Engine:
    limits = Limits(step_tokens=24, max_running=4, context=96, max_chunk=16)
    return Engine(
        model(), EngineSettings(limits, page_size=16, num_pages=(num_pages,) * 2, **settings)
    )


Asked = list[tuple[list[int], SamplingParameters]]


def asked(dice: random.Random) -> Asked:
    """Prompts that repeat themselves and share a beginning; greedy, or with few different draws."""
    shared = dice.choices(range(256), k=20)
    found: Asked = []
    for i in range(7):
        own = dice.choices(range(256), k=dice.randint(1, 6)) * dice.randint(1, 5)
        parameters = SamplingParameters(
            temperature=0.0 if i % 3 else 0.8, seed=i, max_tokens=dice.randint(1, 24),
            stop_tokens=frozenset(dice.choices(range(256), k=i % 2)),
        )  # fmt: skip
        found.append(((shared if i % 2 else []) + own, parameters))
    return found


@cache
def expected(seed: int) -> list[list[int]]:
    """Tokens of requests that run alone, one step after another."""
    found = []
    for prompt, parameters in asked(random.Random(seed)):
        served = engine(20, is_overlapped=False, has_prefix_cache=False)
        request = served.submit(prompt, parameters)
        while served.has_work:
            served.step()
        found.append(request.tokens)
    return found


def written(
    seed: int, keeps_order: bool = True, num_buffers: int = 2, num_rounds: int = 1, **settings: Any
) -> tuple[list[list[int]], Statistics]:
    """Tokens of the same requests at once, with late streams, too few pages, and cancellations.

    All requests come ``num_rounds`` times.
    """
    dice = random.Random(seed)
    prompts = asked(dice) * num_rounds
    served = engine(
        9, is_overlapped=True, batch_sizes=dice.choice(((), (2,))),
        speculation=dice.choice((None, Speculation(2, 1))), **settings,
    )  # fmt: skip
    runner = served._runner
    *runner.streams, fetches, offloads = LateDevice(dice, keeps_order).streams
    if runner.copies:
        runner.copies._fetches, runner.copies._offloads = fetches, offloads
    runner._buffers = (runner._buffers[:num_buffers] * 2)[:2]
    requests = []
    while prompts or served.has_work:
        if prompts and dice.random() < 0.5:
            requests.append(served.submit(*prompts.pop(0)))
        if requests and dice.random() < 0.02:
            served.cancel(dice.choice(requests).id)
        arriving = [r.id for r in requests if r.table and r.table.is_arriving]
        if arriving and dice.random() < 0.2:
            served.cancel(arriving[0])
        served.step()
        served.check_integrity()
    assert served.statistics().pages_in_use == 0
    for request, tokens in zip(requests, expected(seed) * num_rounds, strict=True):
        if request.finish_reason is FinishReason.CANCELLED:
            assert request.tokens == tokens[: len(request.tokens)] or not keeps_order
            request.tokens[:] = tokens
    return [request.tokens for request in requests], served.statistics()


def test_late_work_writes_the_tokens_of_steps_one_by_one() -> None:
    preemptions = accepted = cached = 0
    for seed in range(8):
        tokens, statistics = written(seed)
        assert tokens == expected(seed)
        preemptions += statistics.preemptions_total
        accepted += statistics.accepted_tokens_total
        cached += statistics.cached_tokens_total
    assert min(preemptions, accepted, cached) > 0


HOST: Any = {"num_rounds": 2, "host_cache_bytes": 8 << 20, "min_fetch": 16}


def test_late_copies_to_host_memory_and_back_change_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched, abandoned, abandon = 0, list[object](), HostCache.abandon

    def counted(host: HostCache, transfer: Transfer) -> None:
        abandoned.append(transfer)
        abandon(host, transfer)

    monkeypatch.setattr(HostCache, "abandon", counted)
    for seed in range(4):
        tokens, statistics = written(seed, **HOST)
        assert tokens == expected(seed) * HOST["num_rounds"]
        fetched += statistics.fetched_tokens_total
    assert fetched > 0 and abandoned


class First:
    """Dice that keep all work as late as they can."""

    def choice(self, options: Any) -> Any:
        return options[0]


def test_a_fetch_starts_behind_steps_and_steps_behind_an_abandoned_fetch() -> None:
    """Its pages may be written by steps that were launched before, and belong to later ones."""
    served = engine(9, is_overlapped=True, host_cache_bytes=8 << 20, min_fetch=16)
    prompt, greedy = list(range(70)), SamplingParameters(temperature=0, max_tokens=6)
    for text in (prompt, [1] * 88, [2] * 88):  # the last two need all pages
        served.submit(text, greedy)
        while served.has_work:
            served.step()
    runner = served._runner
    *runner.streams, fetches, offloads = LateDevice(First()).streams
    assert runner.copies is not None
    runner.copies._fetches, runner.copies._offloads = fetches, offloads
    other = served.submit([3] * 5, greedy)
    served.step()
    launched = runner._computed
    waiting = served.submit([*prompt, 9], greedy)
    served.step()
    [(_, start, end)] = fetches.jobs
    assert start is launched
    assert served.cancel(waiting.id)
    served.step()
    barrier, step = runner.streams[1].jobs
    assert barrier[1] is end and step[2] is runner._computed
    while served.has_work:
        served.step()
    assert other.num_written == 6


@pytest.mark.parametrize("fault", ({"keeps_order": False}, {"num_buffers": 1}))
def test_without_events_or_with_one_buffer_tokens_are_wrong(fault: dict[str, Any]) -> None:
    """What the test above would not see proves nothing."""

    def is_wrong(seed: int) -> bool:
        try:
            return written(seed, **fault)[0] != expected(seed)
        except (KernelcatError, RuntimeError, IndexError):  # arrays of two steps do not fit
            return True

    assert all(is_wrong(seed) for seed in range(3))
