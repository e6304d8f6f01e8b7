"""Host memory under random arrivals, cancellations and faults: transfers end in any order."""

from __future__ import annotations

from fake_model import VOCAB, FakeEngine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_moe_machine import SEEDS, EngineMachine

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import LayerGroup
from kernelcat.moe.engine.limits import Limits, QueueFull


class HostMachine(EngineMachine):
    """Few pages and many conversations that go on, so that their prefixes are fetched."""

    @initialize(
        windows=st.sampled_from([(0,), (0, 5), (3, 0), (6,)]),
        page_size=st.sampled_from([1, 2]),
        num_pages=st.integers(13, 30),
        max_running=st.integers(1, 3),
        num_slots=st.sampled_from([3, 20, 200]),
        reserve=st.integers(3, 30),
    )
    def start(self, windows, page_size, num_pages, max_running, num_slots, reserve):
        limits = Limits(8, max_running, max_waiting=5, context=30, max_chunk=4, vocab_size=VOCAB)
        pages = [
            max(num_pages, -(-(window + limits.span) // page_size) + 3) if window else num_pages
            for window in windows
        ]
        groups = [
            LayerGroup(str(i), *each) for i, each in enumerate(zip(pages, windows, strict=True))
        ]
        self.engine = FakeEngine(groups, page_size, limits, num_slots=num_slots, reserve=reserve)
        self.requests = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), rest=st.lists(st.integers(0, VOCAB - 1), max_size=3))
    def go_on(self, data, rest):
        """The next turn of a conversation."""
        before = data.draw(st.sampled_from(self.requests))
        try:
            request = self.engine.submit(
                before.tokens + rest, f"r{len(self.requests)}", before.salt, max_tokens=3
            )
        except (QueueFull, InvalidArgument):
            return
        self.requests.append(request)

    @precondition(lambda self: self.engine.transfers)
    @rule(data=st.data())
    def end_transfer(self, data):
        self.engine.end_transfer(data.draw(st.sampled_from(self.engine.transfers)))

    @precondition(lambda self: self.arriving())
    @rule(data=st.data(), is_preempted=st.booleans())
    def abandon(self, data, is_preempted):
        if is_preempted:
            self.engine.scheduler.queue.preempt()
        else:
            self.engine.scheduler.cancel(data.draw(st.sampled_from(self.arriving())).id)

    def arriving(self):
        """Requests that wait for their blocks."""
        running = self.engine.scheduler.queue.running
        return [request for request in running if request.table.is_arriving]

    @rule()
    def settle(self):
        self.engine.end_transfers()

    @rule(is_overlapped=st.booleans())
    def finish(self, is_overlapped):
        self.engine.finish(is_overlapped)


TestHost = HostMachine.TestCase
TestHost.settings = settings(
    max_examples=SEEDS,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
