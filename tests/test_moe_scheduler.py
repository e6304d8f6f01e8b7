"""The scheduler: the same tokens whatever happens, fair order, limits, and flat memory."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import tracemalloc

import numpy as np
import pytest
from fake_model import VOCAB, WIDTH, FakeEngine

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.pages import IntegrityError
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason, Request, State
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.step_arrays import StepArrays
from kernelcat.moe.engine.text import TextStream

WINDOWS = ((0,), (0, 6), (5,))


def engine(*windows, num_pages=200, speculation=None, has_prefix_cache=True, page_size=4, **limits):
    groups = [LayerGroup(f"g{i}", num_pages, window) for i, window in enumerate(windows or (0,))]
    defaults = {"step_tokens": 16, "max_running": 8, "max_waiting": 64, "context": 64}
    return FakeEngine(
        groups, page_size, Limits(**{**defaults, **limits}), speculation, has_prefix_cache
    )


def prompts(count=8, seed=0):
    """Prompts, half of which begin with the same tokens."""
    dice = random.Random(seed)
    common = [dice.randrange(VOCAB) for _ in range(13)]
    return [
        (common if i % 2 else []) + [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
        for i in range(count)
    ]


# ---- the same tokens ----------------------------------------------------------------------------

SETTINGS = {
    "whole": {"step_tokens": 512},
    "chunked": {"step_tokens": 9},
    "chunks of one": {"step_tokens": 9, "max_chunk": 1},
    "alone": {"max_running": 1},
    "no prefix cache": {"has_prefix_cache": False},
    "pages of one token": {"page_size": 1},
    "preempted": {"num_pages": 20, "max_chunk": 2},
    "speculation": {"speculation": Speculation(3, min_match=1)},
    "speculation, preempted": {
        "speculation": Speculation(3, min_match=1), "num_pages": 20, "max_chunk": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_a_request_that_is_alone(name, is_overlapped, windows):
    served = engine(*windows, **SETTINGS[name])
    requests = [
        served.submit(prompt, temperature=i % 3 / 2, seed=i, max_tokens=20)
        for i, prompt in enumerate(prompts())
    ]
    served.finish(is_overlapped)
    for request in requests:
        served.check(request)
        assert request.finish_reason is FinishReason.LENGTH
        assert request.num_written == 20
    if "preempted" in name and 0 in windows:
        assert served.scheduler.queue.num_preemptions
    if "speculation" in name:
        assert any(len(output.tokens) > 1 for output in served.outputs)
    assert not any(pool.num_in_use for pool in served.manager.pools)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_prefix_hit_equals_a_cold_run(windows):
    served = engine(*windows)
    prompt = prompts()[1]
    cold = served.submit(prompt, max_tokens=12)
    served.finish()
    warm = served.submit(prompt, max_tokens=12)
    longer = served.submit(cold.tokens, max_tokens=5)  # the next turn of a conversation
    other = served.submit(prompt, salt="another tenant", max_tokens=12)
    served.finish()
    for request in (warm, longer, other):
        served.check(request)
    assert cold.tokens == warm.tokens == other.tokens
    assert (cold.num_cached, other.num_cached) == (0, 0)
    assert warm.num_cached == (len(prompt) - 1) // 4 * 4
    assert longer.num_cached == (len(cold.tokens) - 1) // 4 * 4


def test_a_shared_prompt_is_hit_in_the_middle_of_a_chunk_while_steps_overlap():
    served = engine(0, 6, step_tokens=64)
    served.submit([*([1, 2, 3, 4] * 5), 5, 5, 5, 5, 5, 5], max_tokens=3)
    served.finish(is_overlapped=True)
    request = served.submit([*([1, 2, 3, 4] * 5), 6, 6], max_tokens=3)
    served.finish(is_overlapped=True)
    served.check(request)
    assert request.num_cached == 20


def test_logprobs_belong_to_the_tokens_that_are_returned():
    served = engine(speculation=Speculation(3, min_match=1))
    served.submit([1, 2, 3] * 5, max_tokens=20)
    given = {}
    while served.scheduler.has_work:
        step = served.plan()
        _, tokens = served.results.pop()
        for output in served.scheduler.update(step, tokens.tolist(), [-t for t in tokens.tolist()]):
            given.setdefault(output.request, []).extend(output.logprobs)
            assert output.logprobs == [-token for token in output.tokens]
    assert [len(logprobs) for logprobs in given.values()] == [20]


# ---- speculation --------------------------------------------------------------------------------


def test_speculation_needs_fewer_steps_and_takes_back_rejected_slots():
    plain, fast = engine(page_size=1), engine(page_size=1, speculation=Speculation(4, 1))
    for served in (plain, fast):
        served.submit([1, 2, 3] * 4, max_tokens=40)
    rejected = 0
    while fast.scheduler.has_work:
        step = fast.plan()
        (chunk,) = step.chunks
        table = chunk.request.table
        assert table.num_blocks == chunk.end
        (output,) = fast.land()
        rejected += len(chunk.drafts) + 1 - len(output.tokens) if chunk.drafts else 0
        if fast.scheduler.has_work:
            assert table.num_blocks == len(chunk.request.tokens) - 1
    assert rejected
    plain.finish()
    assert fast.scheduler.num_steps < 0.6 * plain.scheduler.num_steps


def test_drafts_never_reach_beyond_the_last_token():
    served = engine(speculation=Speculation(8, min_match=1))
    request = served.submit([5] * 10, max_tokens=4)
    while served.scheduler.has_work:
        step = served.step()
        assert max(chunk.end for chunk in step.chunks) < request.max_length


def test_a_penalty_forbids_drafts():
    served = engine(speculation=Speculation(8, min_match=1))
    request = served.submit([5] * 10, max_tokens=4, repetition_penalty=1.2)
    while served.scheduler.has_work:
        assert not served.step().chunks[0].drafts
    served.check(request)


def test_drafts_are_dropped_before_anybody_is_preempted():
    served = engine(num_pages=12, page_size=1, speculation=Speculation(8, 1), max_running=2)
    served.submit([5] * 4, max_tokens=7)
    served.finish()
    assert served.scheduler.queue.num_preemptions == 0


# ---- order and fairness -------------------------------------------------------------------------


def test_requests_that_write_get_a_token_in_every_step_beside_a_long_prompt():
    served = engine(step_tokens=8, context=200)
    writers = [served.submit([1, 2], max_tokens=40) for _ in range(3)]
    served.step()
    long = served.submit([3] * 60, max_tokens=2)
    sizes = []
    while not long.num_written:
        step = served.step()
        by_request = {chunk.request: len(chunk.tokens) for chunk in step.chunks}
        assert [by_request[writer] for writer in writers] == [1, 1, 1]
        sizes.append(by_request[long])
    assert sizes == [5] * 12


def test_nobody_overtakes_the_request_that_waits_longest():
    served = engine(num_pages=16, has_prefix_cache=False)
    first = served.submit([1] * 30, max_tokens=20)
    large = served.submit([2] * 40, max_tokens=4)
    small = served.submit([3], max_tokens=2)
    ends = []
    while served.scheduler.has_work:
        served.step()
        if large.state is State.WAITING:
            assert small.state is State.WAITING
        ends += [r for r in (first, large, small) if r.finish_reason and r not in ends]
    assert ends.index(first) < ends.index(large)


def test_the_last_come_is_preempted_first_and_is_first_to_return():
    served = engine(num_pages=14, page_size=1, max_running=3, has_prefix_cache=False)
    requests = [served.submit([i], max_tokens=9) for i in range(3)]
    lost = []
    while served.scheduler.has_work:
        step = served.step()
        lost += step.preempted
    assert lost[0] is requests[2]
    assert requests[0] not in lost
    assert requests[0].ended_at <= requests[1].ended_at <= requests[2].ended_at
    for request in requests:
        served.check(request)


def test_a_prompt_starts_when_all_of_it_has_room():
    served = engine(num_pages=16, has_prefix_cache=False)
    first = served.submit([1] * 30, max_tokens=8)
    second = served.submit([2] * 40, max_tokens=2)
    while served.scheduler.has_work:
        served.step()
        assert second.state is State.WAITING or first.state is State.FINISHED
    assert served.scheduler.queue.num_preemptions == 0


def test_a_running_request_has_a_page_to_spare_before_another_starts():
    served = engine(num_pages=4, has_prefix_cache=False, context=12)
    first = served.submit([1] * 4, max_tokens=8)
    for _ in range(3):
        served.step()
    assert (first.table.num_blocks, len(first.tokens)) == (2, 7)
    second = served.submit([2] * 4, max_tokens=2)
    while served.scheduler.has_work:
        served.step()
        assert second.state is State.WAITING or first.state is State.FINISHED
    assert served.scheduler.queue.num_preemptions == 0


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


def test_a_crowd_ends_in_a_tiny_cache():
    served = engine(num_pages=8, max_running=8, max_waiting=1000, context=24)
    dice = random.Random(1)
    requests = [
        served.submit(dice.choices(range(VOCAB), k=dice.randint(1, 10)), max_tokens=10)
        for _ in range(150)
    ]
    served.finish(is_overlapped=True)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


# ---- limits -------------------------------------------------------------------------------------


def refused(served, prompt, **parameters):
    with pytest.raises(InvalidArgument) as caught:
        served.submit(prompt, "x", **parameters)
    assert not served.scheduler.has_work
    served.scheduler.check_integrity()
    return str(caught.value)


def test_a_prompt_longer_than_the_cache_is_refused():
    served = engine(num_pages=5, context=64)
    assert refused(served, [1] * 17) == (
        "a prompt of 17 tokens and one token to write are 18 tokens, and the cache has room for "
        "17: shorten the prompt or lower max_tokens"
    )
    request = served.submit([1] * 16)
    served.finish()
    served.check(request)
    assert (request.num_written, request.finish_reason) == (1, FinishReason.LENGTH)


def test_a_prompt_longer_than_the_context_is_refused():
    served = engine(context=20)
    message = "and the context has room for 20"
    assert message in refused(served, [1] * 20)
    assert message in refused(served, [1] * 10, max_tokens=11)
    request = served.submit([1] * 10)  # as many as the context has room for
    served.finish()
    assert request.num_written == 10


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB]])
def test_prompts_that_no_embedding_serves_are_refused(prompt):
    assert "must" in refused(engine(vocab_size=VOCAB), prompt)


def test_an_id_is_used_once_at_a_time():
    served = engine()
    request = served.submit([1], "a", max_tokens=1)
    with pytest.raises(InvalidArgument, match="'a' has been submitted"):
        served.submit([1], "a")
    served.finish()
    with pytest.raises(InvalidArgument, match="'a' has been submitted"):
        served.scheduler.submit(request)
    served.submit([1], "a", max_tokens=1)


def test_a_full_queue_says_so_and_empties():
    served = engine(max_waiting=3, max_running=1)
    for _ in range(3):
        served.submit([1], max_tokens=2)
    with pytest.raises(QueueFull, match="3 requests wait, and the limit is 3"):
        served.submit([1])
    served.step()
    served.submit([1], max_tokens=1)
    served.finish()


def test_a_thousand_requests_wait():
    served = engine(max_waiting=1000, step_tokens=64, max_running=64)
    requests = [served.submit([i % VOCAB, i % 3], max_tokens=2) for i in range(1000)]
    while served.scheduler.has_work:
        served.step()
    assert all(request.num_written == 2 for request in requests)
    served.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_running": 0}, "must be positive"),
        ({"max_waiting": 0}, "must be positive"),
        ({"context": 1}, "context at least 2"),
        ({"max_chunk": -1}, "must be positive"),
        ({"step_tokens": 7}, "step_tokens=7 must be at least max_running=8"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    with pytest.raises(InvalidArgument, match=message):
        engine(**limits)


def test_a_window_needs_pages_for_the_chunks_in_flight():
    groups = [LayerGroup("window", 11, 9)]  # 10 pages; two chunks of 16 span 8 + 32 tokens
    with pytest.raises(InvalidArgument, match=r"group window has 10 pages .* need 11: give"):
        FakeEngine(groups, 4, Limits(16, 8, 8, 64))
    FakeEngine(groups, 4, Limits(16, 8, 8, 64, max_chunk=14))


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "hot"},
        {"temperature": float("inf")}, {"temperature": True}, {"top_k": -1}, {"top_k": 1.5},
        {"top_k": None}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2},
        {"repetition_penalty": 0}, {"seed": 1 << 63}, {"max_tokens": 0}, {"logprobs": 21},
        {"stop": ("",)}, {"stop": "END"}, {"stop": ("a",) * 17}, {"stop": (1,)},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_out_of_range_are_refused_by_name(parameters):
    (name,) = parameters
    with pytest.raises(InvalidArgument, match=name):
        SamplingParameters(**parameters)


# ---- ends ---------------------------------------------------------------------------------------


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


# ---- steps that overlap -------------------------------------------------------------------------


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


# ---- times --------------------------------------------------------------------------------------


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


# ---- the proof ----------------------------------------------------------------------------------


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


# ---- ten thousand steps -------------------------------------------------------------------------


def test_memory_stays_flat_over_ten_thousand_steps_of_mixed_sizes():
    """Python's memory whenever all requests have ended, and the addresses of all buffers."""
    dice, ids = random.Random(0), itertools.count()
    groups = [LayerGroup("all", 100), LayerGroup("window", 60, 32)]
    limits = Limits(step_tokens=64, max_running=8, max_waiting=8, context=300, max_chunk=48)
    manager = BlockManager(groups, 8, 38)
    scheduler, arrays = Scheduler(manager, limits), StepArrays(manager, limits)
    common = dice.choices(range(1000), k=40)
    buffers = [*arrays._by_token.values(), *arrays._by_row.values(), arrays._tables]
    addresses = [buffer.ctypes.data for buffer in buffers]
    previous, num_ended, num_cached, batches = None, 0, 0, set()

    def submit():
        prompt = dice.choice((common, [])) + dice.choices(range(1000), k=dice.choice((1, 30, 200)))
        text = TextStream(lambda tokens: "x" * len(tokens), ["y"])
        parameters = SamplingParameters(max_tokens=dice.randint(1, 40), stop=("y",))
        scheduler.submit(Request(str(next(ids)), prompt, parameters, text))

    def advance():
        nonlocal previous, num_ended, num_cached
        step = scheduler.schedule()
        if step is not None:
            arrays.fill(step)
            batches.add((len(step.chunks), step.max_q))
        if previous is not None:
            for output in scheduler.update(previous, [dice.randrange(9)] * previous.num_rows):
                num_ended += output.finish_reason is not None
                num_cached += output.request.num_cached > 0
        if scheduler.num_steps % 97 == 0 and scheduler.queue.running:
            scheduler.cancel(scheduler.queue.running[-1].id)
        previous = step

    def finish(num_steps):
        """Runs ``num_steps`` more steps under load, then until all requests have ended."""
        end = scheduler.num_steps + num_steps
        while scheduler.num_steps < end:
            while len(scheduler.queue.waiting) < 3:
                submit()
            advance()
        while scheduler.has_work or previous:
            advance()
        scheduler.check_integrity()
        gc.collect()

    num_objects = []
    for _ in range(9):
        finish(1000)
        num_objects.append(sys.getallocatedblocks())
    tracemalloc.start()
    try:
        finish(1000)
        growth = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # the first thousand steps fill the prefix cache
    assert max(num_objects) - num_objects[0] < 500
    # what was made before tracing is not subtracted when it is replaced: the hashes of all pages
    assert growth < 160 * 600
    assert [buffer.ctypes.data for buffer in buffers] == addresses
    assert arrays.tokens.base is arrays._by_token["tokens"]
    assert min(num_ended, num_cached, len(batches)) > 100
    assert scheduler.queue.num_preemptions > 20


