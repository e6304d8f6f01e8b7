"""The engine's bookkeeping under random arrivals, cancellations, faults and tiny caches."""

from __future__ import annotations

from fake_model import VOCAB, FakeEngine, plain
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from moe_machines import REQUESTS, SEEDS, SIZES, layer_groups

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.request import FinishReason, Request, State
from kernelcat.moe.engine.speculation import Speculation


class EngineMachine(RuleBasedStateMachine):
    engine: FakeEngine
    requests: list[Request]

    @initialize(**SIZES, max_chunk=st.integers(0, 4))
    def start(
        self, windows, page_size, num_pages, step_tokens, max_running, max_chunk, num_drafts,
        has_prefix_cache,
    ):  # fmt: skip
        limits = Limits(
            step_tokens, min(max_running, step_tokens), max_waiting=5, context=30,
            max_chunk=max_chunk, vocab_size=VOCAB,
        )  # fmt: skip
        groups = layer_groups(windows, page_size, num_pages, limits)
        speculation = Speculation(num_drafts, min_match=1) if num_drafts else None
        self.engine = FakeEngine(groups, page_size, limits, speculation, has_prefix_cache)
        self.requests = []

    @rule(
        **REQUESTS,
        penalty=st.sampled_from([1.0, 1.0, 1.1]),
        is_constrained=st.booleans(),
    )
    def submit(self, prefix, rest, max_tokens, temperature, stop, salt, penalty, is_constrained):
        scheduler = self.engine.scheduler
        num_waiting = len(scheduler.queue.waiting)
        try:
            request = self.engine.submit(
                prefix + rest, f"r{len(self.requests)}", salt, temperature=temperature,
                max_tokens=max_tokens, stop_tokens=frozenset(stop), repetition_penalty=penalty,
            )  # fmt: skip
        except QueueFull:
            assert num_waiting >= 5  # preempted requests wait too
        except InvalidArgument:
            length = len(prefix + rest) + (max_tokens or 1)
            assert not prefix + rest or length > min(30, self.engine.manager.max_tokens + 1)
        else:
            request.is_constrained = is_constrained
            if is_constrained:
                request.ngrams = None
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.requests))
        was_alive = request.state is not State.FINISHED
        assert self.engine.scheduler.cancel(request.id) == was_alive
        assert request.finish_reason is not None

    @precondition(lambda self: len(self.engine.results) < 2)
    @rule()
    def plan(self):
        step = self.engine.plan()
        if step is None:
            has_fetch = any(transfer.is_fetch for transfer in self.engine.transfers)
            assert has_fetch or self.engine.results or not self.engine.scheduler.has_work
        else:
            limits = self.engine.limits
            assert step.num_tokens <= limits.step_tokens
            assert max(len(c.tokens) - len(c.drafts) for c in step.chunks) <= limits.chunk

    @precondition(lambda self: self.engine.results)
    @rule()
    def land(self):
        self.engine.land()

    @precondition(lambda self: self.engine.results)
    @rule(coin=st.integers(0, 4))
    def fail(self, coin):
        if coin == 0:
            for output in self.engine.fail():
                assert output.request.finish_reason is FinishReason.ERROR

    @precondition(lambda self: not self.engine.results)
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @invariant()
    def pages_and_queues_agree(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        # the oldest request writes a token in each pair of steps, chunks and preemptions aside
        tokens = sum(request.max_length for request in self.requests)
        self.engine.finish(max_steps=10 * tokens + 10)
        assert not any(pool.num_in_use for pool in self.engine.manager.pools)
        windows = [group.window for group in self.engine.manager.groups]
        for request in self.requests:
            expected = plain(
                request.prompt, request.parameters, windows, request.max_length, request.seed
            )
            if request.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                assert request.tokens == expected[: len(request.tokens)]
            else:
                assert request.tokens == expected
                has_stopped = expected[-1] in request.parameters.stop_tokens
                assert request.finish_reason == ("stop" if has_stopped else "length")


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=SEEDS,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
