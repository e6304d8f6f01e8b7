"""Offload of blocks to host memory, and their fetch: what is planned, and that tokens stay."""

from __future__ import annotations

import pytest
from fake_model import PAGE_BYTES, engine

from kernelcat.moe.engine.fetch_policy import FetchPolicy
from kernelcat.moe.engine.pages import IntegrityError
from kernelcat.moe.engine.request import FinishReason

SIZE = 4
PROMPT = [1, 2, 3, 4, 5, 6, 0, 2] * 4


def served_with_a_cold_prefix(*windows, salt="", **options):
    """An engine whose pages have forgotten `PROMPT`, which host memory has."""
    settings = {"num_pages": 20, "num_slots": 60, "step_tokens": 64, **options}
    served = engine(*windows, **settings)
    served.submit(PROMPT, salt=salt, max_tokens=2)
    served.finish()
    evict(served)
    return served


def evict(served, count=4):
    """Other requests, one after another, that need all pages."""
    for i in range(count):
        served.submit([i, 6, 6, i] * 9, max_tokens=2)
        served.finish()
        served.end_transfers()
    assert served.manager.num_cached_blocks(hashes(served)) == 0


def hashes(served):
    """Those of the blocks that a request with `PROMPT` may share."""
    request = served.submit(PROMPT, "hashes", max_tokens=1)
    served.scheduler.queue._open(request)
    served.scheduler.queue._close(request)
    served.scheduler.cancel("hashes")
    return request.hashes[: (len(PROMPT) - 1) // SIZE]


def fetched(served):
    return served.manager.host.numbers().get("fetched_tokens_total", 0)


@pytest.mark.parametrize("windows", [(0,), (0, 6), (5,), (3, 0)], ids=str)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_fetched_prefix_writes_the_same_tokens(is_overlapped, windows):
    served = served_with_a_cold_prefix(*windows)
    request = served.submit([*PROMPT, 3, 3], max_tokens=12)
    other = served.submit([5, 5, 5], max_tokens=20)
    served.finish(is_overlapped)
    for each in (request, other):
        served.check(each)
    assert request.num_cached == len(PROMPT)
    assert fetched(served) == len(PROMPT)
    again = served.submit([*PROMPT, 3, 3], max_tokens=12)  # the pages have the prefix now
    served.finish(is_overlapped)
    served.check(again)
    assert again.num_cached == len(PROMPT) and fetched(served) == len(PROMPT)


def test_a_window_fetches_only_what_the_next_query_reads():
    served = served_with_a_cold_prefix(0, 6)
    served.submit([*PROMPT, 3], max_tokens=1)
    served.plan()
    [transfer] = [each for each in served.transfers if each.is_fetch]
    blocks = len(PROMPT) // SIZE
    assert sum(move.group == 0 for move in transfer.moves) == blocks
    assert sum(move.group == 1 for move in transfer.moves) == 2  # the last 5 tokens of the prefix


def test_blocks_in_pages_are_shared_and_others_fetched():
    served = served_with_a_cold_prefix(0, 6)
    shorter = served.submit(PROMPT[:13], max_tokens=1)
    served.finish()
    before = fetched(served)
    request = served.submit([*PROMPT, 3], max_tokens=1)
    served.finish()
    served.check(request)
    assert (shorter.num_cached, request.num_cached) == (12, len(PROMPT))
    assert fetched(served) - before == len(PROMPT) - 12


def test_salted_requests_share_nothing_in_host_memory():
    served = served_with_a_cold_prefix(salt="a tenant")
    request = served.submit([*PROMPT, 3], salt="another", max_tokens=4)
    served.finish()
    served.check(request)
    assert request.num_cached == fetched(served) == 0
    mine = served.submit([*PROMPT, 3], salt="a tenant", max_tokens=4)
    evict(served, 0)
    served.finish()
    assert mine.num_cached == fetched(served) == len(PROMPT)


def test_steps_of_others_run_while_blocks_arrive():
    served = served_with_a_cold_prefix()
    other = served.submit([5, 5], max_tokens=10)
    served.step()
    request = served.submit([*PROMPT, 3], max_tokens=2)
    for count in range(2, 6):
        step = served.step()
        assert [chunk.request for chunk in step.chunks] == [other]
        assert other.num_written == count
        served.scheduler.check_integrity()
    served.end_transfers()
    assert request in [chunk.request for chunk in served.step().chunks]
    served.finish()
    for each in (request, other):
        served.check(each)


def test_a_prefix_that_arrives_for_two_requests_is_fetched_once():
    served = served_with_a_cold_prefix()
    both = [served.submit([*PROMPT, i], max_tokens=3) for i in range(2)]
    served.plan()
    assert len([each for each in served.transfers if each.is_fetch]) == 1
    served.end_transfers()
    served.finish()
    for request in both:
        served.check(request)
        assert request.num_cached == len(PROMPT)
    assert fetched(served) == len(PROMPT)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_pages_of_an_abandoned_fetch_get_another_owner(is_preempted):
    """The late copy must end before the next owner's step, or the owner reads the prefix."""
    served = served_with_a_cold_prefix(num_pages=16)
    request = served.submit([*PROMPT, 3], "request", max_tokens=3)
    assert served.plan() is None
    [transfer] = [each for each in served.transfers if each.is_fetch]
    if is_preempted:
        assert served.scheduler.queue.preempt() is request
    else:
        served.scheduler.cancel("request")
    served.scheduler.check_integrity()
    assert transfer.is_abandoned and transfer in served.transfers
    owner = served.submit([4, 6] * 20, max_tokens=9)
    if is_preempted:
        served.plan()
        assert any(each is not transfer and each.is_fetch for each in served.transfers)
    served.finish(is_overlapped=True)
    served.check(owner)
    if is_preempted:
        served.check(request)
    assert request.num_written == (3 if is_preempted else 0)


def test_a_full_host_memory_forgets_what_was_used_least_recently():
    served = served_with_a_cold_prefix(num_slots=12)
    request = served.submit([*PROMPT, 3], max_tokens=2)
    served.finish()
    served.check(request)
    assert request.num_cached == fetched(served) == 0
    assert served.manager.host.slots[0].num_used == 12


def test_a_page_that_is_taken_while_its_copy_runs_is_not_stored():
    served = engine(num_pages=20, num_slots=60, step_tokens=64)
    served.submit(PROMPT, max_tokens=2)
    served.finish()
    served.end_transfers()
    served.submit([5, 6, 6, 5] * 9, max_tokens=2)
    served.step()
    served.step()
    served.submit([6] * 24, max_tokens=2)  # needs pages that are copied since the last step
    [offload] = served.transfers
    served.step()
    host, pool = served.manager.host, served.manager.pools[0]
    taken = [m for m in offload.moves if pool.num_forgotten(m.page) > m.num_forgotten]
    assert 0 < len(taken) < len(offload.moves)
    served.end_transfer(offload)
    assert {m.hash for m in offload.moves if not host.knows(0, m.hash)} == {m.hash for m in taken}
    served.finish()


def test_a_failed_step_empties_host_memory():
    served = served_with_a_cold_prefix()
    request = served.submit([*PROMPT, 3], max_tokens=5)
    other = served.submit([5, 5], max_tokens=3)
    served.plan()  # the other request's step, while blocks arrive
    [output] = served.fail()
    assert output.request is other and output.finish_reason is FinishReason.ERROR
    assert served.manager.host.slots[0].num_used == 0
    served.scheduler.check_integrity()
    served.finish()
    served.check(request)


# ---- the policy ----------------------------------------------------------------------------------


def test_a_short_prefix_is_computed_anew():
    served = served_with_a_cold_prefix(policy=FetchPolicy(len(PROMPT) + 1, 1e9))
    request = served.submit([*PROMPT, 3], max_tokens=2)
    served.finish()
    served.check(request)
    assert request.num_cached == fetched(served) == 0


def test_a_prefix_is_fetched_where_that_is_predicted_to_be_faster():
    policy = FetchPolicy(100, bandwidth=1e6)
    assert policy.is_worth(100, 10**9) and not policy.is_worth(99, 1)
    policy.observe(255, 100.0)  # too small to tell
    assert policy.seconds_per_token is None
    policy.observe(1000, 1.0)
    assert policy.is_worth(1000, 999_999) and not policy.is_worth(1000, 1_000_000)
    policy.observe(1000, 3.0)
    assert policy.seconds_per_token == pytest.approx(1.5e-3)


def test_bytes_ahead_on_the_bus_count():
    tokens = len(PROMPT)
    policy = FetchPolicy(1, bandwidth=1.0)
    # the time of one and a half such prefixes
    policy.seconds_per_token = 1.5 * PAGE_BYTES * (tokens // SIZE) / tokens
    served = served_with_a_cold_prefix(policy=policy)
    host = served.manager.host
    assert host.is_worth(tokens, [0] * (tokens // SIZE))
    served.submit([*PROMPT, 3], max_tokens=2)
    served.plan()
    assert not host.is_worth(tokens, [0] * (tokens // SIZE))
    same = served.submit([*PROMPT, 4], max_tokens=2)  # needs no bytes beyond those
    served.plan()
    served.finish()
    assert same.num_cached == fetched(served) == tokens


# ---- the proof -----------------------------------------------------------------------------------


def end_without_a_word(served, request):
    served.manager.host.started.clear()


def publish_too_early(served, request):
    served.manager.pools[0].publish(int(request.table.pages[0, 0]), b"early")


def forget_the_wait(served, request):
    request.table.transfer = None


def forget_what_arrives(served, request):
    served.manager.host._arriving.pop()


def unlock_a_slot(served, request):
    served.manager.host.slots[0].unlock(request.hashes[0])


@pytest.mark.parametrize(
    "plant",
    [end_without_a_word, publish_too_early, forget_the_wait, forget_what_arrives, unlock_a_slot],
)
def test_each_planted_fault_is_found(plant):
    served = served_with_a_cold_prefix()
    request = served.submit([*PROMPT, 3], max_tokens=2)
    served.plan()
    served.scheduler.check_integrity()
    plant(served, request)
    with pytest.raises(IntegrityError):
        served.scheduler.check_integrity()
