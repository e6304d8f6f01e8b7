"""How requests end: stops, cancellation and faults, with steps that overlap; times and proof."""

from __future__ import annotations

import itertools

import pytest
from fake_model import VOCAB, WIDTH, engine

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.pages import IntegrityError
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason, Request, State
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.text import TextStream

# ---- ends ----------------------------------------------------------------------------------------


def test_stop_tokens_end_a_request_even_among_drafts():
    for speculation in (None, Speculation(4, min_match=1)):
        served = engine(speculation=speculation)
        request = served.submit([1, 2, 3] * 4, stop_tokens=frozenset({6}), max_tokens=50)
        served.finish()
        served.check(request)
        assert request.finish_reason is FinishReason.STOP
        assert request.tokens.index(6) == len(request.tokens) - 1


def test_a_stop_token_in_the_last_place_is_a_stop():
    served = engine()
    free = served.submit([1, 2, 3], max_tokens=5)
    served.finish()
    last = free.tokens[-1]
    length = free.tokens[3:].index(last) + 1
    request = served.submit([1, 2, 3], max_tokens=length, stop_tokens=frozenset({last}))
    served.finish()
    assert (request.num_written, request.finish_reason) == (length, FinishReason.STOP)


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_nothing_follows_a_stop_string_whatever_is_in_flight(num_drafts, is_overlapped):
    speculation = Speculation(num_drafts, min_match=1) if num_drafts else None
    served = engine(speculation=speculation)
    free = served.submit([1, 2, 3] * 4, max_tokens=30)
    served.finish()
    letters = "".join(chr(97 + token) for token in free.tokens[12:])
    stop = letters[10:13]
    stream = TextStream(lambda tokens: "".join(chr(97 + token) for token in tokens), [stop])
    request = Request("stopped", [1, 2, 3] * 4, SamplingParameters(0.0, max_tokens=30), stream)
    served.scheduler.submit(request)
    served.outputs.clear()
    served.finish(is_overlapped)
    assert "".join(output.text for output in served.outputs) == letters[: letters.index(stop)]
    assert request.num_written == letters.index(stop) + 3
    assert request.finish_reason is FinishReason.STOP
    assert served.outputs[-1].finish_reason is FinishReason.STOP


def test_text_that_was_held_back_comes_with_the_last_token():
    served = engine()
    stream = TextStream(lambda tokens: "a" * len(tokens), ["a" * 9])
    request = Request("held", [1], SamplingParameters(0.0, max_tokens=5), stream)
    served.scheduler.submit(request)
    served.finish()
    assert [output.text for output in served.outputs] == ["", "", "", "", "aaaaa"]


def running_prompt(served):
    request = served.submit([1] * 30, "x", max_tokens=9)
    served.step()
    assert not request.is_decoding
    return request


def running_writer(served):
    request = served.submit([1], "x", max_tokens=9)
    served.step()
    served.step()
    return request


def waiting(served):
    return served.submit([1], "x", max_tokens=9)


def preempted(served):
    for i in range(8):
        request = served.submit([i % VOCAB], "x" if i == 7 else "", max_tokens=50)
    while not request.num_preemptions:
        served.step()
    assert request.state is State.WAITING
    return request


def in_flight(served):
    request = running_writer(served)
    served.plan()
    served.plan()
    return request


def preempted_in_flight(served):
    for i in range(8):
        request = served.submit([i % VOCAB], "x" if i == 7 else "", max_tokens=50)
    while not (request.num_preemptions and request.num_pending):
        served.plan()
        if len(served.results) == 2 and not (request.num_preemptions and request.num_pending):
            served.land()
    assert request.state is State.WAITING
    return request


STATES = (running_prompt, running_writer, waiting, preempted, in_flight, preempted_in_flight)


@pytest.mark.parametrize("reach", STATES)
def test_a_request_can_be_cancelled_in_every_state(reach):
    served = engine(num_pages=18, has_prefix_cache=False)
    request = reach(served)
    num_known, num_outputs = len(request.tokens), len(served.outputs)
    assert served.scheduler.cancel("x")
    served.scheduler.check_integrity()
    assert (request.state, request.finish_reason) == (State.FINISHED, FinishReason.CANCELLED)
    assert request.table is None
    assert not served.scheduler.cancel("x")
    served.finish()
    assert len(request.tokens) == num_known
    assert not any(output.request is request for output in served.outputs[num_outputs:])
    assert served.manager.pools[0].num_in_use == 0


def test_a_preempted_request_waits_for_its_token_in_flight():
    served = engine(num_pages=18, has_prefix_cache=False)
    request = preempted_in_flight(served)
    for other in list(served.scheduler.queue.running):
        served.scheduler.cancel(other.id)
    assert served.scheduler.queue.start(8) is None
    served.finish()
    served.check(request)


