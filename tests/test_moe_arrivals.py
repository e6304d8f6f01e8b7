"""Two engines' bookkeeping under random arrivals, cancellations, faults and tiny caches.

One computes prompts and the other one writes, on models without weights (`fake_model`). Whatever
comes in whatever order, each request writes what it would write alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
from fake_model import VOCAB, FakeEngine, plain
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from moe_machines import REQUESTS, SEEDS, SIZES, layer_groups

from kernelcat.errors import InvalidArgument
from kernelcat.moe.disaggregate.arrivals import ArrivalScheduler
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.blocks import LayerGroup
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.pages import NULL_PAGE
from kernelcat.moe.engine.pages_out import page_moves
from kernelcat.moe.engine.request import FinishReason, Request, State
from kernelcat.moe.engine.speculation import Speculation


class Pair:
    """An engine that computes prompts, and one that writes.

    Attributes
    ----------
    news : what the prefill engine says about requests: id, and the first token or None
    """

    def __init__(
        self, groups: list[LayerGroup], page_size: int, limits: Limits,
        speculation: Speculation | None, has_prefix_cache: bool,
    ) -> None:  # fmt: skip
        more = (speculation, has_prefix_cache, ())
        self.decode = FakeEngine(groups, page_size, limits, *more, scheduler_type=ArrivalScheduler)
        self.arrivals = cast(ArrivalScheduler, self.decode.scheduler)
        wide = replace(limits, max_waiting=1000)
        self.prefill = FakeEngine(groups, page_size, wide, None, has_prefix_cache)
        self.news: list[tuple[str, int | None]] = []
        self._ended: list[str] = []  # they may have a step in flight
        self._on_way: list[list[tuple[list[int], np.ndarray]]] = []
        self._written: list[set[tuple[int, int]]] = []  # by steps of the decode engine in flight

    def ask(self) -> bool:
        """Hands requests that have pages to the prefill engine."""
        wanted = self.arrivals.take_wanted()
        for request, destination in wanted:
            for pages in self._written:  # a GPU may write them until the step has ended
                assert not pages & {*enumerate_pages(destination.pages)}
            parameters = replace(
                request.parameters, max_tokens=1, stop_tokens=frozenset(), seed=request.seed
            )
            theirs = Request(request.id, request.prompt, parameters, salt=request.salt)
            theirs.destination = destination
            self.prefill.scheduler.submit(theirs)
        return bool(wanted)

    def plan(self) -> bool:
        """A step of the prefill engine, whose pages are on their way until it lands or fails."""
        step = self.prefill.plan()
        if step is None:
            return False
        manager = self.prefill.manager
        moves = page_moves(step, len(manager.groups), manager.page_size)
        caches = zip(moves, self.prefill.model.caches, strict=True)
        self._on_way.append([(move.dests, cache[move.sources]) for move, cache in caches])
        return True

    def _write(self) -> None:
        """The pages of the oldest step come to the decode engine's cache."""
        pages = zip(self._on_way.pop(0), self.decode.model.caches, strict=True)
        for (dests, data), cache in pages:
            cache[dests] = data

    def plan_writing(self) -> bool:
        """A step of the decode engine."""
        step = self.decode.plan()
        if step is None:
            return False
        size, written = self.decode.manager.page_size, set[tuple[int, int]]()
        for chunk in step.chunks:
            assert chunk.request.table is not None
            blocks = slice(chunk.start // size, -(-chunk.end // size))
            written |= {*enumerate_pages(chunk.request.table.pages[:, blocks].tolist())}
        self._written.append(written)
        return True

    def land_writing(self) -> None:
        self._written.pop(0)
        self.decode.land()

    def land(self) -> None:
        self._write()
        for output in self.prefill.land():
            self.news.append((output.request.id, output.tokens[0]))
        self._settle()

    def fail(self) -> None:
        """The oldest step of the prefill engine has failed."""
        self._write()
        step, _ = self.prefill.results.pop(0)
        for output in self.prefill.scheduler.fail(step):
            self._ended.append(output.request.id)
        self._settle()

    def cancel(self, request: Request) -> bool:
        was_alive = self.arrivals.cancel(request.id)
        if self.prefill.scheduler.cancel(request.id):
            self._ended.append(request.id)
            self._settle()
        return was_alive

    def _settle(self) -> None:
        """Once no step is in flight nobody writes pages of requests that have ended."""
        if not self.prefill.results:
            self.news += [(name, None) for name in self._ended]
            self._ended.clear()

    def arrive(self) -> None:
        """The oldest news comes to the decode engine."""
        name, token = self.news.pop(0)
        if token is None:
            self.arrivals.fail_arrival(name, "the prefill engine has failed")
        elif output := self.arrivals.arrive(name, token, 0):
            self.decode.outputs.append(output)

    def check_integrity(self) -> None:
        self.arrivals.check_integrity()
        self.prefill.scheduler.check_integrity()

    def finish(self, max_rounds: int) -> None:
        """Runs until all requests have ended."""
        for _ in range(max_rounds):
            moved = self.ask()
            if len(self.prefill.results) < 2:
                moved |= self.plan()
            if self.prefill.results:
                self.land()
                moved = True
            while self.news:
                self.arrive()
                moved = True
            if len(self.decode.results) < 2:
                moved |= self.plan_writing()
            if self.decode.results:
                self.land_writing()
                moved = True
            self.check_integrity()
            if not moved:
                queue = self.arrivals.queue
                assert not queue.requests and not queue.asking and not queue.coming
                return
        raise AssertionError("the requests do not end")


def enumerate_pages(pages: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Group and page, of all pages but the null page."""
    return ((g, page) for g, row in enumerate(pages) for page in row if page != NULL_PAGE)


def test_pages_that_a_step_may_still_write_are_not_given_away() -> None:
    limits = Limits(step_tokens=8, max_running=4, max_waiting=6, context=20, vocab_size=VOCAB)
    pair = Pair([LayerGroup("0", 6, 0)], 4, limits, None, has_prefix_cache=True)
    pair.arrivals.router = Router(100)
    first = pair.decode.submit([1] * 7, "first")
    assert first.table is None and pair.plan_writing()
    assert pair.cancel(first)
    pair.arrivals.router = Router(0)
    second = pair.decode.submit([2] * 9, "second", max_tokens=4)
    assert not pair.ask()
    pair.land_writing()
    assert pair.ask()
    pair.finish(100)
    pair.decode.check(second)


class PairMachine(RuleBasedStateMachine):
    pair: Pair
    requests: list[Request]

    @initialize(**SIZES, short=st.sampled_from([0, 0, 2, 6]))
    def start(
        self, windows, page_size, num_pages, step_tokens, max_running, num_drafts,
        has_prefix_cache, short,
    ):  # fmt: skip
        running = min(max_running, step_tokens)
        limits = Limits(step_tokens, running, max_waiting=6, context=30, vocab_size=VOCAB)
        groups = layer_groups(windows, page_size, num_pages, limits)
        speculation = Speculation(num_drafts, min_match=1) if num_drafts else None
        self.pair = Pair(groups, page_size, limits, speculation, has_prefix_cache)
        self.pair.arrivals.router = Router(short)
        self.requests = []

    @rule(**REQUESTS, num_queued=st.sampled_from([0, 100]))
    def submit(self, prefix, rest, max_tokens, temperature, stop, salt, num_queued):
        self.pair.arrivals.num_queued = num_queued
        try:
            request = self.pair.decode.submit(
                prefix + rest, f"r{len(self.requests)}", salt, temperature=temperature,
                max_tokens=max_tokens, stop_tokens=frozenset(stop),
            )  # fmt: skip
        except (QueueFull, InvalidArgument):
            return
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.requests))
        was_alive = request.state is not State.FINISHED
        assert self.pair.cancel(request) == was_alive

    @rule()
    def ask(self):
        self.pair.ask()

    @precondition(lambda self: len(self.pair.prefill.results) < 2)
    @rule()
    def plan(self):
        self.pair.plan()

    @precondition(lambda self: self.pair.prefill.results)
    @rule(coin=st.integers(0, 6))
    def land(self, coin):
        if coin:
            self.pair.land()
        else:
            self.pair.fail()

    @precondition(lambda self: self.pair.news)
    @rule()
    def arrive(self):
        self.pair.arrive()

    @precondition(lambda self: len(self.pair.decode.results) < 2)
    @rule()
    def plan_writing(self):
        self.pair.plan_writing()

    @precondition(lambda self: self.pair.decode.results)
    @rule()
    def land_writing(self):
        self.pair.land_writing()

    @invariant()
    def pages_and_queues_agree(self):
        if hasattr(self, "pair"):
            self.pair.check_integrity()

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        tokens = sum(request.max_length for request in self.requests)
        self.pair.finish(10 * tokens + 20)
        for engine in (self.pair.prefill, self.pair.decode):
            assert not any(pool.num_in_use for pool in engine.manager.pools)
        windows = [group.window for group in self.pair.decode.manager.groups]
        for request in self.requests:
            expected = plain(
                request.prompt, request.parameters, windows, request.max_length, request.seed
            )
            if request.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                assert request.tokens == expected[: len(request.tokens)]
            else:
                assert request.tokens == expected


TestPair = PairMachine.TestCase
TestPair.settings = settings(
    max_examples=SEEDS,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