# ---- arrays -------------------------------------------------------------------------------------


def test_arrays_describe_the_step():
    served = engine(0, 6, step_tokens=12)
    served.submit([1, 2], max_tokens=9, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=5)
    served.submit([3] * 15, max_tokens=9, repetition_penalty=2.0, seed=-6)
    served.step()
    first, second = served.scheduler.queue.running
    step, arrays = served.plan(), served.arrays
    assert [(chunk.start, chunk.end) for chunk in step.chunks] == [(2, 3), (10, 15)]
    assert arrays.tokens.tolist() == [first.tokens[2], 3, 3, 3, 3, 3]
    assert arrays.positions.tolist() == [2, 10, 11, 12, 13, 14]
    assert arrays.cu_q.tolist() == [0, 1, 6]
    assert arrays.kv_lens.tolist() == [3, 15]
    assert arrays.rows.tolist() == [0, 5]
    assert arrays.offset.tolist() == [3, 15]
    assert arrays.seed.tolist() == [5, -6]
    assert arrays.temperature.tolist() == [0.5, 0]
    assert arrays.top_k.tolist() == [7, 0]
    assert arrays.top_p.tolist() == [0.75, 1]
    assert arrays.min_p.tolist() == [0.25, 0]
    assert arrays.repetition_penalty.tolist() == [1, 2]
    for g, table in enumerate(arrays.block_tables):
        assert table[0, :1].tolist() == first.table.pages[g, :1].tolist()
        assert table[1, :4].tolist() == second.table.pages[g, :4].tolist()
    assert arrays.block_tables[1][1, 0] == 0 != arrays.block_tables[0][1, 0]  # before the window