def test_a_chunk_in_flight_publishes_nothing_of_a_request_that_started_again():
    served = engine(step_tokens=8)
    request = served.submit([1] * 30, max_tokens=5)
    for _ in range(2):
        served.step()
    served.plan()
    assert served.scheduler.queue.preempt() is request
    served.manager.pools[0].forget_blocks()
    served.plan()  # the request starts again, from its first token
    served.land()
    served.scheduler.check_integrity()
    assert request.table.num_published == 0
    served.finish()
    served.check(request)


def test_a_failed_step_ends_its_requests_and_no_other():
    served = engine(max_running=2)
    hit = [served.submit([i], max_tokens=9) for i in range(2)]
    waits = served.submit([3], max_tokens=9)
    served.step()
    served.plan()
    served.plan()
    for _ in range(2):
        step, _ = served.results.pop(0)
        failed = served.scheduler.fail(step)
        served.scheduler.check_integrity()
        assert {output.finish_reason for output in failed} <= {FinishReason.ERROR}
    assert [request.finish_reason for request in hit] == [FinishReason.ERROR] * 2
    served.finish()
    served.check(waits)
    assert waits.finish_reason is FinishReason.LENGTH


# ---- steps that overlap --------------------------------------------------------------------------


def test_a_step_is_planned_before_the_tokens_of_the_step_before_are_known():
    served = engine()
    for i in range(3):
        served.submit([i, i], max_tokens=6)
    first, second = served.plan(), served.plan()
    assert [chunk.source_row for chunk in first.chunks] == [-1, -1, -1]
    assert [chunk.source_row for chunk in second.chunks] == [0, 1, 2]
    assert served.arrays.source_rows.tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgument, match="2 steps are in flight"):
        served.plan()
    with pytest.raises(InvalidArgument, match="not the first step in flight"):
        served.scheduler.update(second, [0, 0, 0])
    with pytest.raises(InvalidArgument, match="2 tokens for the 3 rows"):
        served.scheduler.update(first, [0, 0])


def test_a_constrained_request_waits_for_its_tokens():
    served = engine()
    request = served.submit([1], max_tokens=3)
    request.is_constrained = True
    assert served.plan() is not None
    assert served.plan() is None
    served.land()
    assert served.plan().chunks[0].source_row == -1


def test_no_step_is_planned_for_a_request_whose_last_token_is_in_flight():
    served = engine()
    served.submit([1], max_tokens=2)
    served.plan()
    served.plan()
    served.land()
    assert served.plan() is None
    served.land()
    assert not served.scheduler.has_work


# ---- times ---------------------------------------------------------------------------------------


def test_times_are_those_of_the_formats():
    clock = itertools.count()
    manager = BlockManager([LayerGroup("all", 20)], 4, WIDTH)
    scheduler = Scheduler(manager, Limits(), clock=lambda: float(next(clock)))
    request = Request("r", [1], SamplingParameters(max_tokens=3))
    scheduler.submit(request)
    assert (request.ttft, request.tpot) == (None, None)
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.update(step, [2])
    assert request.ttft == request.first_token_at - request.arrived_at == 1
    assert request.tpot == (request.ended_at - request.first_token_at) / 2


# ---- the proof -----------------------------------------------------------------------------------


def overtake(queue):
    queue.running.reverse()


def lose_a_request(queue):
    queue.waiting.pop()


def run_twice(queue):
    queue.running.append(queue.running[0])


def free_a_table(queue):
    queue.manager.close(queue.running[0].table)


def count_a_token_too_many(queue):
    queue.running[0].num_computed += 5


def forget_a_pending_token(queue):
    queue.running[0].num_pending += 1


def change_a_token(queue):
    queue.running[0].tokens[0] += 1


def publish_too_early(queue):
    table = queue.running[1].table
    queue.manager.pools[0].publish(int(table.pages[0, table.num_blocks - 1]), b"x" * 16)


def free_a_window_too_early(queue):
    queue.manager.trim(queue.running[0].table, 40)


def wait_with_pages(queue):
    queue.waiting[0].num_computed = 4


@pytest.mark.parametrize(
    "plant",
    [
        overtake, lose_a_request, run_twice, free_a_table, count_a_token_too_many,
        forget_a_pending_token, change_a_token, publish_too_early, free_a_window_too_early,
        wait_with_pages,
    ],
)  # fmt: skip
def test_each_planted_fault_is_found(plant):
    served = engine(0, 6, max_running=2)
    for i in range(3):
        served.submit([i] * 6, max_tokens=20)
    for _ in range(4):
        served.step()
    served.scheduler.check_integrity()
    plant(served.scheduler.queue)
    with pytest.raises(IntegrityError):
        served.scheduler.check_integrity()
