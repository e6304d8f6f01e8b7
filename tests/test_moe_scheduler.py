"""The scheduler: the same tokens whatever happens, speculation, and a fair order."""

from __future__ import annotations

import random

import pytest
from fake_model import VOCAB, engine

from kernelcat.moe.engine.request import FinishReason, State
from kernelcat.moe.engine.speculation import Speculation

WINDOWS = ((0,), (0, 6), (5,))


def prompts(count=8, seed=0):
    """Prompts, half of which begin with the same tokens."""
    dice = random.Random(seed)
    common = [dice.randrange(VOCAB) for _ in range(13)]
    return [
        (common if i % 2 else []) + [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
        for i in range(count)
    ]


# ---- the same tokens -----------------------------------------------------------------------------

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
    "padded": {"batches": (1, 2, 4)},
    "speculation, padded": {
        "speculation": Speculation(3, min_match=1), "batches": (1, 2, 4), "step_tokens": 32,
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
    if "padded" in name:
        assert served.sizes_used & {*served.sizes.decode(), *served.sizes.verify()}
        assert ("speculation" in name) == bool(served.sizes_used & {*served.sizes.verify()})
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


# ---- speculation ---------------------------------------------------------------------------------


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


# ---- order and fairness --------------------------------------------------------------------------


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


def test_a_crowd_ends_in_a_tiny_cache():
    served = engine(num_pages=8, max_running=8, max_waiting=1000, context=24)
    dice = random.Random(1)
    requests = [
        served.submit(dice.choices(range(VOCAB), k=dice.randint(1, 10)), max_tokens=10)
        for _ in range(150)
    ]
    served.finish(is_overlapped=True)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