def test_padding_is_sequences_of_one_token_in_slots_of_the_null_page():
    served = engine(0, 6)
    for _ in range(3):
        served.submit([1, 2, 3], max_tokens=9)
    served.step()
    step, arrays = served.scheduler.schedule(), served.arrays
    arrays.fill(step, batch=8)
    assert arrays.cu_q.tolist() == list(range(9))
    assert arrays.kv_lens.tolist() == [4, 4, 4, 1, 2, 3, 4, 1]
    assert arrays.positions.tolist() == [3, 3, 3, 0, 1, 2, 3, 0]
    assert arrays.rows.tolist() == list(range(8))
    assert arrays.temperature.tolist() == [0] * 8
    assert arrays.top_p.tolist() == arrays.repetition_penalty.tolist() == [1] * 8
    for table in arrays.block_tables:
        assert table[3:, 0].tolist() == [0] * 5
        assert table[:3, 0].all()
    arrays.fill(step, batch=3)
    assert len(arrays.kv_lens) == len(arrays.tokens) == 3
    for batch in (2, 9):
        with pytest.raises(InvalidArgument, match=f"3 sequences and cannot be padded to {batch}"):
            arrays.fill(step, batch)


def test_a_step_with_a_prompt_is_not_padded():
    served = engine()
    served.submit([1, 2, 3], max_tokens=9)
    step = served.scheduler.schedule()
    with pytest.raises(InvalidArgument, match="only steps whose requests have one new token"):
        served.arrays.fill(step, 4)


def test_buffers_come_from_the_caller():
    made = []

    def allocate(shape, dtype):
        made.append(np.zeros(shape, dtype))
        return made[-1]

    served = engine()
    arrays = StepArrays(served.manager, served.limits, 3, allocate)
    assert arrays.tokens.base is made[0]
    assert len(arrays._by_row["rows"]) == 16  # no more rows than tokens


def test_the_largest_step_fits():
    served = engine(step_tokens=40, max_running=8, speculation=Speculation(4, 1))
    for _ in range(8):
        served.submit([5] * 5, max_tokens=30)
    served.finish()
    assert max(len(output.tokens) for output in served.outputs) > 1
